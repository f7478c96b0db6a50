"""The code that only runs on GPUs, on the stand-in for them (``tests/standin``): engines train as on the CPU, do not wait where
they need not, and copy as they should; and the stand-in sees the mistakes that it is there for.

No GPU is involved: what the stand-in cannot see is in its docstring.
"""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsframe import tasks
from dsframe.config import load
from dsframe.data.prefetch import READER
from dsframe.run_dir.record import read_metrics
from dsframe.tools.compare import losses
from dsframe.tools.plan.device import Device
from dsframe.tools.plan.footprint import predict
from dsframe.tools.plan.model import traced
from tests.files import read_json, write_json, zero
from tests.processes import Finished, run_ranks, warm
from tests.standin import build

if reason := build.reason_against():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.timeout(600)

STEPS, SAVED = 30, 16
QUIET = (7, 11)
"""Steps that neither log nor evaluate, in which no weights are looked at (``dsframe.model.weight_watch``), after
those in which ranks first compare what they have called."""
BOUND = 1e-5
BF16_BOUND = 5e-3
"""Against fp32: a rounding to bf16 is 2**16 times larger than one to fp32."""
_CPU = {"device": "cpu", "pin_memory": True}
_BF16 = {"bf16": {"enabled": True}}


@dataclass(frozen=True)
class Case:
    """An engine, and what it adds to the file."""

    engine: str
    file: Mapping[str, Any]
    ranks: int = 2
    waits: tuple[str, ...] = ()
    """Where DeepSpeed 0.19.8 itself waits in every step, by file and function's line; nothing switches it off."""
    offloads: bool = False
    """Gradients and weights pass through the host by the file's wish: copies and waits are DeepSpeed's."""

    @property
    def bound(self):
        return BF16_BOUND if "bf16" in self.file else BOUND


_NORM = "deepspeed/runtime/utils.py"
"""``is_invalid_grad_norm``: at stages 1 to 3 the host looks whether the norm is a number before it updates."""
_EPILOGUE = "runtime/zero/stage3.py"
"""``independent_gradient_partition_epilogue`` waits for its stream of reductions."""
_TWO_STEPS_AGO = "dsframe/engines/call_order.py"
"""Engines whose ranks must call the same compare what they called two steps ago: that has long arrived."""

CASES = {
    "single": Case("single", {}, ranks=1),
    "ddp": Case("ddp", {}),
    "fsdp": Case("fsdp", {}),
    "zero1": Case("deepspeed", zero(1), waits=(_NORM,)),
    "zero3": Case("deepspeed", zero(3), waits=(_NORM, _EPILOGUE)),
    "zero3 offloaded": Case("deepspeed", zero(3, offload_optimizer=_CPU, offload_param=_CPU), offloads=True),
    "zero3 bf16": Case("deepspeed", {**zero(3), **_BF16}, waits=(_NORM, _EPILOGUE)),
    "pipeline": Case("deepspeed", {"pipeline": {"stages": 2}}),
    "tensor": Case("deepspeed", {"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}}),
    "sequence": Case("deepspeed", {"sequence_parallel_size": 2, **zero(1)}, waits=(_NORM,)),
}
ALWAYS = ("ddp", "fsdp", "zero1", "zero3", "pipeline")


def document(case, **section):
    return {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **case.file,
        "dsframe": {
            "task": {"name": "language", "layers": 2, "heads": 4, "width": 64, "context": 32, "samples": 200},
            "engine": case.engine,
            "steps": STEPS,
            "log_every_steps": 3,
            "eval_every_steps": STEPS,
            "eval_micro_batch_size": 32,
            "eval_samples": 64,
            "threads_per_rank": 1,
            "checkpoints": {"every_steps": SAVED, "at_end": False},
            **section,
        },
    }


@dataclass(frozen=True)
class Run:
    """What a training on the stand-in left."""

    finished: Finished
    folder: Path
    records: list[dict[str, Any]]
    """Each rank's events and bytes."""

    @property
    def losses(self):
        return losses(self.folder / "run")

    @property
    def norm(self):
        """The gradient's norm at the first step, which clipping and AdamW hide from the losses."""
        return first_norm(self.folder / "run")

    def events(self, *phases):
        """What happened in these phases on any rank: what, how, where."""
        return {
            (what, detail, where)
            for record in self.records
            for what, detail, where, phase, _ in record["events"]
            if phase in phases
        }

    def readers(self):
        """The threads that send batches to the device."""
        events = (event for record in self.records for event in record["events"])
        sent = ((where, thread) for what, _, where, _, thread in events if what == "to device")
        # What a library sends while draws are given to samples is no batch.
        return {thread for where, thread in sent if "dsframe/data/" in where and "sample_draws" not in where}


@functools.cache
def scratch():
    """A folder for this module's runs, which share them."""
    return Path(tempfile.mkdtemp(prefix="dsframe-standin-"))


@pytest.fixture(scope="module", autouse=True)
def _remove_runs():
    yield
    shutil.rmtree(scratch(), ignore_errors=True)
    scratch.cache_clear()


def train(case, *words, resume=None, file=None, **section):
    """``words``: as ``tests.standin.train`` takes them."""
    folder = Path(tempfile.mkdtemp(dir=scratch()))
    path = folder / "file.json"
    write_json(path, {**document(case, **section), **(file or {})})
    arguments = ["-m", "tests.standin.train", str(folder / "records"), *words, "--", "--config", str(path)]
    arguments += ["--run-dir", str(folder / "run")] + (["--resume", str(resume)] if resume else [])
    finished = run_ranks(warm(case.ranks, arguments, standin=True), timeout_seconds=300)
    records = [read_json(one) for one in sorted((folder / "records").glob("rank-*.json"))]
    return Run(finished, folder, records)


@functools.cache
def trained(name):
    run = train(CASES[name])
    run.finished.check()
    return run


def first_norm(directory):
    return next(float(line["gradient_norm"]) for line in read_metrics(directory) if line.get("loss") is not None)


@functools.cache
def reference():
    """One process on the CPU: its losses, and the first gradient's norm."""
    folder = Path(tempfile.mkdtemp(dir=scratch()))
    path = folder / "file.json"
    write_json(path, document(CASES["single"], log_every_steps=1))
    arguments = ["-m", "dsframe.train", "--config", str(path), "--run-dir", str(folder / "run")]
    run_ranks(warm(1, arguments), timeout_seconds=300).check()
    return losses(folder / "run"), first_norm(folder / "run")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in CASES]
)
def test_an_engine_trains_as_on_the_cpu_and_waits_nowhere(name):
    """Two ranks, with an evaluation and a save; the losses are those of one process on the CPU."""
    case, run = CASES[name], trained(name)
    assert " x cuda under " in run.finished.stderr
    expected, norm = reference()
    assert STEPS in run.losses
    assert {step: loss for step, loss in run.losses.items() if abs(loss - expected[step]) > case.bound} == {}, expected
    assert run.norm == pytest.approx(norm, rel=20 * case.bound)
    quiet = run.events(*(f"step {step}" for step in QUIET))
    copies = {event for event in quiet if event[0] == "to device" and "dsframe/data/" in event[2]}
    assert copies, "a step takes its batches"
    copies |= {event for event in run.events(f"evaluation {STEPS}") if event[0] == "to device" and "/data/" in event[2]}
    assert all(detail.endswith("non-blocking pinned contiguous side-stream") for _, detail, _ in copies), copies
    assert {name.partition("_")[0] for name in run.readers()} == {READER}, "batches are read beside the steps"
    before_pauses = run.events(f"evaluation {STEPS}") & run.events(f"save {SAVED}")
    assert any(what == "wait" and "dsframe/training/checkpoints.py" in where for what, _, where in before_pauses), (
        "a pause begins afterwards"
    )
    if case.offloads:
        return
    waits = {where for what, _, where in quiet if what == "wait"}
    assert {where for where in waits if where.rpartition(":")[0] not in (*case.waits, _TWO_STEPS_AGO)} == set()
    slow = {
        where
        for what, detail, where in quiet
        if what == "to device" and "dsframe/" in where and "blocking" in detail.split()
    }
    assert slow == set(), "dsframe's own copies wait for nothing"
    assert any(what == "wait" for what, _, _ in run.events("log 3")), "a step that logs waits: the record works"


def test_zero_3_never_holds_the_model_whole():
    """A rank's device has its share and one parameter when DeepSpeed starts its engine."""
    case = CASES["zero3"]
    task = load(document(case)).settings.task
    whole = 4 * sum(parameter.numel() for parameter in tasks.build(task, 0).model().parameters())
    bytes_of = [record["usage"]["before initialize"][1] for record in trained("zero3").records]
    assert max(bytes_of) < 0.8 * whole
    wrong = train(case, "whole-model-at-stage-3", steps=1, eval_every_steps=50, checkpoints={"at_end": False})
    assert max(record["usage"]["before initialize"][1] for record in wrong.records) >= whole


def test_the_peak_of_training_is_its_own():
    """What the set-up took for a moment is not in the record."""
    run = trained("ddp")
    live, peak = run.records[0]["usage"]["before fit"]
    assert live == peak
    assert run.records[0]["usage"]["set-up"][1] > live
    summary = read_json(run.folder / "run" / "summary.json")
    assert summary["peak_memory_bytes"] == [record["usage"]["training"][1] for record in run.records]


def test_a_run_that_is_started_again_goes_on_to_the_last_bit():
    straight = trained("ddp")
    again = train(CASES["ddp"], resume=straight.folder / "run")
    again.finished.check()
    assert again.losses == {step: loss for step, loss in straight.losses.items() if step > SAVED}


@pytest.mark.parametrize("name", ALWAYS)
def test_bytes_are_near_the_plans(name):
    """The model has 118,528 parameters: one layer's weights, and buckets, count for more here than in a
    model that fills a GPU."""
    run = trained(name)
    summary = read_json(run.folder / "run" / "summary.json")
    config = load(run.folder / "run" / "config.json")
    model = traced(config, tasks.build(config.settings.task, config.settings.seed))
    device = Device("any", float("inf"), on_cpu=summary["device"] != "cuda")
    plan = predict(config, summary["engine"], model, device, summary["world_size"])
    guess = plan.memory.total + summary["base_bytes"]
    held = max(record["usage"][f"step {QUIET[-1]}"][1] for record in run.records)
    # Of a pipeline the plan takes all stages to be equal.
    assert 0.85 < held / guess < (1.5 if name == "pipeline" else 1.4)


def test_a_rank_that_sleeps_is_named():
    """The others wait on their device, as under NCCL, or in a collective."""
    run = train(CASES["zero1"], "sleeping-rank", hang_timeout_seconds=3)
    assert run.finished.returncode != 0
    assert "dsframe: error: the run hangs in step 3: no progress for" in run.finished.stderr
    assert re.search(r"rank 1 IS MISSING there: it is in \w+, train.py:\d+: time.sleep\(1000\)", run.finished.stderr)
    where = r"collectives of process group .*: rank 0 waits in number \d+, \w+:\w+ of \[\[.*rank 1 has done number"
    assert re.search(where, run.finished.stderr), run.finished


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_every_task_may_see_one_gpu_alone(launcher):
    """DeepSpeed takes LOCAL_RANK for a device number (and asserts that Open MPI says the same): rank 1's was 1 of one device."""
    run = train(
        CASES["zero1"], launcher, steps=2, log_every_steps=2, eval_every_steps=50, checkpoints={"at_end": False}
    )
    run.finished.check()
    assert abs(run.losses[2] - reference()[0][2]) < BOUND


def test_a_horovod_without_nccl_is_refused():
    pytest.importorskip("horovod.torch")
    run = train(Case("horovod", {}))
    assert run.finished.returncode == 4
    assert "this Horovod was built without NCCL" in run.finished.stderr


@pytest.mark.parametrize(
    ("mistake", "engine", "message"),
    [
        (
            "host-tensor-in-a-collective",
            "ddp",
            "No backend type associated with device type cpu|nccl takes tensors of the device alone",
        ),
        ("batch-on-the-host", "single", "on the same device|must be on the device"),
        ("model-on-the-host", "single", "on the same device|must be on the device"),
        ("device-of-another-host", "ddp", "cuda:1 is out of range|invalid device ordinal 1: there are 1 devices"),
        ("reads-before-it-arrived", "single", "leave such updates out"),
    ],
)
def test_a_mistake_is_refused(mistake, engine, message):
    run = train(CASES[engine], mistake, steps=2, log_every_steps=1, eval_every_steps=50, checkpoints={"at_end": False})
    assert run.finished.returncode != 0
    assert re.search(message, run.finished.output), run.finished


@pytest.mark.parametrize(
    ("mistake", "what", "detail", "where"),
    [
        ("item-in-every-step", "wait", "_local_scalar_dense", "standin/train.py"),
        ("pageable-batch", "to device", "pageable", "data/prefetch.py"),
    ],
)
def test_a_mistake_is_recorded(mistake, what, detail, where):
    run = train(CASES["single"], mistake, eval_every_steps=50, checkpoints={"at_end": False})
    found = run.events(*(f"step {step}" for step in QUIET))
    assert any(event[0] == what and detail in event[1] and where in event[2] for event in found), found
