"""Reads and checks ``ds_config.json``. Imports neither torch nor DeepSpeed.

>>> from dsframe.config import load
>>> config = load("zero3.json", overrides=["dsframe.steps=50"])   # doctest: +SKIP
"""

from __future__ import annotations

from dsframe.config.features import Feature as Feature
from dsframe.config.features import features as features
from dsframe.config.load import default_config as default_config
from dsframe.config.load import find as find
from dsframe.config.load import load as load
from dsframe.config.resolve.batch import Batch as Batch
from dsframe.config.resolve.facts import Facts as Facts
from dsframe.config.schema.deepspeed import DeepSpeed as DeepSpeed
from dsframe.config.schema.settings import CustomTask as CustomTask
from dsframe.config.schema.settings import LanguageTask as LanguageTask
from dsframe.config.schema.settings import Settings as Settings
from dsframe.config.schema.settings import VisionTask as VisionTask
from dsframe.config.value import Config as Config
