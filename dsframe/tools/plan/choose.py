"""Lists the strategies for a model on a number of processes, each as a file, the best first.

All keep the global batch, so they train the same; only the location of state differs. The best is the simplest that
fits: one device, replicas, ZeRO, offload. Pipeline and tensor parallelism are predicted only if the file has them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dsframe import engines
from dsframe.config import Batch, Config, Facts, load
from dsframe.config.read import overrides
from dsframe.errors import ConfigError
from dsframe.text import Json
from dsframe.tools.plan.device import Device
from dsframe.tools.plan.footprint import Prediction, predict
from dsframe.tools.plan.model import Model

Patch = Json
"""Sections of a file to replace; None removes one."""
_REPLICAS = {"ddp": "DDP", "horovod": "Horovod", "fsdp": "FSDP"}
"""Engines that use no sections of DeepSpeed -> their names in the plan."""
_STAGES = ((1, ""), (2, ""), (3, ""), (2, "optimizer"), (3, "optimizer"), (3, "all"))
"""ZeRO stages and what is offloaded, from simple to complex."""
_OFFLOADED = {"": "", "optimizer": ", optimizer on the CPU", "all": ", all on the CPU"}


@dataclass(frozen=True)
class Strategy:
    """A file that could run, and its predicted memory."""

    name: str
    file: Json
    prediction: Prediction
    recomputes: bool = False
    """True if blocks are recomputed, although the original file does not ask for it."""


@dataclass(frozen=True)
class Plan:
    """The possibilities on one number of processes."""

    world_size: int
    as_written: Strategy
    strategies: Sequence[Strategy]
    """Those that fit first, simplest first."""
    refused: Mapping[str, str]
    """Name of a strategy that is not possible with this file -> why."""

    @property
    def fits(self) -> bool:
        """True if the original file fits."""
        return self.as_written.prediction.fits


def _given(config: Config) -> Json:
    """Returns a deep copy of the user's file, with overrides and unresolved ``"auto"``."""
    raw: Json = copy.deepcopy(config.findings.document.root)
    overrides.apply(raw, config.overrides, config.findings.empty_copy())
    return raw


def plan(config: Config, model: Model, device: Device, world_size: int) -> Plan:
    """Returns the plan. Raises ConfigError if the original file cannot run on so many processes."""
    engine = engines.named(config.settings.engine)
    problems, _ = engines.examine(config, engine)
    if problems:
        raise ConfigError(problems)
    given = predict(config, engine, model, device, world_size)
    written = Strategy("as written", _given(config), given)
    strategies: list[Strategy] = []
    refused: dict[str, str] = {}

    files = [("", config)]
    if model.recomputed and config.settings.model.recomputation is None:
        files.append((", blocks computed twice", load(_recomputing(config))))
    for name, other, patch in _candidates(config, world_size):
        best: Strategy | None = None
        for suffix, file in files:
            if best is None or not best.prediction.fits:
                try:
                    best = _best(name + suffix, file, other, patch, (model, device, world_size))
                except ConfigError as error:
                    refused[name + suffix] = str(error).splitlines()[0].removeprefix("error: ")
        if best is not None:
            strategies.append(best)
    return Plan(world_size, written, sorted(strategies, key=_order), refused)


def _recomputing(config: Config) -> Json:
    file = _given(config)
    section = file.setdefault("dsframe", {})
    section["model"] = section.get("model", {}) | {"activation_checkpointing": True}
    return file


def _best(name: str, config: Config, engine: str, patch: Patch, run: tuple[Model, Device, int]) -> Strategy:
    """Returns the patched file with the largest micro-batch that fits. Raises ConfigError."""
    model, device, world_size = run
    recomputes = config.settings.model.activation_checkpointing is True
    other, batches = _micro_batches(config, engine, patch, world_size)
    options = []
    for batch in batches:
        prediction = predict(other, engine, model, device, world_size, batch)
        sizes = {
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.accumulation_steps,
        }
        options.append(Strategy(name, _given(other) | sizes, prediction, recomputes))
    best = min(options, key=_order)
    load(best.file, facts=other.facts)  # raises for micro-batches that are refused
    return best


def _order(strategy: Strategy) -> tuple[bool, bool, float]:
    """Sort key: what fits with room, what fits tightly, then the rest by how much is missing. What fits is ordered
    by cost in time: recomputation, optimizer on the CPU, parameters on the CPU. Equals keep their order, simplest
    first."""
    prediction = strategy.prediction
    if not prediction.fits:
        return True, True, prediction.fullness
    zero = strategy.file.get("zero_optimization") or {}
    offloaded = 4 if "offload_param" in zero else 2 if "offload_optimizer" in zero else 0
    return False, prediction.tight, offloaded + strategy.recomputes


def _candidates(config: Config, world_size: int) -> Iterator[tuple[str, str, Patch]]:
    """Yields name, engine and changes to the file, from simple to complex."""
    replicas = {"single": "one process"} if world_size == 1 else _REPLICAS
    for engine, name in replicas.items():
        yield name, engine, {"zero_optimization": None}
    for stage, offload in _STAGES:
        patch: Patch = {"zero_optimization": _zero(config, stage, offload), "pipeline": None, "tensor_parallel": None}
        yield f"ZeRO-{stage}{_OFFLOADED[offload]}", engines.DEFAULT, patch


def _zero(config: Config, stage: int, offload: str) -> Patch:
    """Returns the file's section with another stage and offload."""
    section = dict(_given(config).get("zero_optimization", {})) | {"stage": stage}
    for key, wanted in (("offload_optimizer", offload), ("offload_param", offload == "all")):
        section.pop(key, None)
        if wanted:
            section[key] = {"device": "cpu"}
    return section


def _micro_batches(config: Config, engine: str, patch: Patch, world_size: int) -> tuple[Config, list[Batch]]:
    """Returns the patched file with a micro-batch of one sample, and every batch with the same global batch, largest
    micro-batch first. Raises ConfigError if dsframe does not accept it."""
    as_written = engines.TABLE[engines.named(config.settings.engine)].replicas
    samples = config.batch(world_size, replicas=as_written).train_batch_size
    file = {key: value for key, value in _given(config).items() if key not in patch}
    file |= {key: value for key, value in patch.items() if value is not None}
    file["dsframe"] = file.get("dsframe", {}) | {"engine": engine}
    for size in ("train_batch_size", "gradient_accumulation_steps"):
        file.pop(size, None)
    file["train_micro_batch_size_per_gpu"] = 1
    other = load(file, facts=Facts(world_size=world_size, replicas=engines.TABLE[engine].replicas))
    batch = other.batch(world_size)
    problems, _ = engines.examine(other, engine)
    share, remainder = divmod(samples, batch.data_parallel_size)
    if remainder:
        message = f"{samples} samples a step cannot be divided among {batch.data_parallel_size} processes"
        remedy = "choose a train_batch_size that they divide"
        problems = [*problems, other.error(("train_batch_size",), message, remedy, code="batch")]
    if problems:
        raise ConfigError(problems)
    sizes = reversed(_divisors(share))  # among equals, fewest passes first
    return other, [
        replace(batch, train_batch_size=samples, micro_batch_size=size, accumulation_steps=share // size)
        for size in sizes
    ]


def _divisors(number: int) -> list[int]:
    """Returns at most six powers of two that divide ``number``, and ``number`` itself if it is small."""
    powers = [2**power for power in range(number.bit_length()) if number % 2**power == 0]
    if number <= 64:
        powers = sorted({*powers, number})
    return powers if len(powers) <= 6 else [*powers[:5], powers[-1]]
