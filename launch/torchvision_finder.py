"""Lets ``import torchvision`` work in the environment of ``make setup`` where torch is a CPU build and torchvision is PyPI's.

launch/setup copies this file into site-packages beside a .pth file that imports it, where torchvision cannot be imported
otherwise. Before the first import of torchvision it has dsframe define what is missing (dsframe/data/_torchvision.py
says what and why); until then it costs nothing.
"""

import sys


class Finder:
    """Finds nothing: it only hears first that torchvision is wanted."""

    def find_spec(self, name, path=None, target=None):
        """Returns None: the finders after this one find torchvision."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            from dsframe.data import _torchvision

            _torchvision.define_operators()


sys.meta_path.insert(0, Finder())
