"""``dsframe doctor --train``: short trainings on every engine and under every launcher of this machine, each beside one process.

Every engine trains 20 steps and saves; goes on from another engine's checkpoint; a rank is killed and the run restarted; a GPT's
rate is compared with that of matrix products, and each peak of memory with the plan's. Nothing is asked. One
table, one verdict, and one JSON file that says all of it, to be attached to a report. On CPUs the same list is small.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import psutil

from dsframe.checkpoint.store import Store
from dsframe.cluster import world as worlds
from dsframe.engines import TABLE
from dsframe.engines.table import BUILT_IN
from dsframe.errors import DataError, DsframeError, EngineError
from dsframe.run_dir.record import read_metrics, read_origin, read_summary
from dsframe.text import amount, columns
from dsframe.tools import compare, subprocess_runs
from dsframe.tools.launch import launchers
from dsframe.tools.plan import report_prediction

STEPS, SAVED_STEP = 20, 11
LONG_STEPS = 60
"""Steps of one process, and of the run in which a rank is killed: it has to be under way still when it is hit."""
BOUNDS = {"cpu": 1e-5, "cuda": 1e-4}
"""Largest difference of a loss to one process's, by device. On GPUs nobody has measured it yet: kernels for other sizes of a
micro-batch add in another order, so there is more room."""
NORM_BOUND = 1e-3
"""Largest relative difference of the first gradient's norm to one process's."""
LONG_FACTOR = 100.0
"""Factor on the bound over LONG_STEPS: training multiplies differences. 7.4e-5 was seen on a CPU."""
MOST_PROCESSES = 8
FILE = "doctor.json"
LIMIT_SECONDS = 300.0
"""Time of one training."""
_FILE: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
_TASK = {"name": "language", "layers": 2, "heads": 4, "width": 64, "context": 64, "corpus": "synthetic", "samples": 400}
_BY_DEEPSPEED: dict[str, dict[str, Any]] = {
    **{f"ZeRO-{stage}": {"zero_optimization": {"stage": stage}} for stage in (1, 2)},
    "ZeRO-3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "pipeline": {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2},
}
"""Name -> what a file says beyond the others'."""
GPTS: dict[str, tuple[float, dict[str, int], int]] = {
    "304 M": (22e9, {"layers": 24, "heads": 16, "width": 1024, "context": 1024}, 8),
    "86 M": (0.0, {"layers": 12, "heads": 12, "width": 768, "context": 1024}, 4),
}
"""Parameters -> bytes that a GPU must have, shape, and samples of each process in a step. The first that fits is trained."""
_SMALL_GPT = ("0.4 M", {"layers": 2, "heads": 4, "width": 128, "context": 64}, 4)

State = Literal["ok", "failed", "refused", "left out"]
"""Refused: the engine says, before it trains, that it cannot here, such as a Horovod that was built without NCCL."""


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    engine: str
    launcher: str
    more: Mapping[str, Any] = field(default_factory=dict)
    """What its file says beyond the others'."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    state: State
    said: str = ""
    """What came of it, or why there is nothing."""
    launcher: str = ""
    processes: int = 0
    seconds: float = 0.0
    """From its start to its end."""
    steps: int = 0
    """The last step whose loss was put beside one process's."""
    apart: float | None = None
    """Largest difference of these losses."""
    peak_bytes: int | None = None
    """Memory of the fullest rank while it trained: of its GPU, else of its process."""
    planned_bytes: int | None = None
    """The same, as the plan predicts it."""


@dataclass
class Bench:
    """This machine, and what was found on it so far."""

    folder: Path
    processes: int
    gpus: Sequence[tuple[str, int]]
    """Names and bytes."""
    rows: list[Row] = field(default_factory=list)
    expected: Mapping[int, float] = field(default_factory=dict)
    """The losses of one process, by step."""
    norm: float | None = None
    """Norm of one process's first gradient: a gradient that is wrong by a factor is hidden from losses by clipping and AdamW."""

    @property
    def device(self) -> str:
        """torch's name of what trains."""
        return "cuda" if self.gpus else "cpu"

    def add(self, row: Row) -> Row:
        """Keeps a row, and says on standard error that it is there."""
        self.rows.append(row)
        print(f"dsframe doctor: {row.name}: {row.state} ({row.seconds:.0f} s)", file=sys.stderr, flush=True)
        return row


def run(gpus: Sequence[tuple[str, int]], engines: Sequence[str], folder: Path, machine: Mapping[str, Any]) -> bool:
    """Trains, prints the table and the verdict and writes ``folder/doctor.json``. Returns whether nothing failed.

    ``gpus``: names and bytes of those that torch sees. ``engines``: only these; empty: all that dsframe brings. ``folder``: where
    the runs go; what an earlier call has left there is removed. ``machine``: what else the file is to hold. Raises DataError where
    the folder holds something else.
    """
    processes = next(n for n in (8, 4, 2, 1) if n <= min(len(gpus) or 2, MOST_PROCESSES))
    _clear(folder)
    bench, began = Bench(folder, processes, gpus), time.monotonic()
    found, absent = ways(engines, processes)
    single = next(name for name, entry in BUILT_IN.items() if entry.size == "one")
    first = bench.add(_train(bench, Way(single, single, "python"), 1, steps=LONG_STEPS))
    trained = _all_ways(bench, found) if first.state == "ok" else []
    for way in trained[:1]:
        bench.add(_killed(bench, way))
    bench.add(_gpt(bench, trained[0] if trained and processes > 1 else Way(single, single, "python")))
    bench.rows += absent
    text = verdict(bench, time.monotonic() - began)
    report = {
        "verdict": text,
        "device": bench.device,
        "bound": BOUNDS[bench.device],
        "machine": machine,
        "origin": read_origin(folder / single),
        "rows": [asdict(row) for row in bench.rows],
    }
    (folder / FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(*table(bench.rows), text, folder / FILE, sep="\n")
    return all(row.state != "failed" for row in bench.rows)


def _clear(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not (folder / FILE).is_file():
            raise DataError(
                f"{folder} is not empty and holds no {FILE} of an earlier call; name another folder with --out"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text('{"verdict": "not done"}\n', encoding="utf-8")


def ways(engines: Sequence[str], processes: int) -> tuple[list[Way], list[Row]]:
    """Every engine that is there, each by a launcher that is; and what is left out, with the reason.

    An engine is started by the launcher that belongs to it, and where that one had its turn, by one that belongs to none.
    """
    reasons = {name: "not installed" for name in launchers.NAMES if name != "python" and not _is_there(name)}
    if not os.environ.get("SLURM_JOB_ID"):
        reasons["srun"] = "not in a Slurm allocation"
    absent = [Row(name, "left out", reason) for name, reason in reasons.items()]
    natural = {entry.launcher for entry in BUILT_IN.values()}
    spare = [name for name in launchers.NAMES if name not in natural | {*reasons, "python"}]
    found: list[Way] = []
    for name in engines or BUILT_IN:
        entry = TABLE[name]
        if entry.size == "one":
            continue
        if entry.package and importlib.util.find_spec(entry.package) is None:
            absent.append(Row(name, "left out", f"{entry.package} is not installed"))
            continue
        for kind, more in _BY_DEEPSPEED.items() if entry.by_deepspeed else {"": {}}.items():
            title = f"{name} {kind}".strip()
            if processes < (more.get("pipeline") or {}).get("stages", 1):
                absent.append(Row(title, "left out", "needs two GPUs"))
                continue
            launcher = entry.launcher if entry.launcher not in reasons else "torchrun"
            if spare and any(way.launcher == launcher for way in found):
                launcher = spare.pop(0)
            found.append(Way(title, name, launcher, more))
    return found, absent


def _is_there(launcher: str) -> bool:
    try:
        launchers.program(launcher)
    except DsframeError:
        return False
    return True


def _all_ways(bench: Bench, found: Sequence[Way]) -> list[Way]:
    """Each way from the start, then each from the checkpoint of the one before it, the first from the last one's. Returns those
    that have trained."""
    trained = [way for way in found if bench.add(_train(bench, way, bench.processes)).state == "ok"]
    for before, way in pairwise(trained + trained[:1] * (len(trained) > 2)):
        bench.add(_train(bench, way, bench.processes, after=before.name))
    return trained


def _train(
    bench: Bench,
    way: Way,
    processes: int,
    *,
    steps: int = STEPS,
    after: str = "",
    wait: Callable[[subprocess_runs.Started], int] | None = None,
    words: Sequence[str] = (),
) -> Row:
    """One training beside one process. ``after``: the way whose checkpoint it goes on from."""
    row = Row(f"{way.name} after {after}" if after else way.name, "failed", launcher=way.launcher, processes=processes)
    if wait:
        row = replace(row, name=f"{way.name}, a rank killed")
    more = ["--resume", str(_directory(bench, after))] if after else []
    section = {"task": _TASK, "steps": steps, "checkpoints": {"every_steps": SAVED_STEP, "at_end": False}}
    row, directory = _run(bench, way, row, {**_FILE, **way.more}, section, [*words, *more], wait)
    if directory is None:
        return row
    losses = compare.losses(directory)
    expected = bench.expected or losses
    bench.expected = expected
    wanted = [step for step in expected if step <= steps and not (after and step <= SAVED_STEP)]
    if lacking := [step for step in wanted if step not in losses]:
        return replace(row, said=f"no loss of step {lacking[0]}")
    apart = max(abs(losses[step] - expected[step]) for step in wanted)
    norm = None if after else _first_norm(directory)
    bench.norm = norm if bench.norm is None else bench.norm
    if norm is not None and bench.norm is not None and abs(norm / bench.norm - 1) > NORM_BOUND:
        return replace(row, said=f"first gradient has norm {norm:.6g}, one process's {bench.norm:.6g}")
    close = apart <= BOUNDS[bench.device] * (LONG_FACTOR if steps > STEPS else 1.0)
    row = replace(row, steps=steps, apart=apart)
    return replace(row, state="ok") if close else replace(row, said="other losses")


def _first_norm(directory: Path) -> float | None:
    found = (line.get("gradient_norm") for line in read_metrics(directory) if line.get("loss") is not None)
    return next(found, None)


def _directory(bench: Bench, name: str) -> Path:
    return bench.folder / name.replace(",", "").replace(" ", "-")


def _run(
    bench: Bench,
    way: Way,
    row: Row,
    file: Mapping[str, Any],
    section: Mapping[str, Any],
    words: Sequence[str] = (),
    wait: Callable[[subprocess_runs.Started], int] | None = None,
) -> tuple[Row, Path | None]:
    """The row with what the run took, and its directory; without one, and with the reason, where it failed."""
    directory = _directory(bench, row.name)
    directory.mkdir()
    own = {"log_every_steps": 1, "threads_per_rank": 1, "eval_micro_batch_size": 200, **section}
    path = directory.with_suffix(".json")
    path.write_text(json.dumps({**file, "dsframe": own}, indent=1) + "\n", encoding="utf-8")
    began, codes = time.monotonic(), [0]

    def waited(started: subprocess_runs.Started) -> int:
        codes[0] = wait(started) if wait else started.wait(LIMIT_SECONDS)
        return codes[0]

    try:
        arguments = ["--launcher", way.launcher, *words]
        subprocess_runs.train(path, row.processes, directory, engine=way.engine, words=arguments, wait=waited)
        summary = read_summary(directory)
    except subprocess.TimeoutExpired:
        return replace(row, said=f"not done after {LIMIT_SECONDS:.0f} s", seconds=LIMIT_SECONDS), None
    except DsframeError as error:
        row = replace(row, said=str(error), seconds=time.monotonic() - began)
        if codes[0] == EngineError.exit_code:
            row = replace(
                row, state="refused", said=next((line for line in row.said.splitlines() if "error:" in line), row.said)
            )
        return row, None
    row = replace(row, seconds=time.monotonic() - began, peak_bytes=max(summary["peak_memory_bytes"]))
    return replace(row, planned_bytes=report_prediction.predicted(directory, summary).get("memory_bytes")), directory


def _killed(bench: Bench, way: Way) -> Row:
    """A rank gets SIGKILL after the first checkpoint, and ``dsframe launch --restarts`` goes on."""
    directory = _directory(bench, f"{way.name}, a rank killed")

    def kill(started: subprocess_runs.Started) -> int:
        end = time.monotonic() + LIMIT_SECONDS
        victim: psutil.Process | None = None
        while started.poll() is None and time.monotonic() < end:
            victim = victim or _rank(started.pid, bench.processes - 1, bench.processes)
            if victim and Store(directory / "checkpoints").path(SAVED_STEP).is_dir():
                with contextlib.suppress(psutil.NoSuchProcess):  # it had ended
                    victim.kill()
                break
            time.sleep(0.005)
        return started.wait(max(1.0, end - time.monotonic()))

    restarts = ("--restarts", "2", "--restart-wait", "0.1")
    row = _train(bench, way, bench.processes, steps=LONG_STEPS, wait=kill, words=restarts)
    went_on = "going on after step" in (directory / "log.txt").read_text(encoding="utf-8", errors="replace")
    return row if went_on or row.state == "failed" else replace(row, state="failed", said="nothing was killed")


def _rank(launch: int, rank: int, size: int) -> psutil.Process | None:
    """The process of a rank below a launch; None where there is none yet."""
    for process in reversed(_below(launch)):
        try:
            here = worlds.read(process.environ())
            trains = "dsframe.train" in process.cmdline() and "dsframe.cli" not in process.cmdline()
        except (psutil.Error, OSError, DsframeError):  # gone meanwhile
            continue
        if trains and (here.rank, here.size) == (rank, size):
            return process
    return None


def _below(process: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(process).children(recursive=True))
    except psutil.Error:
        return []


def _gpt(bench: Bench, way: Way) -> Row:
    """The share of what matrix products reach that a GPT's training does; in bf16 on GPUs."""
    least = min((size for _, size in bench.gpus), default=0)
    name, shape, samples = _SMALL_GPT
    if bench.gpus:
        name, (_, shape, samples) = next((name, gpt) for name, gpt in GPTS.items() if least >= gpt[0])
    processes = 1 if way.launcher == "python" else bench.processes
    file = {**_FILE, "train_batch_size": samples * processes, "bf16": {"enabled": bool(bench.gpus)}, **way.more}
    section = {
        "task": {**_TASK, **shape, "tie_embeddings": False},
        "steps": STEPS,
        "log_every_steps": 10,
        "mfu": True,
        "checkpoints": {"at_end": False},
    }
    row = Row(f"GPT of {name} on {way.name}", "failed", launcher=way.launcher, processes=processes)
    row, directory = _run(bench, way, row, file, section)
    if directory is None:
        return row
    summary = read_summary(directory)
    if "mfu" not in summary:
        return replace(row, said="no MFU in summary.json")
    rate = f"{summary['rate']:,.0f} {summary['unit']}/s"
    said = f"{summary['mfu']:.0%} of {amount(summary['peak_flops'])}FLOP/s in matrix products, {rate}"
    return replace(row, state="ok", said=said)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows in columns; what is said of one stands at its end."""
    heads = ["", "", "launcher", "ranks", "apart", "s", "peak MiB", "plan MiB"]
    cells = [heads]
    for row in rows:
        sizes = ("" if size is None else f"{size / 2**20:,.0f}" for size in (row.peak_bytes, row.planned_bytes))
        apart = "" if row.apart is None else f"{row.apart:.1e}"
        seconds = f"{row.seconds:.0f}" if row.seconds else ""
        cells.append([row.state, row.name, row.launcher, str(row.processes or ""), apart, seconds, *sizes])
    texts = ["", *(row.said for row in rows)]
    for line, text in zip(columns(cells, left=3), texts, strict=True):
        first, *others = text.splitlines() or [""]
        yield f"{line}  {first}".rstrip()
        yield from (f"    {other}" for other in others)


def verdict(bench: Bench, seconds: float) -> str:
    """One line."""
    failed = [row.name for row in bench.rows if row.state == "failed"]
    where = f"{len(bench.gpus)} x {bench.gpus[0][0]}" if bench.gpus else "CPU"
    if failed:
        return f"FAILED on {where}, {seconds:.0f} s: {', '.join(failed)}"
    compared = [row for row in bench.rows if row.apart is not None]
    worst = (
        f"{max(row.apart or 0.0 for row in compared if row.steps == steps):.1e} over {steps} steps"
        for steps in sorted({row.steps for row in compared})
    )
    refused = [row.name for row in bench.rows if row.state == "refused"]
    return (
        f"ok on {where}, {seconds:.0f} s: {len(compared)} trainings under {len({row.launcher for row in compared})} launchers, "
        f"the same losses as one process within {', '.join(worst)}{'; refused: ' * bool(refused)}{', '.join(refused)}"
    )
