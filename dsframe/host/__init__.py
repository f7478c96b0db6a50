"""One host: cores, memory, signals to a process tree, and what killed runs leave behind."""
