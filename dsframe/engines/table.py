"""The engines, as a table: each one's class, the package it needs, and what else dsframe needs to know of it.

Those that come with dsframe stand in ``BUILT_IN``. An engine from outside is an installed package with an entry point in the
group ``dsframe.engines``: its name in files -> ``module:ENTRY``, an ``Entry`` or a function that returns one, in a module that
imports nothing heavy. Nothing in dsframe is changed for it. Lies below the configuration, which checks the names in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsframe.errors import EngineError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "dsframe.engines"
"""The group of the entry points."""
DEFAULT = "deepspeed"
"""The meaning of ``"engine": "auto"`` if there is no launcher, as in ``dsframe check``."""

# Features that say where state lives, not what is computed: an engine of full replicas trains the same without them, and says so.
PLACEMENT = frozenset(
    {"zero1", "zero2", "zero3"}
    | {"offload_optimizer_cpu", "offload_optimizer_nvme", "partial_offload", "offload_param_cpu", "offload_param_nvme"}
)
# Keys that only a model that calls deepspeed.checkpointing itself can use. DeepSpeed's engine does not read them either.
MODELS_OWN = frozenset({"activation_checkpointing"})
# Features that make ranks leave updates out: all ranks have to leave out the same ones.
OVERFLOWS = frozenset({"fp16", "fp16_stage0", "autocast_fp16", "autocast_unsaid"})
REPLICA = (
    frozenset({"bf16", "autocast", "keep_in_fp32", "whole_parameters", "parameter_groups", "ema", "adapter"})
    | OVERFLOWS
)
# Features that shard one model, or its samples, among ranks: placement as well, but such ranks read the same samples.
CUTS = frozenset({"pipeline", "tensor_parallel", "sequence_parallel"})
# Experts that lie on other ranks: placement too, and such ranks read their own samples.
EXPERTS = frozenset({"expert_parallel"})
# Features that mean the same where a task has several models, each with an engine of its own.
SEVERAL = frozenset(
    {"zero1", "zero2", "zero3", "offload_optimizer_cpu", "offload_param_cpu", "gradient_sum"}
) | frozenset({"bf16", "whole_parameters", "parameter_groups", "ema", "fp16_compression"})
# Features that DeepSpeed 0.19.8 accepts and then trains another way. Source: ``runtime/engine.py`` (backward),
# ``runtime/zero/stage_1_and_2.py`` (unscale_and_clip_grads, step) and ``runtime/zero/stage3.py`` (backup_optimizer).
_OTHERWISE = {
    "fp16_stage0": "is refused: DeepSpeed 0.19.8 un-scales an unscaled loss at stage 0, so gradients would be too small",
    "autocast_fp16": "is refused: DeepSpeed 0.19.8 clips before it un-scales, and makes no update after the first overflow",
    "partial_offload": "is refused: the part that is not offloaded would ignore the schedule, and be missing in checkpoints; "
    "write 1.0",
}


@dataclass(frozen=True, eq=False, repr=False)
class Entry:
    """One engine."""

    target: str
    """``module:Class``, imported when the engine is chosen."""
    package: str | None = None
    """The package that must be installed, beyond torch."""
    install: str = ""
    """How to install it, if ``pip install`` alone does not work."""
    supports: frozenset[str] = frozenset()
    """Features (``dsframe.config.features``) that mean here what they mean to DeepSpeed."""
    replicates: frozenset[str] = frozenset()
    """Features that place state and do not change the training; this engine holds full replicas instead, and says so."""
    ignores: frozenset[str] = frozenset()
    """Features without which the training is the same; this engine goes without them, and says so."""
    otherwise: Mapping[str, str] = field(default_factory=dict)
    """Why a feature is refused, if there is more to say than that the engine does not support it."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """Feature -> the ``module:Class`` that takes the place of ``target`` where a file switches it on."""
    keeps: str = "a full replica on every rank"
    """What this engine keeps instead of what it replicates."""
    cost: str = "more memory"
    """The price of that."""
    size: str = "any"
    """Processes that it runs on: "any" number, "one", or one for each of the pipeline's "stages"."""
    launcher: str = "torchrun"
    """The one that belongs to this engine; any other may start it as well."""
    by_deepspeed: bool = False
    """True if DeepSpeed itself runs the file: then its own restrictions hold."""
    rules: str = ""
    """``module:function``, called with the ``RuleContext`` of a file for this engine: what it refuses beyond features."""
    options: str = ""
    """``module:Class``, a ``Section``: the keys of ``engine_options`` in the file's dsframe section; none: there are none."""
    several: frozenset[str] = frozenset()
    """Features that mean the same where a task has several models (``Task.models``); none: this engine trains one model."""
    caution: str = ""
    """What the user is told whenever this engine runs."""

    @property
    def replicas(self) -> bool:
        """True if every rank reads its own samples, even if the file shards models and sequences."""
        return self.replicates >= CUTS


BUILT_IN: dict[str, Entry] = {
    "deepspeed": Entry(
        "dsframe.engines.deepspeed.engine:ZeroEngine",
        package="deepspeed",
        launcher="deepspeed",
        supports=(PLACEMENT | CUTS | EXPERTS | REPLICA) - _OTHERWISE.keys() - {"keep_in_fp32"}
        | {
            "gradient_sum",
            "communication_data_type",
            "grad_accum_dtype",
            "skip_nonfinite",
        }
        | {"lamb", "lion", "muon", "quantized_base"},
        ignores=MODELS_OWN,
        otherwise={
            **_OTHERWISE,
            "keep_in_fp32": "is refused: DeepSpeed converts all parameters; torch_autocast instead of bf16 keeps all in fp32",
            "fp16_compression": "is an option of engine horovod; for DeepSpeed write communication_data_type",
            "gradient_hook": "is an option of engine ddp; for DeepSpeed write communication_data_type",
        },
        variants={"pipeline": "dsframe.engines.deepspeed.pipeline:PipelineEngine"},
        by_deepspeed=True,
        several=SEVERAL,
    ),
    "ddp": Entry(
        "dsframe.engines.ddp:DdpEngine",
        several=SEVERAL,
        supports=REPLICA | {"gradient_sum", "skip_nonfinite", "gradient_hook", "quantized_base"},
        replicates=PLACEMENT | CUTS | EXPERTS,
        ignores=MODELS_OWN,
    ),
    "horovod": Entry(
        "dsframe.engines.horovod.engine:HorovodEngine",
        package="horovod",
        install="compile it against this torch as docs/coming_from/horovod.md says (pip install horovod alone fails)",
        launcher="horovodrun",
        several=SEVERAL,
        supports=REPLICA | {"gradient_sum", "fp16_compression", "skip_nonfinite", "quantized_base"},
        replicates=PLACEMENT | CUTS | EXPERTS,
        ignores=MODELS_OWN,
    ),
    "fsdp": Entry(
        "dsframe.engines.fsdp:FsdpEngine",
        rules="dsframe.engines.rules:fsdp",
        several=SEVERAL,
        supports=REPLICA - {"whole_parameters"} | {"gradient_sum", "skip_nonfinite", "zero3"},
        replicates=PLACEMENT - {"zero3"} | CUTS | EXPERTS,
        ignores=MODELS_OWN,
        keeps="shards of everything on every rank, as at ZeRO stage 3 and where dsframe.fsdp says,",
        cost="another amount of memory",
    ),
    "single": Entry(
        "dsframe.engines.single:SingleEngine",
        several=SEVERAL,
        supports=REPLICA | {"gradient_sum", "skip_nonfinite", "quantized_base"},
        replicates=PLACEMENT | CUTS | EXPERTS,
        ignores=MODELS_OWN,
        size="one",
    ),
}


class _Table(Mapping[str, Entry]):
    """``BUILT_IN``, then what is installed. Packages are looked through only for a name that is not built in, or for all."""

    def __init__(self) -> None:
        self._outside: dict[str, list[EntryPoint]] | None = None
        self._loaded: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        """Raises KeyError where there is none, EngineError where the package does not give what it offers."""
        if name in BUILT_IN:
            return BUILT_IN[name]
        if name not in self._loaded:
            self._loaded[name] = _load(name, self._installed()[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        yield from BUILT_IN
        yield from (name for name in self._installed() if name not in BUILT_IN)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in BUILT_IN or name in self._installed()  # without loading it

    def _installed(self) -> dict[str, list[EntryPoint]]:
        if self._outside is None:
            from importlib.metadata import entry_points  # 20 ms, and more with each package that is installed

            self._outside = {}
            for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
                self._outside.setdefault(point.name, []).append(point)
        return self._outside


def _load(name: str, points: list[EntryPoint]) -> Entry:
    packages = " and ".join(sorted({point.dist.name if point.dist else point.value for point in points}))
    if len({point.value for point in points}) > 1:
        raise EngineError(f'engine "{name}" is offered by {packages}; uninstall all but one')
    try:
        loaded: Any = points[0].load()
        entry = loaded() if callable(loaded) else loaded
    except Exception as error:  # whatever a package that is not ours does when it is imported
        raise EngineError(f'engine "{name}" of the package {packages} cannot be loaded: {error}') from error
    if not isinstance(entry, Entry):
        raise EngineError(
            f'engine "{name}" of the package {packages} is {type(entry).__name__}, not dsframe.engines.Entry'
        )
    return entry


TABLE: Mapping[str, Entry] = _Table()
"""Name -> engine: those of dsframe, then those of installed packages, by name."""


def named(wanted: str) -> str:
    """The engine that a file names; ``DEFAULT`` where the launcher would choose."""
    return DEFAULT if wanted == "auto" else wanted
