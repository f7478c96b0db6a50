"""Resolves what a file leaves to the run: batch sizes, epochs and "auto"."""
