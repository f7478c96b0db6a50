"""Checkpoints with real processes: every engine's state out and in again, across engines, and through a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from dsframe.checkpoint import store
from dsframe.checkpoint.store import Store
from tests import portability
from tests.processes import COMPILING_SECONDS, Running, run_ranks, warm


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
PIPELINE: dict[str, Any] = {"pipeline": {"stages": 2}}
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}

ROUND_TRIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("single", {}),
    "ddp-bf16": ("ddp", BF16),
    "fsdp": ("fsdp", {}),
    "fsdp-bf16-cpu": ("fsdp", {**BF16, "dsframe": {"fsdp": {"wrap": ["Linear"], "offload": "cpu"}}}),
    "horovod": ("horovod", {}),
    "zero0": ("deepspeed", zero(0)),
    "zero0-bf16": ("deepspeed", {**zero(0), **BF16}),
    "zero1": ("deepspeed", zero(1)),
    "zero1-bf16": ("deepspeed", {**zero(1), **BF16}),
    "zero2-cpu": ("deepspeed", zero(2, offload_optimizer={"device": "cpu"})),
    "zero3": ("deepspeed", zero(3, sub_group_size=200)),
    "zero3-kept": ("deepspeed", {**zero(3, stage3_param_persistence_threshold=0), **BF16}),
    "zero3-cpu": ("deepspeed", zero(3, **CPU)),
    "pipeline-bf16": ("deepspeed", {**PIPELINE, **BF16}),
    "pipeline-zero1-cpu": ("deepspeed", {**PIPELINE, **zero(1, offload_optimizer={"device": "cpu"})}),
}


LONG_ROUND_TRIPS = {"fsdp", "zero0", "zero1", "pipeline-zero1-cpu"}
"""Whose engine and number format others have, one by one."""


def also_long(names: Iterable[str], long: Collection[str]) -> list[object]:
    """The names as parameters, of which ``make test`` leaves some out."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


@pytest.mark.parametrize("case", also_long(ROUND_TRIPS, LONG_ROUND_TRIPS))
def test_state_goes_out_and_in_again(case: str, tmp_path: Path) -> None:
    engine, changes = ROUND_TRIPS[case]
    report = round_trip(engine, changes, tmp_path)
    assert report["repeated"] == report["after"]
    assert report["from_the_start"] == report["first"]
    assert report["read_back"] == 0.0
    assert report["after"] != report["first"]
    assert report["updates"] == 5
    assert report["seen"] == (40 if engine == "single" or "pipeline" in changes else 20)
    assert report["dtypes"] == ["torch.float32"]
    assert report["shapes"] == {
        "scale": [3],
        "first.weight": [19, 7],
        "first.bias": [19],
        "middle.weight": [19, 19],
        "middle.bias": [19],
        "last.weight": [3, 19],
        "last.bias": [3],
    }
    moments = {**{name: ["exp_avg", "exp_avg_sq"] for name in report["shapes"] if name != "scale"}, "scale": []}
    assert report["moments"] == moments
    assert {one.get("step") for name, one in report["scalars"].items() if name != "scale"} == {5.0}


OTHER_OPTIMIZERS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "SGD": (3, {"lr": 0.01, "momentum": 0.9}, ["momentum_buffer"]),
    "Adagrad": (1, {"lr": 0.01}, ["sum"]),
}


@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS)
def test_other_optimizers_keep_other_things(kind: str, tmp_path: Path) -> None:
    stage, params, moments = OTHER_OPTIMIZERS[kind]
    changes = {**zero(stage), "optimizer": {"type": kind, "params": params}, "zero_allow_untested_optimizer": True}
    report = round_trip("deepspeed", changes, tmp_path)
    assert report["repeated"] == report["after"]
    assert report["from_the_start"] == report["first"]
    assert report["read_back"] == 0.0
    assert report["moments"]["middle.weight"] == moments


@pytest.mark.timeout(COMPILING_SECONDS + 60)
def test_state_on_nvme_goes_out_and_in_again(tmp_path: Path) -> None:
    """Large enough that shares are swapped out: below a megabyte DeepSpeed keeps them in memory. May compile its op first."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    changes = zero(3, sub_group_size=330_000, offload_optimizer=nvme, offload_param={**nvme, "buffer_size": 1_000_000})
    report = round_trip("deepspeed", changes, tmp_path, width=800, timeout_seconds=COMPILING_SECONDS)
    assert report["repeated"] == report["after"]
    assert report["from_the_start"] == report["first"]
    assert report["read_back"] == 0.0
    assert report["scalars"]["middle.weight"] == {"step": 5.0}


def round_trip(
    engine: str, changes: dict[str, Any], folder: Path, width: int = 19, timeout_seconds: float = 150
) -> dict[str, Any]:
    file = folder / "config.json"
    file.write_text(json.dumps(configuration(engine, changes, width)))
    arguments = ["-m", "tests.engines.round_trip", str(file)]
    run_ranks(warm(1 if engine == "single" else 2, arguments), timeout_seconds=timeout_seconds, cwd=folder).check()
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def configuration(engine: str, changes: dict[str, Any], width: int) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "dsframe": {
            "engine": engine,
            "task": {"name": "tests.engines.odd_task:Odd", "options": {"width": width}},
            "threads_per_rank": 1,
            **changes.get("dsframe", {}),
        },
        **{key: value for key, value in changes.items() if key != "dsframe"},
    }


# Across engines.

PAIRS = [
    ("zero3@2", "horovod@2"),
    ("horovod@2", "zero3+cpu@2"),
    ("zero3+cpu@2", "zero2@2"),
    ("zero2@2", "single@1"),
    ("single@1", "zero1@2"),
    ("zero1@2", "fsdp@2"),
    ("fsdp@2", "zero3@2"),
    ("zero2@2", "pipeline@2"),
    ("pipeline@2", "ddp@2"),
    ("ddp@2", "zero3@1"),
    ("zero3+sharded@2", "fsdp@3"),
    ("fsdp+sharded@2", "zero3@1"),
    ("mixtral experts+zero3@2", "mixtral ddp@3"),
]
"""Every setup saves once or goes on once, most both; ``make portability`` tries all pairs."""
LONG_PAIRS = [
    ("zero3@1", "ddp@2"),
    ("pipeline@2", "single@1"),
    ("mixtral ddp@3", "mixtral experts+zero0@2"),
    ("mixtral experts+zero0@2", "mixtral experts+zero2@4"),
    ("llama sequence+zero1@2", "llama pipeline@2"),
    ("llama pipeline@2", "llama sequence+zero3@4"),
]

NOISE = 2e-5
"""Measured over the whole matrix: at most 4e-7. Sums in another order, 20 steps on."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("portable")


@pytest.mark.parametrize("pair", also_long(map("-to-".join, PAIRS + LONG_PAIRS), [*map("-to-".join, LONG_PAIRS)]))
def test_any_engine_goes_on_where_any_other_stopped(pair: str, runs: Path) -> None:
    saved, then = pair.split("-to-")
    assert portability.difference(saved, then, runs) < NOISE


@pytest.mark.parametrize(
    "setup",
    also_long(
        ["zero3@2", "zero3+sharded@2", "horovod@2", "fsdp@2", "single@1", "ddp@3"], ["zero3@2", "single@1", "ddp@3"]
    ),
)
def test_the_same_engine_goes_on_to_the_last_bit(setup: str, runs: Path) -> None:
    assert portability.difference(setup, setup, runs) == 0.0


@pytest.mark.parametrize("engine", also_long(["horovod", "ddp"], ["ddp"]))
def test_several_buckets_on_three_ranks_go_on_to_the_last_bit(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From three ranks on, the order of a sum depends on where a gradient lies in the message: the same in every run."""
    deep = portability.Setup(engine, 3, ("dsframe.task.layers=6", "dsframe.task.width=128"))
    monkeypatch.setitem(portability.SETUPS, "deep", deep)
    assert portability.difference("deep", "deep", tmp_path) == 0.0


def test_dropout_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    config = configuration("ddp", {}, 19)
    config["dsframe"] |= {"steps": 20, "log_every_steps": 1, "checkpoints": {"every_steps": 7}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["-m", "dsframe.train", "--config", "config.json", "--run-dir"]
    run_ranks(warm(2, [*arguments, "whole"]), timeout_seconds=100, cwd=tmp_path).check()
    saved = str(tmp_path / "whole" / "checkpoints" / "step-00000014")
    run_ranks(warm(2, [*arguments, "rest", "--resume", saved]), timeout_seconds=100, cwd=tmp_path).check()
    whole, rest = portability.losses(tmp_path / "whole"), portability.losses(tmp_path / "rest")
    assert list(rest) == list(range(15, 21))
    assert all(whole[step] == loss for step, loss in rest.items())


# Through what goes wrong.


def test_a_signal_to_one_rank_saves_and_stops_all(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def ask(running: Running) -> None:
        running.wait_for(
            lambda: (run_dir / "metrics.jsonl").exists() and len(portability.losses(run_dir)) > 20,
            timeout_seconds=60,
            what="step 20",
        )
        running.ranks()[1].send_signal(signal.SIGUSR1)

    setup = portability.SETUPS["ddp@2"]
    stopped = portability.train(setup, run_dir, steps=3000, while_running=ask)
    assert stopped.returncode != 0
    assert "stopped after step" in stopped.stderr
    assert "signal to another rank" in stopped.stderr
    assert re.search(r"exitcode\s*: 75", stopped.stderr)
    (saved,) = Store(run_dir / "checkpoints").newest_first()
    step = store.step_of(saved)
    assert step is not None
    assert store.verify(saved) == []
    assert max(portability.losses(run_dir)) == step
    # The schedule is longer: said.
    portability.train(setup, run_dir, "--resume", "auto", steps=step + 5, timeout_seconds=60)
    assert list(portability.losses(run_dir)) == list(range(1, step + 6))


def test_one_process_leaves_with_75(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def ask(running: Running) -> None:
        running.wait_for((run_dir / "metrics.jsonl").exists, timeout_seconds=60, what="training")
        time.sleep(0.5)
        running.process.send_signal(signal.SIGTERM)

    stopped = portability.train(portability.SETUPS["single@1"], run_dir, steps=100_000, while_running=ask)
    assert stopped.returncode == 75
    assert "by SIGTERM; go on with --resume auto" in stopped.stderr


def test_a_signal_to_every_process_saves_where_workers_read(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def ask(running: Running) -> None:
        running.wait_for((run_dir / "metrics.jsonl").exists, timeout_seconds=60, what="training")
        time.sleep(0.5)
        os.killpg(running.process.pid, signal.SIGTERM)

    task = ("--set", 'dsframe.task={"name": "tests.faults.slow_task:ReadingTask"}')
    stopped = portability.train(portability.SETUPS["single@1"], run_dir, *task, steps=100_000, while_running=ask)
    assert stopped.returncode == 75, stopped
    assert "by SIGTERM; go on with --resume auto" in stopped.stderr
    assert len(list(Store(run_dir / "checkpoints").newest_first())) == 1


def test_damage_is_named_set_aside_and_the_one_before_used(tmp_path: Path) -> None:
    setup, run_dir = portability.SETUPS["zero1@2"], tmp_path / "run"
    portability.train(setup, run_dir, "--set", "dsframe.checkpoints.every_steps=10").check()
    whole = portability.losses(run_dir)
    checkpoints = Store(run_dir / "checkpoints")
    assert [store.step_of(path) for path in checkpoints.newest_first()] == [25, 20, 10]
    part = next(checkpoints.path(25).glob("part-00001-*"))
    content = bytearray(part.read_bytes())
    content[-100] ^= 4
    part.write_bytes(content)
    with next(checkpoints.path(20).glob("part-00000-*")).open("r+b") as file:
        file.truncate(1000)
    done = portability.train(setup, run_dir, "--resume", "auto").check()
    assert "part-00001-000.safetensors was altered" in done.stderr
    assert "part-00000-000.safetensors has 1,000 bytes instead of" in done.stderr
    assert "going on after step 10" in done.stderr
    names = {path.name for path in checkpoints.directory.iterdir()}
    assert {"step-00000025.damaged", "step-00000020.damaged", "step-00000025", "step-00000010"} <= names
    assert portability.losses(run_dir) == whole
    # One of another version is whole: neither used nor set aside.
    newest = checkpoints.path(25)
    (newest / store.MANIFEST).write_bytes(
        store.dump({**store.read_manifest(newest), "format": store.SHARDED_FORMAT + 1})
    )
    refused = portability.train(setup, run_dir, "--resume", "auto")
    assert refused.returncode != 0
    assert (
        f"{newest} has format {store.SHARDED_FORMAT + 1}, this dsframe reads {store.FORMAT} and {store.SHARDED_FORMAT}"
        in refused.stderr
    )
    assert newest.is_dir()


def test_what_cannot_be_written_is_said_and_the_one_before_stays(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    setup, run_dir = portability.SETUPS["ddp@2"], tmp_path / "run"
    portability.train(
        setup,
        run_dir,
        "--set",
        "dsframe.checkpoints.at_end=false",
        "--set",
        "dsframe.checkpoints.every_steps=5",
        steps=7,
    ).check()
    (good,) = Store(run_dir / "checkpoints").newest_first()
    failed = portability.train(setup, run_dir, "--resume", "auto", limit_kilobytes=200)
    assert failed.returncode != 0
    assert "the checkpoint of step 25 cannot be written: rank 0: " in failed.stderr
    assert f"the last good one is {good}" in failed.stderr
    assert "File too large" in failed.stderr
    assert [path.name for path in good.parent.iterdir() if path.name != "latest"] == [good.name]
    assert store.verify(good) == []


def test_another_training_is_refused_before_it_starts(tmp_path: Path) -> None:
    setup, run_dir = portability.SETUPS["single@1"], tmp_path / "run"
    portability.train(setup, run_dir, steps=3).check()
    wrong = portability.train(setup, run_dir, "--resume", "auto", "--set", "dsframe.seed=1", steps=9)
    assert wrong.returncode == 8
    assert wrong.stderr.strip().endswith(
        "dsframe: error: the checkpoint is of another training: seed was 0, is 1 (the order of samples follows from it). "
        "Change it back, or start over with --resume never [checkpoint]"
    )
    again = portability.train(setup, run_dir, steps=3).check()
    assert "are now in" in again.stderr
    assert Store(run_dir / "checkpoints.1").newest_first()
