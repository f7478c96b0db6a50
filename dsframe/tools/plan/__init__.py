"""``dsframe plan``: memory and communication of each rank before a run starts, and what else would fit."""
