"""Parts around a model that are the same on every engine: building, optimizer, schedule, switches, state."""
