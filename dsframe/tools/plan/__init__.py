"""``dsframe plan``: memory of each rank before a run starts, and alternatives that fit."""
