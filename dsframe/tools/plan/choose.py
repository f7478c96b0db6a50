"""Which strategies there are for a model on so many processes, as files of their own, and which of them is best.

All are the same training: the global batch stays, and what changes is where state lies and how the model is cut. The order of
preference among equals is from simple to involved: one device as it is, ZeRO, offload, then cuts of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from dsframe import engines
from dsframe.config import Config, Facts, load
from dsframe.errors import ConfigError
from dsframe.tools.plan.hardware import Hardware
from dsframe.tools.plan.model import Model
from dsframe.tools.plan.predict import Prediction, predict

Patch = dict[str, Any]
SAME = 1.03
"""Times the seconds of a step, or the lack of memory, of the best: less is no difference that predictions tell."""
TILES = (1, 4, 16)
"""Pieces of a large linear layer (Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.3)."""
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


def engine_of(config: Config) -> str:
    """The engine that a file names; DeepSpeed where the launcher would choose."""
    return engines.named(config.settings.engine)


def as_written(
    config: Config, model: Model, hardware: Hardware, world_size: int, seconds_each: float | None = None
) -> Strategy:
    """The file as it is. Raises ConfigError where it cannot run on so many processes."""
    name = engine_of(config)
    refused, _ = engines.examine(config, name)
    if refused:
        raise ConfigError(refused)
    found = predict(config, name, model, hardware, world_size, seconds_each=seconds_each)
    return Strategy("as written", config.written(), found)


def strategies(
    config: Config, model: Model, hardware: Hardware, world_size: int, seconds_each: float | None = None
) -> list[Strategy]:
    """Every strategy that the file may have on ``world_size`` processes, each with its best micro-batch: fitting ones first,
    those that fit with little to spare behind them, each by seconds a step; of those whose seconds differ by less than
    predictions tell, the simplest."""
    samples = as_written(config, model, hardware, world_size).prediction.batch.train_batch_size
    found = []
    for name, engine, patch in _candidates(config, model, hardware, world_size):
        own = _best(config, name, engine, patch, model, hardware, world_size, samples, seconds_each)
        tiled = "dsframe" in patch  # which has no effect on blocks that are computed twice
        if own is not None and not own.prediction.fits and model.layered and not tiled:
            again = patch | {"dsframe": {"model": {"activation_checkpointing": True}}}
            name += ", blocks computed twice"
            own = _best(config, name, engine, again, model, hardware, world_size, samples, seconds_each) or own
        if own is not None:
            found.append(own)
    ordered: list[Strategy] = []
    while found:
        ordered.append(_first(found))
        found.remove(ordered[-1])
    return ordered


def _first(options: Sequence[Strategy]) -> Strategy:
    """The earliest of those that are as good as the best."""
    *kind, best = min(map(_rank, options))
    return next(one for one in options if [*_rank(one)[:2]] == kind and _rank(one)[2] <= SAME * best)


def _best(
    config: Config,
    name: str,
    engine: str,
    patch: Patch,
    model: Model,
    hardware: Hardware,
    world_size: int,
    samples: int,
    seconds_each: float | None,
) -> Strategy | None:
    """The patched file with its best micro-batch; None where there is none."""
    options = [
        Strategy(name, file, predict(other, engine, model, hardware, world_size, seconds_each=seconds_each))
        for file, other in _variants(config, engine, patch, samples, world_size)
    ]
    return _first(options) if options else None


def _rank(strategy: Strategy) -> tuple[bool, bool, float]:
    """What fits, what fits only just, what does not; of equals the fastest, or that which lacks least."""
    prediction = strategy.prediction
    if not prediction.fits:
        return True, True, prediction.fullness
    return False, prediction.tight, prediction.seconds.step


def _candidates(config: Config, model: Model, hardware: Hardware, world_size: int) -> Iterator[tuple[str, str, Patch]]:
    """Name, engine and changes to the file, from simple to involved."""
    for engine, entry in engines.BUILT_IN.items():
        if entry.strategy and (entry.size == "one") == (world_size == 1):
            yield entry.strategy, engine, {"zero_optimization": None}
    cuts = [(1, 1)]
    pipes = [size for size in _powers(world_size) if model.layered and size <= len(model.segments) // 2]
    slices = [size for size in _powers(min(world_size, hardware.devices)) if model.heads and model.heads % size == 0]
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
    section = dict(config.written().get("zero_optimization", {})) | {"stage": stage}
    for key, wanted in (("offload_optimizer", bool(offload)), ("offload_param", offload == "all")):
        section.pop(key, None)
        if wanted:
            section[key] = {"device": "cpu"}
    return section


def _variants(
    config: Config, engine: str, patch: Patch, samples: int, world_size: int
) -> Iterator[tuple[dict[str, Any], Config]]:
    """The patched file with every micro-batch size that makes ``samples`` a step, as far as dsframe accepts it."""
    file = config.written()
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
    replicas = engines.TABLE[engine].replicas
    try:
        other = load(file, facts=Facts(world_size=world_size, replicas=replicas))
        ranks = other.batch(world_size, replicas=replicas).data_parallel_size
        refused, _ = engines.examine(other, engine)
    except ConfigError:
        return
    if refused or samples % ranks:
        return
    for micro in reversed(_divisors(samples // ranks)):  # of equal ones, that with the fewest passes
        sized = file | {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": samples // ranks // micro,
        }
        yield sized, load(sized, facts=Facts(world_size=world_size, replicas=replicas))


def _divisors(number: int, most: int = 6) -> list[int]:
    """Powers of two that divide ``number``, and itself: at most so many, evenly chosen."""
    found = [size for size in (1, *_powers(number)) if number % size == 0]
    found = sorted({*found, number}) if number <= 64 else found
    return found if len(found) <= most else found[: most - 1] + found[-1:]
