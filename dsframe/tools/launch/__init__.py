"""``dsframe launch``: one command for every launcher, on one node or several, restarting from checkpoints."""
