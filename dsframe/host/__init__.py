"""The node: cores, memory, signals to a process tree, and leftovers of killed runs."""
