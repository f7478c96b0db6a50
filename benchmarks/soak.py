"""Thousands of steps: does a run get slower, does its memory grow?

    python -m benchmarks.soak                            # 5,000 steps of a small GPT on DDP, ZeRO-1, ZeRO-3 and Horovod
    python -m benchmarks.soak --engines zero3 --steps 20000

Two processes, one thread each. Speed is the median over windows of ``WINDOW`` steps of the first and the last tenth of the run
(its first windows left out); memory is what all ranks have resident, sampled while they train. Fails where the speed falls by more
than ``SLOWER``, or the memory of a rank grows by more than ``GROWS`` and ``GROWS_BYTES``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.startup import FILES, REPOSITORY, launch

WINDOW = 20
WARM_UP_WINDOWS = 5
SLOWER = 0.05
GROWS, GROWS_BYTES = 0.01, 10e6
RANKS = 2
PATIENCE_SECONDS = 300.0
"""For the start, and for a window of steps."""


@dataclass(frozen=True)
class Ends:
    """Both ends of one run."""

    rates: tuple[float, float]
    """Steps a second."""
    resident: tuple[float, float]
    """Bytes of a rank, the mean over the ranks."""
    processor: tuple[float, float]
    """Seconds of processor time a step takes a rank: what tells a slower run from a busier machine."""

    @property
    def problems(self) -> list[str]:
        """What is not as it should be; empty where all is."""
        (fast, slow), (before, after) = self.rates, self.resident
        found = []
        if slow < fast * (1 - SLOWER):
            found.append(f"slower by {1 - slow / fast:.1%}")
        if after - before > GROWS * before + GROWS_BYTES:
            found.append(f"a rank's memory grows by {(after - before) / 1e6:.1f} MB")
        return found


Sample = tuple[int, float, float]
"""After so many steps: bytes that a rank has resident, and seconds of processor time it has had."""


def ends(rates: Sequence[float], samples: Sequence[Sample], steps: int) -> Ends:
    """``rates``: steps a second of each window, in order.

    Raises SystemExit where the run was too short to have two ends.
    """
    rates = rates[WARM_UP_WINDOWS:]
    tenth = max(1, steps // WINDOW // 10)
    first = [sample for sample in samples if WARM_UP_WINDOWS * WINDOW < sample[0] <= steps // 4]
    last = [sample for sample in samples if sample[0] > steps - steps // 4]
    if len(rates) < 2 * tenth or min(len({step for step, *_ in part}) for part in (first, last)) < 2:
        found = f"{len(rates)} windows, {len(first)} and {len(last)} samples of memory"
        raise SystemExit(f"{steps} steps are too few: {found}")
    speed = statistics.median(rates[:tenth]), statistics.median(rates[-tenth:])
    spent = [(part[-1][2] - part[0][2]) / (part[-1][0] - part[0][0]) for part in (first, last)]
    sizes = [statistics.median(size for _, size, _ in part) for part in (first, last)]
    return Ends(speed, (sizes[0], sizes[1]), (spent[0], spent[1]))


def soak(engine: str, steps: int) -> Ends:
    """One run of so many steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file: dict[str, Any] = {
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            **FILES[engine],
        }
        task = {"name": "language", "corpus": "synthetic", "layers": 2, "heads": 2, "width": 32, "context": 16}
        file["dsframe"] = {
            **file["dsframe"], "task": task, "steps": steps, "log_every_steps": WINDOW, "run_dir": str(folder / "run"),
        }  # fmt: skip
        (folder / "file.json").write_text(json.dumps(file))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "DSFRAME_SOAK": name}
        command = launch(engine, ["-m", "dsframe.train", "--config", str(folder / "file.json")])
        metrics = folder / "run" / "metrics.jsonl"
        with (
            (folder / "log").open("w") as log,
            processes.job(command, cwd=folder, env=environment, stdout=log, stderr=log) as job,
        ):
            samples = _sampled(job.process, metrics, name)
            if job.process.poll() is None:
                raise SystemExit(f"{engine} is silent for {PATIENCE_SECONDS:.0f} s:\n{(folder / 'log').read_text()}")
        if job.process.returncode:
            raise SystemExit(f"{engine} failed:\n{(folder / 'log').read_text()}")
        units = file["train_batch_size"] * task["context"]
        windows = [line["rate"] / units for line in _steps(metrics)[0] if line["step"] % WINDOW == 0]
        return ends(windows, samples, steps)


def _sampled(job: subprocess.Popen[Any], metrics: Path, marker: str) -> list[Sample]:
    """Looks at the job's ranks until it is over, or has logged nothing for ``PATIENCE_SECONDS``."""
    samples: list[Sample] = []
    ranks: list[int] = []
    lines: list[dict[str, Any]] = []
    read, at = 0, time.monotonic()
    while job.poll() is None:
        time.sleep(0.1)
        more, read = _steps(metrics, read)  # only what is new: looking may not cost more and more itself
        lines += more
        if more:
            at = time.monotonic()
        if time.monotonic() - at > PATIENCE_SECONDS:
            break
        ranks = ranks or (_ranks(marker) if lines else [])
        if len(found := [one for one in map(_used, ranks) if one]) == len(ranks) > 0:
            size, seconds = (statistics.mean(values) for values in zip(*found, strict=True))
            samples.append((lines[-1]["step"], size, seconds))
    return samples


def _steps(metrics: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The training steps logged so far from byte ``start`` on, and where to go on."""
    if not metrics.exists():
        return [], start
    with metrics.open("rb") as file:
        file.seek(start)
        whole, end, _ = file.read().rpartition(b"\n")
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line for line in lines if "loss" in line], start + len(whole) + len(end)


def _ranks(marker: str) -> list[int]:
    """The processes of this run that train: what launchers give a rank alone, and not the shell that Horovod starts it by."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            name = (entry / "comm").read_text().strip()
        except OSError:
            continue
        ranked = any(word.startswith((b"RANK=", b"HOROVOD_RANK=")) for word in environment)
        if f"DSFRAME_SOAK={marker}".encode() in environment and ranked and name not in ("sh", "bash"):
            found.append(int(entry.name))
    return found


def _used(process: int) -> tuple[int, float] | None:
    """Bytes that a process has resident, and its seconds of processor time; None where it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()  # from the third on
    except OSError:
        return None
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table. Returns 1 where a run gets slower or grows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--engines", default="ddp,zero1,zero3,horovod")
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args(argv)
    processes.heed_sigterm()
    print(
        f"{options.steps:,} steps, {RANKS} processes; at both ends: steps a second, MB resident and processor ms a step of a rank"
    )
    failed = False
    for engine in options.engines.split(","):
        found = soak(engine, options.steps)
        failed = failed or bool(found.problems)
        (fast, slow), (before, after) = found.rates, found.resident
        figures = f"{fast:>9.1f}{slow:>9.1f}{slow / fast - 1:>+8.1%}{before / 1e6:>10.1f}{after / 1e6:>9.1f}"
        spent = "".join(f"{1e3 * seconds:>9.2f}" for seconds in found.processor)
        verdict = "; ".join(found.problems) or "kept"
        print(f"{engine:<10}{figures}{(after - before) / 1e6:>+8.1f}{spent}  {verdict}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
