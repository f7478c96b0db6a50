"""Traces of a profiler, and models without memory."""
