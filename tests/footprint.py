"""What each engine holds and sends, measured beside theory.

    python -m tests.footprint [CASE ...] [--processes 1 2 4]      # prints two tables (make footprint)

A GPT of 4 million parameters in fp32 with AdamW takes a few steps on every engine. After the backward pass and right before
the optimizer's update each rank looks at every tensor that is alive in it (the garbage collector knows them all), and counts
each block of memory once: as parameters where a module has it, as optimizer state where an optimizer has it, and everything
else as gradients, the buckets in which they travel included. Bytes sent are counted by ``dsframe.observe.communication``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsframe.config import load
from dsframe.config.resolve import memory
from dsframe.tools.plan.costs import costs_of
from tests.processes import run_ranks, torchrun

BUCKET = 32_768
"""Elements in DeepSpeed's reduction buckets; its default of 500 million would dwarf any small model."""
FILE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "dsframe": {
        "task": {
            "name": "language",
            "layers": 20,
            "heads": 4,
            "width": 128,
            "context": 16,
            "corpus": "synthetic",
            "samples": 64,
        }
    },
}


BF16 = {"bf16": {"enabled": True}}
OFF = 0.05
"""By how much memory may miss its formula."""


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, **more}}


def options(**more: Any) -> dict[str, Any]:
    """The dsframe section with further settings."""
    return {"dsframe": {**FILE["dsframe"], **more}}


# A model in two pieces: more context, so that activations are worth counting, and no weight on two stages.
LONG = options(task={**FILE["dsframe"]["task"], "context": 64, "tie_embeddings": False})
ACTIVATION_BYTES = 64 * 128 * 4
"""Of one micro-batch in LONG, between two blocks."""

Theory = Callable[[int, int, float], float]
"""Bytes that a rank sends in a step, from the number of ranks, of micro-batches, and the gradients' bytes."""


def ring(*, step: float = 0, micro: float = 0) -> Theory:
    """So many times (N - 1) / N of the gradients' bytes: once in a step, and again for each micro-batch."""
    return lambda ranks, micros, gradients: (step + micro * micros) * (ranks - 1) / ranks * gradients


def stages(ranks: int, micros: int, _: float) -> float:
    """Activations to the next stage and gradients to the one before: one of the two at the ends, both in the middle."""
    return min(ranks - 1, 2) * micros * ACTIVATION_BYTES


ALL_REDUCE, TWICE = ring(step=2), ring(micro=2, step=1)
SHARDS = options(deepspeed={"accumulate": "shards"})
EACH_TIME = "the same for each micro-batch"
ALL_REDUCE_GATHER = "DeepSpeed: all-reduce, all-gather"


@dataclass(frozen=True)
class Case:
    """An engine, its changes to FILE, and what theory says of it."""

    engine: str
    changes: dict[str, Any] = field(default_factory=dict)
    sent: Theory = ALL_REDUCE
    source: str = "ring all-reduce"
    """Where ``sent`` comes from."""
    splits: Callable[[int], dict[str, Any]] = lambda ranks: {}
    """Changes that depend on the number of processes. A case with such has processes of its own."""
    sizes: frozenset[int] = frozenset({1, 2, 4})
    """Numbers of processes that make sense."""
    whole: float = 0.0
    """Share of the parameters that every rank has, however the model is cut."""
    formula_holds: frozenset[int] = frozenset({1, 2, 4})
    """Numbers of processes on which memory is within ``OFF`` of the formula."""

    def file(self, ranks: int, accumulation: int = 1) -> dict[str, Any]:
        return {**FILE, **self.changes, **self.splits(ranks), "gradient_accumulation_steps": accumulation}

    def cost(self, ranks: int) -> memory.Cost:
        """Bytes of a parameter on a rank."""
        cut = self._cost(ranks)
        if not self.whole:
            return cut
        uncut = self._cost(1)
        kinds = ("parameter", "gradient", "optimizer")
        mixed = {kind: getattr(uncut, kind) * self.whole + getattr(cut, kind) * (1 - self.whole) for kind in kinds}
        return replace(cut, **mixed)

    def _cost(self, ranks: int) -> memory.Cost:
        config = load(self.file(ranks))
        return costs_of(self.engine, config.deepspeed, config.settings).cost(ranks)

    @property
    def gradient_bytes(self) -> int:
        """Of one gradient."""
        return 2 if "bf16" in self.changes else 4


def pipeline(ranks: int) -> dict[str, Any]:
    return {"pipeline": {"stages": ranks}}


def tensor(ranks: int) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": ranks}}


_WIDTH, _BLOCKS = 128, 20
_AROUND = (256 + 64 + 256) * _WIDTH + 2 * _WIDTH
"""Parameters of LONG's embeddings, output and last norm, which AutoTP leaves whole."""
_OF_BLOCKS = _BLOCKS * 6 * _WIDTH
"""Likewise the blocks' norms, and the biases that are added to a sum over ranks."""
UNCUT = (_AROUND + _OF_BLOCKS) / (_AROUND + _BLOCKS * (12 * _WIDTH**2 + 13 * _WIDTH))


def slices(ranks: int, micros: int, _: float) -> float:
    """In each of 20 blocks 2 all-reduces of activations forward and 2 of their gradients back (arXiv 1909.08053)."""
    return 20 * 4 * micros * 2 * (ranks - 1) / ranks * ACTIVATION_BYTES


SEVERAL = frozenset({2, 4})
KEEP_NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
CASES: dict[str, Case] = {
    "ddp": Case("ddp"),
    "ddp, bf16 sent": Case(
        "ddp",
        options(ddp={"communication": "bf16"}),
        ring(step=1),
        "ring all-reduce in 16 bits",
        formula_holds=frozenset({1, 2}),  # on 4 the 16-bit copies of some buckets are still alive before the update
    ),
    "horovod": Case("horovod"),
    "zero0": Case("deepspeed", zero(0)),
    "zero1": Case("deepspeed", zero(1), ring(step=3), ALL_REDUCE_GATHER),
    "zero2": Case("deepspeed", zero(2), ring(step=3), ALL_REDUCE_GATHER),
    "zero2, shards": Case("deepspeed", {**zero(2), **SHARDS}, TWICE, "all-reduce for each micro-batch"),
    "zero2, reduce": Case(
        "deepspeed",
        zero(2, use_multi_rank_bucket_allreduce=False),
        ring(step=2),
        "ZeRO paper: reduce, all-gather",
    ),
    "zero3": Case("deepspeed", zero(3, **KEEP_NOTHING), TWICE, "ZeRO paper: 2 all-gathers, reduce-scatter"),
    "zero3, shards": Case("deepspeed", {**zero(3, **KEEP_NOTHING), **SHARDS}, ring(micro=3), EACH_TIME),
    "zero3, reuse": Case(
        "deepspeed",
        zero(3, stage3_param_persistence_threshold=0),
        ring(micro=1, step=1),
        "parameters kept until the backward pass",
    ),
    "zero2 bf16": Case("deepspeed", {**zero(2), **BF16}, ring(step=3), "as in fp32, of 2 bytes each"),
    "zero3 bf16": Case("deepspeed", {**zero(3, **KEEP_NOTHING), **BF16}, TWICE, "as in fp32, of 2 bytes each"),
    "fsdp": Case("fsdp", {}, TWICE, "2 all-gathers, reduce-scatter"),
    "fsdp, shards": Case("fsdp", options(fsdp={"accumulate": "shards"}), ring(micro=3), EACH_TIME),
    "fsdp, kept": Case(
        "fsdp", options(fsdp={"reshard_after_forward": False}), ring(micro=1, step=1), "all-gather, reduce-scatter"
    ),
    "pipeline": Case("deepspeed", {**zero(0), **LONG}, stages, "activations, their gradients", pipeline, SEVERAL),
    "tensor parallel": Case(
        "deepspeed",
        {**zero(0), **LONG},
        slices,
        "Megatron: 4 all-reduces of activations a block",
        tensor,
        SEVERAL,
        UNCUT,
    ),
    "reference-allreduce": Case("reference-allreduce"),
    "reference-ring": Case("reference-ring"),
    "reference-parameter-averaging": Case("reference-parameter-averaging", source="ring all-reduce of weights"),
    "reference-parameter-server": Case(
        "reference-parameter-server",
        sent=lambda ranks, _, gradients: (ranks - 1) * gradients,
        source="the server, and as much received",
    ),
    "reference-model-parallel": Case(
        "reference-model-parallel", LONG, stages, "activations, their gradients", pipeline, SEVERAL
    ),
}


# One rank of a job.


def job(names: Sequence[str], accumulation: int, report: Path) -> None:
    """**Collective.** Measures each case in turn; rank 0 writes what all ranks found to ``report``."""
    from dsframe.cluster import world
    from dsframe.cluster.exchange import all_gather_text as tell
    from tests.engines.holdings import Observer
    from tests.engines.several import one_process_group, prepare

    found: dict[str, Any] = {}
    with one_process_group():
        for name in names:
            case = CASES[name]
            make, loader = prepare(case.file(world.here().size, accumulation), case.engine)
            observer = Observer()
            engine = make()
            figures = observer.measure(engine, loader)
            found[name] = [json.loads(text) for text in tell(engine, json.dumps(figures))]
            main = engine.plan.world.is_main
            del make, loader, observer, engine
    if main:
        report.write_text(json.dumps(found))


# The tables.


@dataclass(frozen=True)
class Measured:
    """One case with so many processes, all ranks' figures: bytes, and the parameters of the whole model."""

    name: str
    ranks: int
    accumulation: int
    figures: list[dict[str, Any]]

    @property
    def case(self) -> Case:
        return CASES[self.name]

    def held(self, what: str) -> float:
        """Bytes for each parameter of the model, on the rank that holds most."""
        return max(figures[what] / figures["model"] for figures in self.figures)

    @property
    def total(self) -> float:
        """Bytes for each parameter of the model, on the rank that holds most, after the backward pass."""
        kinds = ("parameters", "gradients", "optimizer")
        return max(sum(figures[kind] for kind in kinds) / figures["model"] for figures in self.figures)

    @property
    def memory_ratio(self) -> float:
        """Measured over formula."""
        return self.total / self.case.cost(self.ranks).total

    @property
    def off(self) -> bool:
        """Whether memory misses its formula, which is that of one micro-batch."""
        return self.accumulation == 1 and self.ranks in self.case.formula_holds and abs(self.memory_ratio - 1) > OFF

    @property
    def gradients(self) -> float:
        """Bytes of the whole model's."""
        return float(self.figures[0]["model"] * self.case.gradient_bytes)

    @property
    def sent(self) -> float:
        """Bytes, by the rank that sends most."""
        return float(max(figures["sent"] for figures in self.figures))

    @property
    def received(self) -> float:
        """Bytes, by the rank that receives most."""
        return float(max(figures["received"] for figures in self.figures))

    @property
    def theory(self) -> float:
        """Bytes that the rank should send that sends most."""
        return self.case.sent(self.ranks, self.accumulation, self.gradients)


def measure(names: Sequence[str], ranks: int, accumulation: int = 1) -> list[Measured]:
    """Runs the cases with so many processes: those that share processes in one job."""
    together = [name for name in names if not CASES[name].splits(ranks)]
    jobs = [together, *([name] for name in names if CASES[name].splits(ranks))]
    found = []
    for names_ in filter(None, jobs):
        with tempfile.TemporaryDirectory(prefix="dsframe-footprint-") as folder:
            report = Path(folder, "report.json")
            arguments = ["-m", "tests.footprint", *names_, "--job", str(report), "--accumulation", str(accumulation)]
            run_ranks(torchrun(ranks, arguments), timeout_seconds=590).check()
            figures = json.loads(report.read_text())
        found += [Measured(name, ranks, accumulation, figures[name]) for name in names_]
    return found


def memory_table(measured: Sequence[Measured]) -> str:
    """Bytes by kind beside the formula."""
    lines = [
        "Bytes on a rank for each parameter of the model, after the backward pass (fp32, AdamW)",
        f"{'':30} {'N':>2} {'parameters':>16} {'gradients':>16} {'optimizer':>16} {'total':>16} {'ratio':>6} {'at update':>10}",
    ]
    for one in measured:
        if one.accumulation > 1:
            continue
        cost = one.case.cost(one.ranks)
        pairs = [("parameters", cost.parameter), ("gradients", cost.gradient), ("optimizer", cost.optimizer)]
        cells = [f"{one.held(kind):7.2f} ({formula:6.2f})" for kind, formula in pairs]
        cells.append(f"{one.total:7.2f} ({cost.total:6.2f})")
        lines.append(
            f"{one.name:30} {one.ranks:2} {' '.join(cells)} {one.memory_ratio:6.2f} {one.held('at_update'):10.2f}"
        )
    return "\n".join(lines)


def communication_table(measured: Sequence[Measured]) -> str:
    """Bytes sent beside theory."""
    lines = [
        "MB that a rank sends and receives in a step, the gradients' bytes being G",
        f"{'':30} {'N':>2} {'micro':>5} {'sent':>8} {'received':>8} {'theory':>8} {'ratio':>6} {'sent/G':>7}  theory is",
    ]
    for one in measured:
        if one.ranks > 1:
            lines.append(
                f"{one.name:30} {one.ranks:2} {one.accumulation:5} {one.sent / 1e6:8.3f} {one.received / 1e6:8.3f} "
                f"{one.theory / 1e6:8.3f} {one.sent / one.theory:6.2f} {one.sent / one.gradients:7.3f}  {one.case.source}"
            )
    return "\n".join(lines)


def main() -> int:
    """Prints the tables, or is one rank of a job; 1 where memory misses its formula."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"of {', '.join(CASES)}; default: all"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--accumulation",
        type=int,
        nargs="+",
        default=[1, 4],
        help="micro-batches in a step; several on 2 processes alone",
    )
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.cases or list(CASES)
    if given.job:
        job(names, given.accumulation[0], given.job)
        return 0
    measured = [
        one
        for ranks in given.processes
        for micros in given.accumulation
        if micros == 1 or ranks == 2
        for one in measure([name for name in names if ranks in CASES[name].sizes], ranks, micros)
    ]
    measured.sort(key=lambda one: names.index(one.name))
    print(memory_table(measured))
    print()
    print(communication_table(measured))
    off = [one for one in measured if one.off]
    for one in off:
        print(
            f"{one.name}, {one.ranks} processes: {one.memory_ratio:.2f} of the formula's memory, more than {OFF:.0%} off"
        )
    return int(bool(off))


if __name__ == "__main__":
    code = main()
    if "--job" in sys.argv:
        from dsframe.train import leave_at_once

        leave_at_once(code)
    sys.exit(code)
