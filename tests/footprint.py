"""What each engine holds and sends, measured beside theory.

    python -m tests.footprint [CASE ...] [--processes 1 2 4]      # prints two tables (make footprint)

A GPT of 4 million parameters in fp32 with AdamW takes a few steps on every engine. After the backward pass and right before
the optimizer's update each rank looks at every tensor that is alive in it (the garbage collector knows them all), and counts
each block of memory once: as parameters where a module has it, as optimizer state where an optimizer has it, and everything
else as gradients, the buckets in which they travel included. Bytes sent are counted by ``dsframe.report.communication``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsframe.config import load, memory
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


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, **more}}


def share(times: float) -> Callable[[int], float]:
    """``times`` (N - 1) / N."""
    return lambda ranks: times * (ranks - 1) / ranks


ALL_REDUCE = share(2)


@dataclass(frozen=True)
class Case:
    """An engine, its changes to FILE, and what theory says of it."""

    engine: str
    changes: dict[str, Any] = field(default_factory=dict)
    sent: Callable[[int], float] = ALL_REDUCE
    """Bytes that a rank sends in a step, as a multiple of the gradients', for so many ranks."""
    source: str = "ring all-reduce"
    """Where ``sent`` comes from."""
    alone: bool = False
    """Whether it needs processes of its own."""
    sizes: frozenset[int] = frozenset({1, 2, 4})
    """Numbers of processes that make sense."""

    def file(self, accumulation: int) -> dict[str, Any]:
        return {**FILE, **self.changes, "gradient_accumulation_steps": accumulation}

    def cost(self, ranks: int) -> memory.Cost:
        """Bytes of a parameter on a rank."""
        return memory.cost(load(self.file(1)).deepspeed, ranks, self.engine)

    @property
    def gradient_bytes(self) -> int:
        """Of one gradient that is sent."""
        return 2 if "bf16" in self.changes else 4


def fsdp(**options: Any) -> dict[str, Any]:
    return {"dsframe": {**FILE["dsframe"], "fsdp": options}}


BF16 = {"bf16": {"enabled": True}}
KEEP_NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
CASES: dict[str, Case] = {
    "ddp": Case("ddp"),
    "zero0": Case("deepspeed", zero(0)),
    "zero1": Case("deepspeed", zero(1), share(3), "DeepSpeed: all-reduce, all-gather"),
    "zero2": Case("deepspeed", zero(2), share(3), "DeepSpeed: all-reduce, all-gather"),
    "zero2, reduce": Case(
        "deepspeed",
        zero(2, use_multi_rank_bucket_allreduce=False),
        share(2),
        "ZeRO paper: reduce, all-gather",
    ),
    "zero3": Case("deepspeed", zero(3, **KEEP_NOTHING), share(3), "ZeRO paper: 2 all-gathers, reduce-scatter"),
    "zero3, reuse": Case(
        "deepspeed",
        zero(3, stage3_param_persistence_threshold=0),
        share(2),
        "parameters kept until the backward pass",
    ),
    "zero2 bf16": Case("deepspeed", {**zero(2), **BF16}, share(3), "DeepSpeed: all-reduce, all-gather"),
    "zero3 bf16": Case("deepspeed", {**zero(3, **KEEP_NOTHING), **BF16}, share(3), "ZeRO paper"),
    "fsdp": Case("fsdp", {}, share(3), "2 all-gathers, reduce-scatter"),
    "fsdp, kept": Case("fsdp", fsdp(reshard_after_forward=False), share(2), "all-gather, reduce-scatter"),
    "reference-allreduce": Case("reference-allreduce"),
    "reference-parameter-averaging": Case("reference-parameter-averaging", source="ring all-reduce of weights"),
    "reference-parameter-server": Case(
        "reference-parameter-server", sent=lambda ranks: ranks - 1, source="the server, and as much received"
    ),
    "horovod": Case("horovod"),
}


# One rank of a job.


def job(names: Sequence[str], accumulation: int, report: Path) -> None:
    """**Collective.** Measures each case in turn; rank 0 writes what all ranks found to ``report``."""
    from dsframe.checkpoint.share import share as tell
    from tests.engines.holdings import Observer
    from tests.engines.several import one_process_group, prepare

    found: dict[str, Any] = {}
    with one_process_group():
        for name in names:
            case = CASES[name]
            make, loader = prepare(case.file(accumulation), case.engine)
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
    def sent(self) -> float:
        """Multiples of the gradients' bytes, by the rank that sends most."""
        return max(figures["sent"] / figures["model"] / self.case.gradient_bytes for figures in self.figures)

    @property
    def received(self) -> float:
        """Multiples of the gradients' bytes, by the rank that receives most."""
        return max(figures["received"] / figures["model"] / self.case.gradient_bytes for figures in self.figures)

    @property
    def sent_ratio(self) -> float:
        """Measured over theory."""
        return self.sent / self.case.sent(self.ranks)


def measure(names: Sequence[str], ranks: int, accumulation: int = 1) -> list[Measured]:
    """Runs the cases with so many processes: those that share processes in one job."""
    together = [name for name in names if not CASES[name].alone]
    jobs = [together, *([name] for name in names if CASES[name].alone)]
    found = []
    for names_ in filter(None, jobs):
        with tempfile.TemporaryDirectory(prefix="dsframe-footprint-") as folder:
            report = Path(folder, "report.json")
            arguments = ["-m", "tests.footprint", "--job", str(report), "--accumulation", str(accumulation), *names_]
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
        "Bytes that a rank sends in a step, in multiples of the gradients' bytes",
        f"{'':30} {'N':>2} {'sent':>6} {'received':>8} {'theory':>7} {'ratio':>6}  theory is",
    ]
    for one in measured:
        if one.ranks > 1:
            lines.append(
                f"{one.name:30} {one.ranks:2} {one.sent:6.2f} {one.received:8.2f} {one.case.sent(one.ranks):7.2f} "
                f"{one.sent_ratio:6.2f}  {one.case.source}"
            )
    return "\n".join(lines)


def main() -> int:
    """Prints the tables, or is one rank of a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"of {', '.join(CASES)}; default: all"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.cases or list(CASES)
    if options.job:
        job(names, options.accumulation, options.job)
        return 0
    measured = [
        one
        for ranks in options.processes
        for one in measure([name for name in names if ranks in CASES[name].sizes], ranks, options.accumulation)
    ]
    measured.sort(key=lambda one: names.index(one.name))
    print(memory_table(measured))
    print()
    print(communication_table(measured))
    return 0


if __name__ == "__main__":
    code = main()
    if "--job" in sys.argv:
        from dsframe.train import leave_at_once

        leave_at_once(code)
    sys.exit(code)
