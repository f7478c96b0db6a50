"""Observers that a file switches on: profiler traces, FLOPs, bytes sent."""
