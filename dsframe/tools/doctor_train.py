"""``dsframe doctor --train``: short trainings on every engine and launcher of this machine.

Every engine trains 20 steps and saves; its losses are compared with one process. Then each continues from another
engine's checkpoint. Prints a table and a verdict, and writes a JSON file to attach to a report.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from dsframe.engines import TABLE
from dsframe.engines.table import BUILT_IN
from dsframe.errors import DataError, DsframeError, EngineError
from dsframe.run_dir.record import read_metrics, read_origin, read_summary
from dsframe.text import Json, columns, table_of
from dsframe.tools import compare, subprocess_runs
from dsframe.tools.launch import launchers

BOUNDS = {"cpu": 1e-5, "cuda": 1e-4}
"""Largest difference of a loss to one process's, by device. Not yet measured on GPUs: kernels for other micro-batch
sizes sum in another order, so the bound is wider."""
NORM_BOUND = 1e-3
"""Largest relative difference of the first gradient's norm to one process's. Losses do not show a gradient that is
wrong by a factor, because of clipping and AdamW."""
FILE = "doctor.json"
LIMIT_SECONDS = 300.0
"""Time limit of one training."""
_TABLE = table_of(__file__)
_FILE: Json = _TABLE["file"]
SAVED_STEP: int = _FILE["dsframe"]["checkpoints"]["every_steps"]
_BY_DEEPSPEED: dict[str, Json] = _TABLE["variants of DeepSpeed"]
"""Name -> changes to the common file."""


@dataclass(frozen=True)
class Setup:
    """One way to train."""

    name: str
    engine: str
    launcher: str
    more: Json = field(default_factory=dict)
    """Changes to the common file."""


@dataclass
class Row:
    """One line of the table."""

    name: str
    state: str = "failed"
    """ok, failed, or left out (not installed, or refused by the engine, such as Horovod without NCCL)."""
    remark: str = ""
    launcher: str = ""
    processes: int = 0
    seconds: float = 0.0
    difference: float | None = None
    """Largest difference of a loss to one process's."""
    peak_bytes: int | None = None
    """Peak memory of the rank with the highest."""


@dataclass
class Machine:
    """This machine, and the results of one process on it."""

    folder: Path
    gpus: Sequence[tuple[str, int]]
    """Names and bytes."""
    expected: Mapping[int, float] = field(default_factory=dict)
    """Losses of one process, by step."""
    norm: float | None = None
    """Norm of one process's first gradient."""

    @property
    def processes(self) -> int:
        return next(n for n in (8, 4, 2, 1) if n <= (len(self.gpus) or 2))

    @property
    def bound(self) -> float:
        return BOUNDS["cuda" if self.gpus else "cpu"]

    def directory(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-")


def run(gpus: Sequence[tuple[str, int]], engines: Sequence[str], folder: Path, report: Json) -> bool:
    """Trains, prints table and verdict, writes ``folder/doctor.json``. Returns True if nothing failed.

    ``gpus``: names and bytes of torch's GPUs. ``engines``: engines to run; empty for all. ``report``: more content for
    the file. Raises DataError if the folder contains anything but an earlier call's runs.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / FILE).is_file():
            raise DataError(f"{folder} is not empty and holds no {FILE}; name another folder with --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text('{"verdict": "not done"}\n', encoding="utf-8")
    machine, began = Machine(folder, gpus), time.monotonic()
    setups, absent = setups_of(engines, machine.processes)
    single = next(name for name, entry in BUILT_IN.items() if entry.size == "one")
    rows = [train(machine, Setup(single, single, "python"), 1)]
    trained: list[Setup] = []
    for setup in setups if rows[0].state == "ok" else ():
        rows.append(train(machine, setup, machine.processes))
        trained += [setup] if rows[-1].state == "ok" else []
    rows += [train(machine, setup, machine.processes, after=before.name) for before, setup in pairwise(trained)]
    rows += absent
    text = verdict(machine, rows, time.monotonic() - began)
    content = {"verdict": text, "bound": machine.bound, "machine": report, "origin": read_origin(folder / single)}
    content["rows"] = [asdict(row) for row in rows]
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(*table(rows), text, folder / FILE, sep="\n")
    return all(row.state != "failed" for row in rows)


def setups_of(engines: Sequence[str], processes: int) -> tuple[list[Setup], list[Row]]:
    """Returns the setups: every engine with its own launcher, and the first with each launcher that no engine uses; and
    rows for what is left out, with the reason."""
    names = [name for name in launchers.NAMES if name != "python"]
    reasons = {name: "not installed" for name in names if not launchers.installed(name)}
    if not os.environ.get("SLURM_JOB_ID"):
        reasons["srun"] = "not in a Slurm allocation"
    absent = [Row(name, "left out", reason) for name, reason in reasons.items()]
    setups: list[Setup] = []
    for name in engines or BUILT_IN:
        entry = TABLE[name]
        if entry.package and importlib.util.find_spec(entry.package) is None:
            absent.append(Row(name, "left out", f"{entry.package} is not installed"))
            continue
        launcher = "torchrun" if entry.launcher in reasons else entry.launcher
        variants = {} if entry.size == "one" else _BY_DEEPSPEED if entry.by_deepspeed else {"": {}}
        for variant, more in variants.items():
            if "pipeline" not in more or processes > 1:
                setups.append(Setup(f"{name} {variant}".strip(), name, launcher, more))
    used = {setup.launcher for setup in setups} | {*reasons}
    for spare in [name for name in names if name not in used] if setups else []:
        setups.append(replace(setups[0], name=f"{setups[0].name} {spare}", launcher=spare))
    return setups, absent


def train(machine: Machine, setup: Setup, processes: int, *, after: str = "") -> Row:
    """Runs one training and compares it with one process. ``after``: the setup whose checkpoint it continues."""
    row = Row(f"{setup.name} after {after}" if after else setup.name, launcher=setup.launcher, processes=processes)
    arguments = ["--launcher", setup.launcher, "--engine", setup.engine]
    arguments += ["--resume", str(machine.directory(after))] if after else []
    directory, began = machine.directory(row.name), time.monotonic()
    path = directory.with_suffix(".json")
    path.write_text(json.dumps({**_FILE, **setup.more}), encoding="utf-8")
    try:
        code = subprocess_runs.train(path, processes, directory, arguments, LIMIT_SECONDS)
        _judge(machine, row, directory, code, first=SAVED_STEP + 1 if after else 1)
    except subprocess.TimeoutExpired:
        row.remark = f"not done after {LIMIT_SECONDS:.0f} s"
    except DsframeError as error:
        row.remark = str(error)
    row.seconds = time.monotonic() - began
    print(f"dsframe doctor: {row.name}: {row.state} ({row.seconds:.0f} s)", file=sys.stderr, flush=True)
    return row


def _judge(machine: Machine, row: Row, directory: Path, code: int, *, first: int) -> None:
    """Compares its losses from step ``first``, and its first gradient, with one process's."""
    if code:
        log_end = subprocess_runs.end_of_log(directory)
        row.state = "left out" if code == EngineError.exit_code else "failed"
        row.remark = next((line for line in log_end.splitlines() if "error:" in line), log_end)
        return
    row.peak_bytes = max(read_summary(directory)["peak_memory_bytes"])
    losses = compare.losses(directory)
    machine.expected = machine.expected or losses
    wanted = [step for step in machine.expected if step >= first]
    if lacking := [step for step in wanted if step not in losses]:
        row.remark = f"no loss of step {lacking[0]}"
        return
    norms = [line["gradient_norm"] for line in read_metrics(directory) if line.get("gradient_norm")]
    machine.norm = norms[0] if machine.norm is None else machine.norm
    row.difference = max(abs(losses[step] - machine.expected[step]) for step in wanted)
    if first == 1 and abs(norms[0] / machine.norm - 1) > NORM_BOUND:
        row.remark = f"first gradient has norm {norms[0]:.6g}, one process's {machine.norm:.6g}"
    elif row.difference > machine.bound:
        row.remark = "other losses"
    else:
        row.state = "ok"


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the rows in columns, with remarks at the end."""
    cells = [["", "", "launcher", "ranks", "difference", "s", "peak MiB"]]
    for row in rows:
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}"
        difference = "" if row.difference is None else f"{row.difference:.1e}"
        numbers = (str(row.processes or ""), difference, f"{row.seconds:.0f}", peak)
        cells.append([row.state, row.name, row.launcher, *numbers])
    remarks = ["", *(row.remark for row in rows)]
    return [f"{line}  {text}".rstrip() for line, text in zip(columns(cells, 3), remarks, strict=True)]


def verdict(machine: Machine, rows: Sequence[Row], seconds: float) -> str:
    """Returns one line with the result."""
    where = f"{len(machine.gpus)} x {machine.gpus[0][0]}" if machine.gpus else "CPU"
    failed = [row.name for row in rows if row.state == "failed"]
    if failed:
        return f"FAILED on {where}, {seconds:.0f} s: {', '.join(failed)}"
    differences = [row.difference for row in rows if row.difference is not None]
    trained = f"{len(differences)} trainings, the same losses as one process within {max(differences):.1e}"
    return f"ok on {where}, {seconds:.0f} s: {trained}"
