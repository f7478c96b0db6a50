"""Names in a run's directory that several files use. Imports nothing: torch waits until the number of threads is settled."""

TENSORBOARD, LOGGER_ID = "tensorboard", "logger-id"
"""What loggers leave there, unless the file names other folders."""
