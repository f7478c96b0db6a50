"""The batch triangle: train_batch_size = micro-batch size x accumulation steps x data-parallel ranks. Never rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dsframe.config.read.findings import Findings
from dsframe.config.schema.deepspeed import DeepSpeed

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Number of samples in each step, and how they are sharded over ranks."""

    train_batch_size: int
    """Samples in one optimizer step, over all ranks."""
    micro_batch_size: int
    """Samples in one forward and backward pass of one data-parallel rank."""
    accumulation_steps: int
    """Micro-batches of one rank in one optimizer step."""
    data_parallel_size: int
    """Groups of ranks that read different samples."""
    derived: tuple[str, ...] = ()
    """One sentence for each value that is not in the file."""
    deepspeed_ranks: int = field(default=0, repr=False)
    """Ranks that DeepSpeed uses for its ``train_batch_size``: it counts tensor-parallel ranks as data parallel."""
    tensor_parallel_size: int = 1
    """Ranks that split each layer. They are adjacent and read the same samples."""
    sequence_parallel_size: int = 1
    """Ranks that split each sample along time. They are adjacent too; both sizes above 1 are refused."""

    @property
    def sharing(self) -> int:
        """Number of adjacent ranks that read the same samples."""
        return self.tensor_parallel_size * self.sequence_parallel_size

    def data_rank(self, rank: int) -> int:
        """Returns the shard of each global batch that ``rank`` reads: 0 to ``data_parallel_size`` - 1.

        DeepSpeed's order of ranks: pipeline stages outermost, tensor-parallel ranks innermost
        (``runtime/pipe/topology.py``, PipeModelDataParallelTopology).
        """
        return rank // self.sharing % self.data_parallel_size


def nearest(number: int, unit: int) -> str:
    """Returns the multiples of ``unit`` below and above ``number``, for a message."""
    lower = number // unit * unit
    return " or ".join(str(n) for n in (lower, lower + unit) if n)


def replica_size(file: DeepSpeed) -> tuple[int, dict[str, int]]:
    """Returns how many ranks hold one model replica together, and the factors by key."""
    factors = {
        "pipeline.stages": file.pipeline.stages,
        "tensor_parallel.autotp_size": max(1, file.tensor_parallel.autotp_size),
        "sequence_parallel_size": file.sequence_parallel_size or 1,
    }
    factors = {key: value for key, value in factors.items() if value > 1}
    return math.prod(factors.values()), factors


def solve(file: DeepSpeed, world_size: int, findings: Findings, replicas: bool = False) -> Batch | None:
    """Returns the batch sizes on ``world_size`` processes; problems go to ``findings``. ``replicas``: each has a full
    model.

    With replicas a step has the same samples as without, so DeepSpeed's counting of tensor-parallel ranks is kept.
    """
    tensor, sequence = max(1, file.tensor_parallel.autotp_size), file.sequence_parallel_size or 1
    size, factors = (1, {}) if replicas else replica_size(file)
    if world_size % size:
        message = f"{world_size} processes are not divisible by {_product(factors, size)}"
        remedy = f"start {nearest(world_size, size)}"
        findings.error(next(iter(factors)), message, remedy, code="world", at_value=True)
        return None
    # DeepSpeed counts tensor-parallel ranks as data parallel when it checks the triangle (measured: 2 ranks,
    # autotp_size 2, micro 4 need train_batch_size 8, although a step reads 4 different samples).
    data_parallel = world_size // size
    ranks = data_parallel * tensor
    if not check(file, findings, ranks):
        return None
    train, micro, steps = file.train_batch_size, file.train_micro_batch_size_per_gpu, file.gradient_accumulation_steps
    derived: list[str] = []
    if steps is None and train is not None and micro is not None:
        steps = train // micro // ranks
        derived.append(f"{STEPS} = {steps} = {train} / {micro} (micro) / {ranks} (ranks)")
    elif steps is None:
        steps = 1
        derived.append(f"{STEPS} = 1 (DeepSpeed's default)")
    if micro is None:
        assert train is not None
        micro = train // steps // ranks
        derived.append(f"{MICRO} = {micro} = {train} / {steps} (accumulation) / {ranks} (ranks)")
    samples = micro * steps * data_parallel
    if train is None:
        how = f"{micro} (micro) x {steps} (accumulation) x {data_parallel} (data-parallel ranks)"
        derived.append(f"{TRAIN} = {samples} = {how}")
    elif data_parallel != ranks:
        message = (
            f"DeepSpeed counts the {ranks // data_parallel} ranks of a tensor-parallel group as data parallel: "
            f"{train} means {samples} different samples in a step"
        )
        findings.note(TRAIN, message, code="batch")
    sharing = (1, 1) if replicas else (tensor, sequence)
    return Batch(samples, micro, steps, data_parallel, tuple(derived), ranks, *sharing)


def check(file: DeepSpeed, findings: Findings, ranks: int | None = None) -> bool:
    """Reports batch sizes that disagree on ``ranks`` data-parallel ranks, or on any number. Returns True if they
    agree."""
    train, micro, steps = file.train_batch_size, file.train_micro_batch_size_per_gpu, file.gradient_accumulation_steps
    if train is None:
        if micro is None:
            findings.error((), "no batch size: DeepSpeed needs one", f'write "{TRAIN}" or "{MICRO}"', code="batch")
        return micro is not None
    factors = {"micro": micro, "accumulation": steps, "data-parallel ranks": ranks}
    given = {name: value for name, value in factors.items() if value}
    unit = math.prod(given.values())
    exact = len(given) == 3
    if train == unit or (train % unit == 0 and not exact):
        return True
    message = f"{train} {'!=' if exact else 'is not divisible by'} {_product(given, unit if ranks else 0)}"
    remedy = "remove one of the three and dsframe computes it"
    if not exact:
        message += "" if ranks else ", on any number of processes"
        remedy = f"write {nearest(train, unit)}"
    findings.error(TRAIN, message, remedy, code="batch", at_value=True)
    return False


def _product(factors: Mapping[str, int], result: int) -> str:
    """Returns ``2 (micro) x 4 (accumulation) = 8``; without the result if it is 0 or there is one factor."""
    text = " x ".join(f"{value} ({name})" for name, value in factors.items())
    return f"{text} = {result}" if len(factors) > 1 and result else text


def check_groups(file: DeepSpeed, world_size: int, findings: Findings) -> None:
    """Reports groups of ranks that do not fit ``world_size`` processes, other than those of ``replica_size``."""
    data, sequence = file.data_parallel_size, file.sequence_parallel_size
    if data and sequence and data * sequence != world_size:
        message = f"{data} x sequence_parallel_size {sequence} is not {world_size} processes: DeepSpeed raises"
        remedy = f"write {world_size // sequence}" if world_size % sequence == 0 else ""
        findings.error("data_parallel_size", message, remedy, code="world", at_value=True)
