"""Everything around a model that is the same on every engine: optimizer, schedule, switches, loss weights, evaluation."""
