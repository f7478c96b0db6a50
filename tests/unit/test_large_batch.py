"""Learning rates for other batch sizes: the schedule that results, and what is said of it. And cores for each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsframe.cluster import cores
from dsframe.cluster.world import World
from dsframe.config.load import examine
from dsframe.config.resolve.scaling import factor, sentence
from dsframe.config.schema.settings_model import LargeBatch
from dsframe.errors import WorldError
from dsframe.model import schedules
from tests.processes import REPOSITORY

LINEAR = LargeBatch(lr_scaling="linear", reference_batch_size=256)


def test_factors() -> None:
    assert factor(LINEAR, 1024) == 4.0
    assert factor(LINEAR, 64) == 0.25
    assert factor(LargeBatch(lr_scaling="sqrt", reference_batch_size=256), 1024) == 2.0
    assert factor(LargeBatch(reference_batch_size=256), 1024) == 1.0
    assert sentence(LargeBatch(reference_batch_size=256), 1024) is None
    assert sentence(LINEAR, 1024) == "learning rates x 4 (linear: batch 1,024 / reference 256)"


SCHEDULES: list[tuple[str | None, dict[str, Any], tuple[str, ...]]] = [
    (None, {}, ()),
    ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 5}, ("warmup_min_lr", "warmup_max_lr")),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 5}, ()),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 5}, ("cycle_min_lr", "cycle_max_lr")),
    ("StepLR", {"step_size": 3}, ()),
    ("CosineAnnealingLR", {"T_max": 10, "eta_min": 1e-4}, ("eta_min",)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "params", "rates"), SCHEDULES)
def test_scaling_is_as_if_every_rate_of_the_file_were_scaled(kind: Any, params: Any, rates: tuple[str, ...]) -> None:
    written = {name: value * 4 if name in rates else value for name, value in params.items()}
    by_hand = schedules.build(kind, 4e-3, written)
    scaled = schedules.scaled(schedules.build(kind, 1e-3, params), 4.0)
    for step in range(25):
        assert scaled(step).learning_rate == pytest.approx(by_hand(step).learning_rate, rel=1e-12)
        assert scaled(step).momentum == by_hand(step).momentum


def test_the_factor_grows() -> None:
    course = schedules.scaled(schedules.constant(0.1), 5.0, warmup_steps=4)
    assert [course(step).learning_rate for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])


def problems(large_batch: dict[str, Any], processes: int | None = None, **keys: Any) -> list[str]:
    from dsframe.config.resolve.auto import Facts

    file = {"train_batch_size": 1024, **keys, "dsframe": {"large_batch": large_batch}}
    return [str(problem) for problem in examine(json.dumps(file), "x.json", facts=Facts(world_size=processes)).problems]


def test_what_the_check_says() -> None:
    good = {"lr_scaling": "linear", "reference_batch_size": 256, "warmup_steps": 500}
    [line] = problems(good, 2)
    assert "note: dsframe.large_batch: learning rates x 4 (linear: batch 1,024 / reference 256), growing" in line
    assert any('add "reference_batch_size"' in line for line in problems({"lr_scaling": "sqrt"}))
    assert any('lr_scaling is "none"' in line for line in problems({"warmup_steps": 5}))
    assert any(
        "already scales with the number of ranks" in line for line in problems(good, gradient_allreduce_op="sum")
    )
    warmup = {"type": "WarmupLR", "params": {}}
    assert any("the two ramps multiply" in line for line in problems(good, scheduler=warmup))


def test_cores_are_shared_out() -> None:
    assert [cores.share((0, 1, 2, 3, 4), rank, 2) for rank in range(2)] == [(0, 1), (2, 3, 4)]
    assert [cores.share((3, 7), rank, 2) for rank in range(2)] == [(3,), (7,)]
    with pytest.raises(WorldError, match=r"3 ranks on this host, but only 2 usable core\(s\); start fewer ranks"):
        cores.share((0, 1), 0, 3)
    usable = os.sched_getaffinity(0)
    assert set(cores.by_core(usable)) == usable


def test_binding_and_what_was_bound_before(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, chosen: bound.append(tuple(chosen)))
    affinity = {0: {0, 1, 2, 3}, os.getppid(): {0, 1, 2, 3}}
    monkeypatch.setattr(os, "sched_getaffinity", affinity.__getitem__)
    monkeypatch.setattr(cores, "by_core", lambda usable: tuple(sorted(usable)))
    second = World(rank=1, size=2, local_rank=1, local_size=2, launcher="torchrun")
    assert cores.bind(second) == (2, 3)
    affinity[0] = {1}  # the launcher has bound this rank
    assert cores.bind(second) == (1,)
    assert bound == [(2, 3)]


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one usable core: nothing to share out")
def test_a_process_is_bound() -> None:
    code = (
        "import os; from dsframe.cluster import cores, world; "
        "from dsframe.run import settle_threads; here = world.here(); "
        "bound = cores.bind(here); assert tuple(sorted(os.sched_getaffinity(0))) == tuple(sorted(bound)); "
        "print(*bound, settle_threads(here, None, bound))"
    )
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **TORCHRUN},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=REPOSITORY,
    )
    usable = cores.by_core(os.sched_getaffinity(0))
    expected = cores.share(usable, 1, 2)
    assert done.stdout.split() == [*map(str, expected), str(len(expected))]


@pytest.mark.parametrize(
    ("information", "emulated"),
    [
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", False),
        ("Features\t: fp asimd bf16\n", False),
        ("flags\t\t: fpu avx2 avx512f\n", True),
        ("model name\t: one that does not say what it can do, bf16 or not\n", False),
    ],
)
def test_a_processor_without_the_instructions_is_known(tmp_path: Path, information: str, emulated: bool) -> None:
    (tmp_path / "cpuinfo").write_text(information)
    assert cores.emulates("bfloat16", tmp_path / "cpuinfo") is emulated
    assert not cores.emulates("bfloat16", tmp_path / "nothing")
