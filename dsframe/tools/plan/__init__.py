"""``dsframe plan``: memory, communication and time on each rank before a run starts, and what else would fit."""
