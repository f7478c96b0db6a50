"""dsframe: one ds_config.json, the same training on DeepSpeed, Horovod and DDP, under any launcher.

Public names are imported on first use, so importing dsframe costs nothing and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dsframe.version import __version__

if TYPE_CHECKING:
    from dsframe.config import Config as Config
    from dsframe.config import load as load
    from dsframe.data.source import Source as Source
    from dsframe.errors import DsframeError as DsframeError
    from dsframe.hooks import Hooks as Hooks
    from dsframe.hooks import RunView as RunView
    from dsframe.inference import load_model as load_model
    from dsframe.model.gathered import gathered as gathered
    from dsframe.results import Summary as Summary
    from dsframe.run import fit as fit
    from dsframe.tasks.average_of import average_of as average_of
    from dsframe.tasks.layers import Tied as Tied
    from dsframe.tasks.task import Sum as Sum
    from dsframe.tasks.task import Task as Task
    from dsframe.train import main as main

_HOMES = {
    "fit": "dsframe.run",
    "main": "dsframe.train",
    "load_model": "dsframe.inference",
    "gathered": "dsframe.model.gathered",
    "Config": "dsframe.config",
    "load": "dsframe.config",
    "Source": "dsframe.data.source",
    "DsframeError": "dsframe.errors",
    "Hooks": "dsframe.hooks",
    "RunView": "dsframe.hooks",
    "Sum": "dsframe.tasks.task",
    "Task": "dsframe.tasks.task",
    "Tied": "dsframe.tasks.layers",
    "average_of": "dsframe.tasks.average_of",
    "Summary": "dsframe.results",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
