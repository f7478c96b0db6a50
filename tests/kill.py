"""Kills a random rank at a random moment, again and again: every run must end as if nothing had happened.

    make kill-test                                # 100 runs, about half an hour
    python -m tests.kill --runs 9 --seed 7

Each run trains under ``dsframe launch --restarts``, on DeepSpeed, Horovod and DDP in turn, with checkpoints at once and in the
background, half of them with an evaluation after each save that takes longer than a step. One rank gets SIGKILL: two of three
times while a checkpoint is being written (its hidden folder is there), else anywhere from the start of its process on, or in an
evaluation. The losses of all steps must be those of the undisturbed run, bit for bit; no process and no buffer in shared memory
may be left, and every checkpoint must be whole.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from dsframe.checkpoint import store
from dsframe.checkpoint.store import Store
from dsframe.host.leftovers import unused_buffers
from tests.portability import CONFIG, losses
from tests.processes import run_ranks

EVERY = 4
ENGINES = {
    "deepspeed": ("--engine", "deepspeed", "--set", "zero_optimization.stage=2"),
    "horovod": ("--engine", "horovod"),
    "ddp": ("--engine", "ddp"),
}


@dataclass
class Kill:
    """One blow, and what it met."""

    steps: int
    """Of the run."""
    in_save: bool
    after: float
    """Seconds after the start of training, or which save (a share of all of them)."""
    delay: float
    """Seconds after the checkpoint's folder was seen."""
    rank: int
    met: str = "nothing: the run had ended"
    leaked: tuple[str, ...] = ()
    evaluates: bool = False
    """After each save, for longer than a step: a blow that is in no save is then in an evaluation, mostly."""

    def __call__(self, running, run_dir):
        """Waits for the moment, kills, waits until everything has ended."""
        before = set(unused_buffers())
        checkpoints = run_dir / "checkpoints"
        try:
            if self.in_save:
                step = max(1, round(self.after * self.steps / EVERY)) * EVERY
                running.wait_for(lambda: _writing(checkpoints, step), timeout_seconds=120, what="a save")
                time.sleep(self.delay)
            elif self.evaluates:
                step = min(int(self.after), self.steps // EVERY - 1) * EVERY or EVERY
                running.wait_for(lambda: Store(checkpoints).path(step).is_dir(), timeout_seconds=120, what="a save")
                time.sleep(10 * self.delay)
            else:
                running.wait_for(lambda: self.rank in running.ranks(), timeout_seconds=120, what="a rank")
                time.sleep(self.after)
            victim = running.ranks()[self.rank]
            saving = sorted(path.name for path in checkpoints.glob(".step-*.partial"))
            newest = Store(checkpoints).newest_first()
            victim.kill()
            where = f"in the save {saving[0][1:14]}" if saving else "no save under way"
            self.met = f"{where}, newest {newest[0].name if newest else 'none'}"
        except AssertionError:
            if running.process.poll() is None:
                raise  # the time is over
        except (KeyError, psutil.Error):
            pass  # the rank had ended
        running.wait_for_end(timeout_seconds=200)
        self.leaked = tuple(path.name for path in unused_buffers() if path not in before)


def _writing(checkpoints, step):
    """Whether the checkpoint of ``step``, or a later one, is being written."""
    return any(int(path.name[6:14]) >= step for path in checkpoints.glob(".step-*.partial"))


def train(engine, run_dir, steps, *, asynchronous, kill=None):
    """One run under ``dsframe launch``."""
    config = run_dir.parent / "kill.json"
    config.write_text(CONFIG)
    settings = {
        "dsframe.steps": steps,
        "dsframe.checkpoints.every_steps": EVERY,
        "dsframe.checkpoints.asynchronous": str(asynchronous).lower(),
    }
    if kill is not None and kill.evaluates:
        settings |= {"dsframe.eval_every_steps": EVERY, "dsframe.eval_micro_batch_size": 1}
    command = ["python", "-m", "dsframe.cli", "launch", "-np", "2", "--restarts", "3", "--restart-wait", "0.1"]
    command += ["--config", str(config), "--run-dir", str(run_dir), *ENGINES[engine]]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    during = None if kill is None else lambda running: kill(running, run_dir)
    return run_ranks(command, timeout_seconds=240, cwd=run_dir.parent, while_running=during)


def verdict(run_dir, finished, kill, expected):
    """What is wrong with a run that was hit; "" where nothing is."""
    if finished.returncode != 0:
        return f"exit code {finished.returncode}\n{finished}"
    found = losses(run_dir)
    if found != expected:
        off = [step for step in expected if found.get(step) != expected[step]]
        return f"losses differ from step {off[0] if off else 'past the end'} on"
    damaged = [path.name for path in Store(run_dir / "checkpoints").newest_first() if store.verify(path)]
    damaged += [path.name for path in (run_dir / "checkpoints").glob("*.damaged*")]
    if damaged:
        return f"damaged: {', '.join(damaged)}"
    return f"left in shared memory: {', '.join(kill.leaked)}" if kill.leaked else ""


def plan(seed, number, steps, seconds):
    """Engine, whether asynchronous, and the blow of run ``number``; ``seconds``: how long a whole run takes."""
    chance = random.Random(f"{seed}/{number}")
    engine = list(ENGINES)[number % len(ENGINES)]
    in_save = chance.random() < 2 / 3
    after = chance.random() * (1.0 if in_save else seconds)
    asynchronous = chance.random() < 0.5
    kill = Kill(steps, in_save, after, chance.random() * 0.03, chance.randrange(2))
    kill.evaluates = chance.random() < 0.5
    return engine, asynchronous, kill


def main(argv=None):
    """Prints a line for each run; returns how many went wrong, and one more where too few were hit to say so."""
    parser = argparse.ArgumentParser(prog="tests.kill", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first run, to repeat one (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--steps", type=int, default=120, help="of each run (default: %(default)s)")
    options = parser.parse_args(argv)
    steps = options.steps
    wrong = hits = in_saves = 0
    print(f"seed {options.seed}: {options.runs} runs of {steps} steps, a checkpoint every {EVERY}; 2 ranks", flush=True)
    with tempfile.TemporaryDirectory() as name:
        whole = {}
        for number in range(options.first, options.first + options.runs):
            engine = list(ENGINES)[number % len(ENGINES)]
            if engine not in whole:
                undisturbed = Path(name) / engine
                seconds = train(engine, undisturbed, steps, asynchronous=False).check().seconds
                whole[engine] = losses(undisturbed), seconds
                print(f"{engine}: undisturbed, {seconds:.0f} s, loss {whole[engine][0][steps]:.9f}", flush=True)
            expected, seconds = whole[engine]
            engine, asynchronous, kill = plan(options.seed, number, steps, seconds)
            run_dir = Path(name) / f"run-{number}"
            try:
                finished = train(engine, run_dir, steps, asynchronous=asynchronous, kill=kill)
                problem = verdict(run_dir, finished, kill, expected)
                again = finished.output.count("going on after step")
            except (AssertionError, psutil.Error) as error:
                problem, again = str(error), 0
            wrong += bool(problem)
            hits += not kill.met.startswith("nothing")
            in_saves += kill.met.startswith("in the save")
            how = "background" if asynchronous else "at once"
            how += ", evaluates" if kill.evaluates else ""
            what = f"{number:>4} {engine:<10} saves {how:<21} rank {kill.rank} killed: {kill.met}; resumed {again} x"
            print(f"{what}: {problem or 'same losses'}", flush=True)
    print(f"{options.runs} runs, {hits} hit, {in_saves} of them inside a save; {wrong} wrong", flush=True)
    required = -(-2 * options.runs // 3)
    if hits < required:
        print(
            f"only {hits} of {options.runs} runs were hit, and {required} have to be: this says too little", flush=True
        )
    return wrong + (hits < required)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
