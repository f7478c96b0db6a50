"""A run's directory: lock, record, progress, loggers, and how the run ended."""
