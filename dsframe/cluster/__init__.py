"""Rank and size of this process, the rendezvous of a run's processes, and the process group."""
