"""Switches the stand-in on in every process that has this folder on PYTHONPATH, and DSFRAME_STANDIN: right after torch."""

import importlib.abc
import importlib.util
import os
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as everybody does, and imports ``tests.standin.switch_on`` when its module has run."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        run = spec.loader.exec_module

        def run_and_switch_on(module):
            run(module)
            importlib.import_module("tests.standin.switch_on")

        spec.loader.exec_module = run_and_switch_on
        return spec


if os.environ.get("DSFRAME_STANDIN"):
    sys.meta_path.insert(0, _AfterTorch())
