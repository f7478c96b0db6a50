"""From typing the command to the end of the first step, and what that time consists of, beside a script written by hand.

    python -m benchmarks.startup                    # zero1, zero3, ddp, horovod; two processes; three runs of each, in turns
    python -m benchmarks.startup --engines zero3 --cold     # with no compiled op anywhere: by hand DeepSpeed compiles for minutes

Medians, in seconds, of rank 0; "launcher" is what passes before that process starts. The first round does not count unless there is
no other: in it files come into the page cache, and scripts written by hand may compile DeepSpeed's ops, for minutes, which stay in
``.setup/benchmark_ops``. ``--cold`` gives every job a fresh TORCH_EXTENSIONS_DIR in a temporary folder. Fails where dsframe's start
of a DeepSpeed file, warm or cold, takes more than ``TOLERANCE`` times what it takes by hand, or, cold, longer than
``COLD_BOUND_SECONDS``. (On DDP and Horovod what dsframe does before a
run, to read the file and to check that all ranks mean the same, is not made up for by anything: half a second.)
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import processes
from dsframe.cluster.rendezvous import free_port

REPOSITORY = Path(__file__).resolve().parents[1]
COLD_BOUND_SECONDS = 20.0
LIMIT_SECONDS = 900.0
"""For a job, ops that are compiled by hand included."""
TOLERANCE = 1.05
"""A start may take so many times what it takes by hand, warm and cold: what two runs of the same script differ by."""
PHASES = (
    "launcher",
    "python",
    "imports",
    "data",
    "engine's imports",
    "process group",
    "engine",
    "records",
    "trial of evaluation",
    "first step",
)
FILES = {
    "zero1": {"zero_optimization": {"stage": 1}, "dsframe": {"engine": "deepspeed"}},
    "zero3": {"zero_optimization": {"stage": 3}, "dsframe": {"engine": "deepspeed"}},
    "ddp": {"dsframe": {"engine": "ddp"}},
    "horovod": {"dsframe": {"engine": "horovod"}},
}


def launch(engine, program):
    """The command of the launcher that belongs to the engine, with two processes."""
    if engine == "horovod":
        return ["horovodrun", "-np", "2", sys.executable, *program]
    if engine == "ddp":
        return ["torchrun", "--nproc-per-node=2", f"--master-port={free_port()}", *program]
    return ["deepspeed", "--num_gpus=2", f"--master_port={free_port()}", *program]


def run(command, folder, *, cold):
    """Runs a job to its end; when it was started (seconds since 1970) and what it printed. Raises SystemExit where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # A cache of its own: the ops that scripts written by hand compile are none of the tests' business.
    environment["TORCH_EXTENSIONS_DIR"] = str(folder / "ops" if cold else REPOSITORY / ".setup" / "benchmark_ops")
    began = time.time()
    try:
        finished = processes.run(command, cwd=folder, env=environment, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{' '.join(command)} is not done after {LIMIT_SECONDS:.0f} s") from None
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{finished.stdout}\n{finished.stderr}")
    return began, finished.stdout


def ours(engine, *, cold):
    """Seconds by phase of one run of dsframe."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = {
            "train_batch_size": 128,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            **FILES[engine],
        }
        task = {"name": "vision", "model": "cnn", "dataset": "synthetic"}
        file["dsframe"] = {**file["dsframe"], "task": task, "steps": 2, "run_dir": str(folder / "run")}
        (folder / "file.json").write_text(json.dumps(file))
        program = ["-m", "dsframe.train", "--config", str(folder / "file.json")]
        began, _ = run(launch(engine, program), folder, cold=cold)
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        found = next(line for line in lines if "startup_seconds" in line)
        phases = found["startup_seconds"]
        return {"launcher": found["at"] - began - sum(phases.values()), **phases}


def by_hand(engine, *, cold):
    """Seconds from the command to the end of the first step of the script written by hand."""
    with tempfile.TemporaryDirectory() as name:
        script = str(REPOSITORY / "benchmarks" / "by_hand_start.py")
        began, said = run(launch(engine, [script, engine]), Path(name), cold=cold)
        ended = re.search(r"first step ended at ([\d.]+)", said)
        assert ended is not None, said
        return float(ended[1]) - began


def main(argv=None):
    """Prints the table. Returns 1 where a bound is not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default=",".join(FILES))
    parser.add_argument(
        "--rounds", type=int, default=4, help="the first does not count where there are more (default: 4)"
    )
    parser.add_argument("--cold", action="store_true", help="no compiled ops; one round")
    parser.add_argument("--without-hand", action="store_true", help="leave the scripts written by hand out")
    options = parser.parse_args(argv)
    processes.heed_sigterm()
    engines, rounds = options.engines.split(","), 1 if options.cold else options.rounds
    mine = {engine: [] for engine in engines}
    theirs = {engine: [] for engine in engines}
    for _ in range(rounds):
        for engine in engines:
            mine[engine].append(ours(engine, cold=options.cold))
            if not options.without_hand:
                theirs[engine].append(by_hand(engine, cold=options.cold))
    start = 1 if rounds > 1 else 0
    print(f"seconds from the command to the end of the first step, {'no compiled ops' if options.cold else 'warm'}")
    print("".join([f"{'':<20}", *(f"{engine:>10}" for engine in engines)]))
    for phase in PHASES:
        row = [statistics.median(one.get(phase, 0.0) for one in mine[engine][start:]) for engine in engines]
        print("".join([f"{phase:<20}", *(f"{value:>10.2f}" for value in row)]))
    totals = [statistics.median(sum(one.values()) for one in mine[engine][start:]) for engine in engines]
    print("".join([f"{'dsframe':<20}", *(f"{value:>10.2f}" for value in totals)]))
    slow = [
        f"{engine} takes {total:.1f} s"
        for engine, total in zip(engines, totals, strict=True)
        if options.cold and engine.startswith("zero") and total > COLD_BOUND_SECONDS
    ]
    if not options.without_hand:
        hands = [statistics.median(theirs[engine][start:]) for engine in engines]
        print("".join([f"{'by hand':<20}", *(f"{value:>10.2f}" for value in hands)]))
        pairs = zip(engines, totals, hands, strict=True)
        slow += [
            f"{engine} takes longer than by hand"
            for engine, own, hand in pairs
            if engine.startswith("zero") and own > hand * TOLERANCE
        ]
    print(f"bounds: {'; '.join(slow) or 'kept'}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
