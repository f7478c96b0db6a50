"""``dsframe launch`` with real processes: a killed rank, and a stop."""

import re
import signal

from dsframe.run_dir.record import read_summary
from tests.files import ds_config, write_json
from tests.processes import run_ranks, warm

DSFRAME = ["python", "-m", "dsframe.cli"]
STEPS = 60


def launch(*options):
    return [*DSFRAME, "launch", "--config", "short.json", "--run-dir", "run", "--restart-wait", "0.1", *options]


def short(directory):
    document = ds_config(
        8,
        {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        task={"name": "tests.faults.slow_task:SlowTask"},
        steps=STEPS,
        log_every_steps=1,
        checkpoints={"every_steps": 10},
    )
    write_json(directory / "short.json", document)


def on_one_process(directory, run, *more):
    """The summary of the training there, to its end."""
    words = ["-m", "dsframe.train", "--config", "short.json", "--run-dir", run, "--engine", "single", *more]
    run_ranks(warm(1, words), cwd=directory, env={"STEP_SECONDS": "0"}, timeout_seconds=90).check()
    return read_summary(directory / run)


def test_a_killed_rank_starts_again_and_a_stopped_run_does_not(tmp_path):
    """The first start is killed, the second told to stop; a third command goes on to where an undisturbed run ends."""
    short(tmp_path)

    def disturb(running):
        running.wait_for(lambda: "step-00000010" in running.output, timeout_seconds=90, what="the first checkpoint")
        running.ranks()[1].kill()
        running.wait_for(lambda: "continuing after step" in running.output, timeout_seconds=90, what="the second start")
        since = len(re.findall(r"step +\d+/", running.output))
        running.wait_for(
            lambda: len(re.findall(r"step +\d+/", running.output)) > since + 3, timeout_seconds=90, what="more steps"
        )
        running.process.send_signal(signal.SIGTERM)

    typed = launch("-np", "2", "--engine", "ddp", "--restarts", "3")
    finished = run_ranks(typed, cwd=tmp_path, timeout_seconds=200, while_running=disturb)
    assert finished.returncode == 75, finished
    assert finished.output.count("restarting in 0 s (1 of 3)") == 1
    assert "a process was killed, or ended without a message" in finished.output
    ends = [on_one_process(tmp_path, *words)["loss"] for words in (("run", "--resume", "auto"), ("alone",))]
    assert abs(ends[0] - ends[1]) < 1e-5
