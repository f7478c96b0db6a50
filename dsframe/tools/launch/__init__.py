"""``dsframe launch``: one command for every launcher, on one host or many, with restarts from the newest checkpoint."""
