# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""Sections of ``zero_optimization`` that few files have: offload, leaf modules. Sources: as for ``zero``."""

from typing import ClassVar, Literal

from dsframe.config.schema.base import Coerced, Fraction, Size

Device = Literal["none", "cpu", "nvme"]


class OffloadParam(Coerced):
    """Where stage 3 keeps the parameters that are not in use. Below stage 3 it has no effect."""

    device: Device = "none"
    """``cpu``, ``nvme``, or ``none`` for no offload."""
    nvme_path: str | None = None
    """Folder on the NVMe drive. Needed when ``device`` is ``nvme``."""
    buffer_count: Size = 5
    """Number of buffers between NVMe and the device."""
    buffer_size: Size = 100_000_000
    """Elements in one buffer. The largest parameter must fit."""
    max_in_cpu: Size = 1_000_000_000
    """Parameter elements that stay in CPU memory although ``device`` is ``nvme``."""
    pin_memory: bool = True
    """Page-locked CPU memory: faster copies, but it cannot be swapped out. Default true since DeepSpeed 0.19."""


class OffloadOptimizer(Coerced):
    """Where the optimizer's state lives and where its step is computed. Stages 1, 2 and 3."""

    device: Device = "none"
    """``cpu``, ``nvme`` (stage 3; stages 1 and 2 silently take ``cpu``), or ``none``. The step runs on the CPU either
    way."""
    nvme_path: str | None = None
    """Folder on the NVMe drive. Needed when ``device`` is ``nvme``."""
    buffer_count: Size = 4
    """Number of NVMe buffers: at least one for each state of a parameter (Adam: parameter, gradient, two moments)."""
    pin_memory: bool = True
    """Page-locked CPU memory: faster copies, but it cannot be swapped out. Default true since DeepSpeed 0.19."""
    pipeline_read: bool = False
    """Read the next tile from NVMe while the current one is computed."""
    pipeline_write: bool = False
    """Write the previous tile to NVMe while the current one is computed."""
    fast_init: bool = False
    """Faster set-up of the optimizer's state on NVMe."""
    ratio: Fraction = 1.0
    """Share of the parameters whose step is computed on the CPU (ZeRO-Offload++). Below 1.0 only at stage 3."""
    super_offload: bool = False
    """SuperOffload: for superchips such as GH200. CUDA and stage 3 only."""
    cpuadam_cores_perc: Fraction = 0.8
    """Share of the CPU cores for SuperOffload's Adam."""


class LeafModule(Coerced):
    """Modules that stage 3 fetches as one piece, for example mixtures of experts."""

    wraps: ClassVar[bool] = True

    classes: list[str] = [
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    ]
    """Class names, with or without their module."""
    names: list[str] = []
    """Full module names, such as ``model.layers.3.mlp``."""
    name_suffixes: list[str] = []
    """Ends of module names."""
