"""The run's directory: lock, record, progress, loggers, how the run ended."""
