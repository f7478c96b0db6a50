"""Which strategies there are for a model on so many processes, as files of their own, and which of them is best.

All are the same training: the global batch stays, and what changes is where state lies and how the model is cut. Of those
that fit the simplest is best: one device as it is, replicas, ZeRO, offload, then cuts of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from dsframe import engines
from dsframe.config import Config, Facts, load
from dsframe.errors import ConfigError
from dsframe.tools.plan.device import Device
from dsframe.tools.plan.model import Model
from dsframe.tools.plan.predict import Prediction, predict

Patch = dict[str, Any]
TILES = (1, 4, 16)
"""Pieces of a large linear layer (Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.3)."""
MOST_SLICES = 8
"""Of tensor parallelism: GPUs of one host, as it is usually built."""
_REPLICAS = {"ddp": "DDP", "horovod": "Horovod", "fsdp": "FSDP"}
"""Engines beside DeepSpeed, as the plan calls them."""
_BUCKETS = ("stage3_max_live_parameters", "reduce_bucket_size")
_NOTHING_AHEAD = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
"""Parameters come to the device when they are needed, and go at once."""


@dataclass(frozen=True)
class Strategy:
    """A file that could run, and what it would take."""

    name: str
    file: Mapping[str, Any]
    """The whole file, ready to be written."""
    prediction: Prediction
    recomputes: bool = False
    """Blocks are computed twice, which the file as it is written does not ask for."""


@dataclass(frozen=True)
class Plan:
    """What is possible on one number of processes."""

    world_size: int
    as_written: Strategy
    strategies: Sequence[Strategy]
    """Those that fit first, the simplest of them first."""
    refused: Mapping[str, str]
    """What this file cannot be turned into: name of a strategy -> why."""


def engine_of(config: Config) -> str:
    """The engine that a file names; DeepSpeed where the launcher would choose."""
    return engines.named(config.settings.engine)


def plan(config: Config, model: Model, device: Device, world_size: int) -> Plan:
    """Raises ConfigError where the file as it is cannot run on so many processes."""
    engine = engine_of(config)
    problems, _ = engines.examine(config, engine)
    if problems:
        raise ConfigError(problems)
    own = Strategy("as written", config.given(), predict(config, engine, model, device, world_size))
    samples = own.prediction.batch.train_batch_size
    strategies: list[Strategy] = []
    refused: dict[str, str] = {}

    def attempt(name: str, engine: str, patch: Patch, *, recomputes: bool = False) -> Strategy | None:
        """The patched file with the largest micro-batch that fits."""
        options = []
        try:
            for file, other in _variants(config, engine, patch, samples, world_size):
                options.append(Strategy(name, file, predict(other, engine, model, device, world_size), recomputes))
        except ConfigError as error:
            refused[name] = str(error).splitlines()[0].removeprefix("error: ")
            return None
        return min(options, key=_rank)

    for name, other_engine, patch in _candidates(config, model, world_size):
        strategy = attempt(name, other_engine, patch)
        tiled = "dsframe" in patch  # which has no effect on blocks that are computed twice
        if strategy is not None and not strategy.prediction.fits and model.layered and not tiled:
            again = patch | {"dsframe": {"model": {"activation_checkpointing": True}}}
            strategy = attempt(f"{name}, blocks computed twice", other_engine, again, recomputes=True) or strategy
        if strategy is not None:
            strategies.append(strategy)
    return Plan(world_size, own, sorted(strategies, key=_rank), refused)


def _rank(strategy: Strategy) -> tuple[bool, bool, float]:
    """Sorts what fits before what fits only just, and by what it costs in time. Equals keep their order, the simplest first.

    Blocks computed twice cost less than the optimizer on the CPU, and that less than parameters there. Of what does not fit,
    that comes first which lacks least.
    """
    prediction = strategy.prediction
    if not prediction.fits:
        return True, True, prediction.fullness
    zero = strategy.file.get("zero_optimization") or {}
    offloaded = 4 if "offload_param" in zero else 2 if "offload_optimizer" in zero else 0
    return False, prediction.tight, offloaded + strategy.recomputes


def _candidates(config: Config, model: Model, world_size: int) -> Iterator[tuple[str, str, Patch]]:
    """Name, engine and changes to the file, from simple to involved."""
    replicas = {"single": "one process"} if world_size == 1 else _REPLICAS
    for engine, name in replicas.items():
        yield name, engine, {"zero_optimization": None}
    cuts = [(1, 1)]
    pipes = [size for size in _powers(world_size) if model.layered and size <= len(model.segments) // 2]
    slices = [size for size in _powers(min(world_size, MOST_SLICES)) if model.heads and model.heads % size == 0]
    cuts += [(1, tensor) for tensor in slices]
    cuts += [(stages, tensor) for stages in pipes for tensor in (1, *slices)]
    for stages, tensor in cuts:
        if world_size % (stages * tensor):
            continue
        for zero, offload in ((1, ""), (2, ""), (3, ""), (2, "optimizer"), (3, "optimizer"), (3, "all")):
            if (stages > 1 and (zero > 1 or offload)) or (tensor > 1 and offload):
                continue
            patch: Patch = {"zero_optimization": _zero(config, zero, offload)}
            patch["pipeline"] = {"stages": stages} if stages > 1 else None
            patch["tensor_parallel"] = {"autotp_size": tensor} if tensor > 1 else None
            cut = [f"{stages} stages"] * (stages > 1) + [f"tensor {tensor}"] * (tensor > 1)
            off = {"": [], "optimizer": ["optimizer on the CPU"], "all": ["all on the CPU"]}[offload]
            yield ", ".join([f"ZeRO-{zero}", *off, *cut]), engines.DEFAULT, patch
    for pieces in TILES:  # what helps where a few large layers are too much, once everything else is on the host
        names, largest = _tiled(model, pieces)
        if not largest:  # nothing is known of the model but its size
            return
        patch = {"zero_optimization": _zero(config, 3, "all") | dict.fromkeys(_BUCKETS, largest) | _NOTHING_AHEAD}
        patch |= {"pipeline": None, "tensor_parallel": None}
        if pieces == 1:
            yield "ZeRO-3, all on the CPU, one layer at a time", engines.DEFAULT, patch
        elif names:
            tiling = {"modules": names, "out_splits": pieces}
            patch["dsframe"] = {"model": {"tiling": tiling}}
            yield f"ZeRO-3, all on the CPU, large layers in {pieces} tiles", engines.DEFAULT, patch


def _tiled(model: Model, pieces: int) -> tuple[list[str], int]:
    """The linear layers to cut, and the most elements that are then needed at a time: no tile is to be larger than what cannot be
    cut, or than the largest layer's tiles."""
    linears = [one for segment in model.segments for one in segment.linears]
    sizes: dict[str, int] = {}  # of the largest layer that a pattern matches
    tiles: dict[str, int] = {}
    for one in linears:
        if one.rows:
            pattern = _pattern(one.name, model.layered)
            sizes[pattern] = max(one.elements, sizes.get(pattern, 0))
            tiles[pattern] = max(one.elements // one.rows * -(-one.rows // pieces), tiles.get(pattern, 0))

    def can_be_cut(pattern: str) -> bool:
        """A layer with fewer rows, or none, keeps all that the pattern matches from being cut."""
        return all(one.rows >= pieces for one in linears if fnmatch(_full(one.name, model.layered), pattern))

    cut = [pattern for pattern in sizes if can_be_cut(pattern)]
    whole = [size for pattern, size in sizes.items() if pattern not in cut]
    bound = max([*(segment.largest for segment in model.segments), *whole, *(tiles[pattern] for pattern in cut)])
    return sorted(pattern for pattern in cut if sizes[pattern] > bound), bound


def _pattern(name: str, within_layer: bool) -> str:
    """What ``tiling.modules`` calls a layer and those like it in other blocks: ``*.expand``, ``h.*.expand``; ``2`` is one."""
    *parts, last = name.split(".")
    parts = ["*" if part.isdecimal() else part for part in parts]
    return ".".join(["*"] * within_layer + [*parts, last])


def _full(name: str, within_layer: bool) -> str:
    """A layer's name in the model; any number will do for patterns that have none."""
    return f"0.{name}" if within_layer else name


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(1, limit.bit_length()) if 2**power <= limit]


def _zero(config: Config, stage: int, offload: str) -> Patch:
    """The file's own section with another stage."""
    section = dict(config.given().get("zero_optimization", {})) | {"stage": stage}
    for key, wanted in (("offload_optimizer", bool(offload)), ("offload_param", offload == "all")):
        section.pop(key, None)
        if wanted:
            section[key] = {"device": "cpu"}
    return section


def _variants(
    config: Config, engine: str, patch: Patch, samples: int, world_size: int
) -> Iterator[tuple[dict[str, Any], Config]]:
    """The patched file with every micro-batch size that makes ``samples`` a step, the largest first.

    Raises ConfigError where dsframe does not accept it.
    """
    file = config.given()
    for key, value in patch.items():
        if key == "dsframe":
            continue
        file.pop(key, None)
        if value is not None:
            file[key] = value
    section = dict(file.get("dsframe", {}))
    for key, value in patch.get("dsframe", {}).items():
        section[key] = dict(section.get(key, {})) | value
    file["dsframe"] = section | {"engine": engine}
    for size in ("train_batch_size", "gradient_accumulation_steps"):
        file.pop(size, None)
    file["train_micro_batch_size_per_gpu"] = 1
    facts = Facts(world_size=world_size, replicas=engines.TABLE[engine].replicas)
    other = load(file, facts=facts)
    ranks = other.batch(world_size).data_parallel_size
    problems, _ = engines.examine(other, engine)
    if samples % ranks:
        message = f"{samples} samples a step cannot be divided among {ranks} processes"
        remedy = "choose a train_batch_size that they divide"
        problems = [*problems, other.error(("train_batch_size",), message, remedy, code="batch")]
    if problems:
        raise ConfigError(problems)
    for micro in reversed(_divisors(samples // ranks)):  # of equal ones, that with the fewest passes
        sized = file | {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": samples // ranks // micro,
        }
        yield sized, load(sized, facts=facts)


def _divisors(number: int, most: int = 6) -> list[int]:
    """Powers of two that divide ``number``, and itself: at most so many, evenly chosen."""
    found = [size for size in (1, *_powers(number)) if number % size == 0]
    found = sorted({*found, number}) if number <= 64 else found
    return found if len(found) <= most else found[: most - 1] + found[-1:]
