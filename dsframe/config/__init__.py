"""Reading and checking ``ds_config.json``. Imports neither torch nor DeepSpeed.

>>> from dsframe.config import load
>>> config = load("zero3.json", overrides=["dsframe.steps=50"])   # doctest: +SKIP
"""

from __future__ import annotations

from dsframe.config.features import Feature, features
from dsframe.config.load import DEFAULT_CONFIG, Config, find, load
from dsframe.config.resolve.auto import Facts
from dsframe.config.resolve.batch import Batch
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import CustomTask, LanguageTask, Settings, VisionTask

__all__ = [
    "DEFAULT_CONFIG",
    "Batch",
    "Config",
    "CustomTask",
    "DeepSpeed",
    "Facts",
    "Feature",
    "LanguageTask",
    "Settings",
    "VisionTask",
    "features",
    "find",
    "load",
]
