"""Sections of ``zero_optimization`` that few files have: offload, leaf modules. Sources: as for ``zero``."""

from typing import ClassVar, Literal

from dsframe.config.schema.base import Coerced
from dsframe.config.schema.parameters import passed

Device = Literal["none", "cpu", "nvme"]


@passed
class OffloadParam(Coerced):
    """Where stage 3 keeps the parameters that are not in use. Below stage 3 it has no effect."""

    device: Device = "none"
    """``cpu``, ``nvme``, or ``none`` for no offload."""
    nvme_path: str | None = None
    """Folder on the NVMe drive. Needed when ``device`` is ``nvme``."""


@passed
class OffloadOptimizer(Coerced):
    """Where the optimizer's state lives and where its step is computed. Stages 1, 2 and 3."""

    device: Device = "none"
    """``cpu``, ``nvme`` (stage 3; stages 1 and 2 silently take ``cpu``), or ``none``. The step runs on the CPU either
    way."""
    nvme_path: str | None = None
    """Folder on the NVMe drive. Needed when ``device`` is ``nvme``."""


@passed
class LeafModule(Coerced):
    """Modules that stage 3 fetches as one piece, for example mixtures of experts."""

    wraps: ClassVar[bool] = True
