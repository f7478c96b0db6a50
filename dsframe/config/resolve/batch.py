"""The batch triangle: train_batch_size = micro-batch size x accumulation steps x data-parallel ranks. Never floors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dsframe.config.read.findings import Findings
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.file import File

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Number of samples in each step, and how they are sharded among ranks."""

    train_batch_size: int
    """Samples in one optimizer step, over all ranks."""
    micro_batch_size: int
    """Samples in one forward and backward pass of one data-parallel rank."""
    accumulation_steps: int
    """Micro-batches of one rank in one optimizer step."""
    data_parallel_size: int
    """Groups of ranks that read different samples."""
    derived: tuple[str, ...] = ()
    """One sentence for each value that the file does not give."""
    deepspeed_ranks: int = field(default=0, repr=False)
    """Ranks by which DeepSpeed computes its ``train_batch_size``: it counts tensor-parallel ranks as data parallel."""
    tensor_parallel_size: int = 1
    """Ranks that split each layer among themselves. They are neighbours, and read the same samples."""
    sequence_parallel_size: int = 1
    """Ranks that split each sample along time. They are neighbours too; the check refuses both at once."""

    @property
    def sharing(self) -> int:
        """Neighbours that read the same samples."""
        return self.tensor_parallel_size * self.sequence_parallel_size

    def data_rank(self, rank: int) -> int:
        """Return the shard of each global batch that ``rank`` reads: 0 to ``data_parallel_size`` - 1.

        DeepSpeed's order of ranks: pipeline stages outermost, tensor-parallel ranks innermost
        (``runtime/pipe/topology.py``, PipeModelDataParallelTopology).
        """
        return rank // self.sharing % self.data_parallel_size

    @property
    def deepspeed_train_batch_size(self) -> int:
        """``train_batch_size`` in DeepSpeed's counting."""
        return self.micro_batch_size * self.accumulation_steps * self.deepspeed_ranks


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest(number: int, unit: int) -> str:
    """The multiples of ``unit`` below and above ``number``, for a message."""
    lower = number // unit * unit
    return " or ".join(str(n) for n in (lower, lower + unit) if n)


def replica_size(file: DeepSpeed) -> tuple[int, dict[str, int]]:
    """Return how many ranks together hold one model replica, and the factors by key."""
    factors = {
        "pipeline.stages": file.pipeline.stages,
        "tensor_parallel.autotp_size": max(1, file.tensor_parallel.autotp_size),
        "sequence_parallel_size": file.sequence_parallel_size or 1,
    }
    factors = {key: value for key, value in factors.items() if value > 1}
    return math.prod(factors.values()), factors


def solve(file: File, world_size: int, findings: Findings, replicas: bool = False) -> Batch | None:
    """Return the batch sizes on ``world_size`` processes; problems go to ``findings``. ``replicas``: one model on each.

    With replicas the file means the same samples in a step as without: DeepSpeed's way of counting tensor-parallel ranks is
    kept, though there are none.
    """
    tensor = max(1, file.tensor_parallel.autotp_size)
    size, factors = (1, {}) if replicas else replica_size(file)
    if world_size % size:
        product = " x ".join(f"{value} ({key})" for key, value in factors.items())
        if len(factors) > 1:
            product += f" = {size}"
        path = tuple(next(iter(factors)).split("."))
        message, remedy = f"{world_size} processes are not divisible by {product}", f"start {nearest(world_size, size)}"
        findings.error(path, message, remedy, code="world", at_value=True)
        return None
    # DeepSpeed forgets tensor-parallel ranks when it checks the triangle (measured: 2 ranks, autotp_size 2, micro 4
    # want train_batch_size 8, although a step reads 4 different samples).
    data_parallel = world_size // size
    ranks = data_parallel * tensor
    train, micro, steps = file.train_batch_size, file.train_micro_batch_size_per_gpu, file.gradient_accumulation_steps
    if train is None and micro is None:
        missing(findings)
        return None
    if train is not None and not _divides(train, micro, steps, ranks, findings):
        return None
    derived: list[str] = []
    if train is None:
        steps = steps or _derive(derived, STEPS, 1, "absent")
    elif micro is not None:
        how = f"{train} / {micro} (micro) / {ranks} (ranks)"
        steps = steps or _derive(derived, STEPS, train // micro // ranks, how)
    else:
        steps = steps or _derive(derived, STEPS, 1, "absent")
        how = f"{train} / {steps} (accumulation) / {ranks} (ranks)"
        micro = _derive(derived, MICRO, train // steps // ranks, how)
    assert micro is not None
    if train is None:
        how = f"{micro} (micro) x {steps} (accumulation) x {data_parallel} (data-parallel ranks)"
        _derive(derived, TRAIN, micro * steps * data_parallel, how)
    elif data_parallel != ranks:
        findings.note(
            (TRAIN,),
            f"DeepSpeed counts the {ranks // data_parallel} ranks of a tensor-parallel group as data parallel: "
            f"{train} means {micro * steps * data_parallel} different samples in a step",
            code="batch",
        )
    samples = micro * steps * data_parallel
    shared = (1, 1) if replicas else (tensor, file.sequence_parallel_size or 1)
    return Batch(samples, micro, steps, data_parallel, tuple(derived), ranks, *shared)


def check_groups(file: File, world_size: int, findings: Findings) -> None:
    """Report groups of ranks that cannot be made of ``world_size`` processes, besides those of ``replica_size``."""
    secondary = min(file.zero_optimization.zero_hpz_partition_size, world_size)
    if file.zero_optimization.stage == 3 and secondary > 1 and world_size % secondary:
        message = f"{secondary} does not divide {world_size} processes: DeepSpeed raises"
        remedy = "write the number of processes of a host"
        findings.error(("zero_optimization", "zero_hpz_partition_size"), message, remedy, code="world", at_value=True)
    data, sequence = file.data_parallel_size, file.sequence_parallel_size
    if data and sequence and data * sequence != world_size:
        message = f"{data} x sequence_parallel_size {sequence} is not {world_size} processes: DeepSpeed raises"
        remedy = f"write {world_size // sequence}" if world_size % sequence == 0 else ""
        findings.error(("data_parallel_size",), message, remedy, code="world", at_value=True)


def missing(findings: Findings) -> None:
    """Report that the file gives no batch size at all."""
    findings.error((), "no batch size: DeepSpeed needs one", f'write "{TRAIN}" or "{MICRO}"', code="batch")


def _derive(derived: list[str], key: str, value: int, how: str) -> int:
    derived.append(f"{key} = {value}" + (" (DeepSpeed's default)" if how == "absent" else f" = {how}"))
    return value


def _divides(train: int, micro: int | None, steps: int | None, ranks: int, findings: Findings) -> bool:
    unit = (micro or 1) * (steps or 1)
    parts = [f"{micro} (micro)"] if micro else []
    parts += [f"{steps} (accumulation)"] if steps else []
    parts += [f"{ranks} (data-parallel ranks)"]
    product = " x ".join(parts) + (f" = {unit * ranks}" if len(parts) > 1 else "")
    if micro and steps:
        if train == unit * ranks:
            return True
        remedy = "remove one of the three and dsframe computes it"
        if train % unit == 0:
            remedy += f", or start {train // unit} data-parallel ranks"
        findings.error((TRAIN,), f"{train} != {product}", remedy, code="batch", at_value=True)
        return False
    if train % (unit * ranks) == 0:
        return True
    near = nearest(train, unit * ranks)
    worlds = [n for n in divisors(train // unit) if n != ranks] if train % unit == 0 else []
    several = train >= unit * ranks
    remedy = f"the nearest legal batch sizes are {near}" if several else f"the smallest legal batch size is {near}"
    if worlds:
        close = sorted(sorted(worlds, key=lambda n: abs(n - ranks))[:4])
        remedy += f"; legal numbers of data-parallel ranks near {ranks}: {', '.join(map(str, close))}"
    findings.error((TRAIN,), f"{train} is not divisible by {product}", remedy, code="batch", at_value=True)
    return False
