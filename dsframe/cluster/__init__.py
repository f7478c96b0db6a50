"""Which process this is, where the processes of a run meet, and how they open torch.distributed."""
