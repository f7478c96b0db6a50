"""Names in a run's directory. Imports nothing: torch must be imported after the number of threads is set."""

TENSORBOARD, LOGGER_ID = "tensorboard", "logger-id"
"""Default names of the loggers' files."""
