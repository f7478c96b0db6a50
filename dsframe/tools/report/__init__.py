"""``dsframe report``: reads the directories of runs and makes a page of them."""
