"""``dsframe report``: writes a page about the runs in given directories."""
