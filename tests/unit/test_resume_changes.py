"""What may change between two starts, and what must stay, as a run says it."""

import copy
import math
import os
import socket
import time
import uuid
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dsframe
from dsframe.checkpoint.changes import _FILE, _OWN, FIXED, FOLLOWS, _versions, compare_classes, differences, step_now
from dsframe.checkpoint.store import Store, read_manifest
from dsframe.config import load
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.settings import Settings
from dsframe.config.schema.settings_model import Model
from dsframe.data import TensorSource
from dsframe.errors import CheckpointError
from dsframe.model import build
from dsframe.model.build import attributes, described
from dsframe.model.built import FROZEN
from dsframe.run import execute
from tests.files import ds_config, write_json
from tests.lines import HeldOut, Line
from tests.processes import REPOSITORY, run_ranks, warm

OPTIMIZER = "optimizer.params"
MANIFEST = {
    "step": 100,
    "training": {
        "task": "circles:Circles",
        "task settings": {"name": "circles:Circles", "options": {"width": 4}},
        "optimizer": "adamw",
        "train_batch_size": 64,
        "training samples": 1000,
        "seed": 0,
        "dataloader_drop_last": False,
    },
    "course": {
        "optimizer.params": {"betas": [0.9, 0.999], "weight_decay": 0.0},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "torch_autocast": None,
        "per_sample_randomness": False,
        "optimizers": {"actor": {"lr_decay": 0}},
        "parameter_groups": [],
        "no_decay": None,
        "layer_decay": None,
        "learning rate": 0.1,
        "communication_data_type": None,
        "gradient_allreduce_op": "mean",
        "data_types": {"grad_accum_dtype": None},
        "deterministic": False,
        "tf32": False,
        "on_nonfinite": "stop",
        "stop": {"metric": "loss:min", "patience": 3},
        "eval_every_steps": 10,
        "ema": {"decay": 0.9, "every_steps": 1},
        "model": {"sync_batch_norm": False, "keep_in_fp32": []},
        "communication": {"communication": "none", "compression": "none"},
        "modules": {
            "digest of str(model)": "aa",
            "trained parameters": "4 of 4, digest bb",
            "digest of values that no checkpoint has": "cc",
        },
        "attributes": {"digest of numbers in the model": "dd", "task.alpha": 0.5},
    },
    "run": {"engine": "ddp", "world_size": 2, "micro_batch_size": 8},
    "versions": {"torch": "2.12.0", "python": "3.11.7", "deepspeed": "0.19.8"},
    "source": {"circles": "aa", "nets": "bb"},
    "data": {"0": "aa", "17": "bb", "99": "cc"},
    "evaluation data": {"clean": {"the number of samples": 8, "sample 0": "aa"}},
}
SECTIONS = {"source": "source", "versions": "versions", "data": "training data", "evaluation data": "evaluation data"}
"""What stands beside the course and the run -> what follows from a change there."""


def leaves(value, path):
    """The places of all values that are no sections."""
    if not isinstance(value, dict):
        yield path
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{path}/{key}")


def changed(path, value):
    """What a run tells of itself that differs there."""
    found = copy.deepcopy(MANIFEST)
    *above, last = path.split("/")
    section = found
    for key in above:
        section = section[key]
    section[last] = value
    return found


PLACES = [path for name in ("course", "run", *SECTIONS) for path in leaves(MANIFEST[name], name)]


@pytest.mark.parametrize("path", PLACES)
def test_a_change_anywhere_is_said_once_with_what_follows(path):
    section, key, *_ = path.split("/")
    (line,) = differences(MANIFEST, changed(path, "another"))
    name = SECTIONS.get(section) or line.partition(" was ")[0].partition(".")[0]
    assert line.endswith(f": {FOLLOWS[OPTIMIZER if key == OPTIMIZER else name]}")
    assert path.rpartition("/")[2].replace("_", " ").replace("world size", "ranks") in line.replace("_", " ").replace(
        "-", " "
    )
    if section not in ("source", "data", "evaluation data"):
        assert ' is "another"' in line


@pytest.mark.parametrize("name", FIXED)
def test_what_must_stay_is_refused_with_the_reason(name):
    with pytest.raises(CheckpointError) as raised:
        differences(MANIFEST, changed(f"training/{name}", "another"))
    said = str(raised.value)
    assert said.startswith(f"the checkpoint is of another training: {name} was ")
    assert f'is "another" ({FIXED[name]}). ' in said


def test_what_the_checkpoint_alone_has_must_stay():
    kept = {**MANIFEST, "training": {**MANIFEST["training"], "adapter": {"r": 8}}}
    with pytest.raises(CheckpointError, match="adapter was "):
        differences(kept, MANIFEST)


def test_versions_are_of_what_computes():
    pytest.importorskip("transformers")
    assert {"dsframe", "torch", "deepspeed", "transformers"} <= _versions("deepspeed").keys()
    assert "deepspeed" not in _versions(None)


def test_classes_in_another_order_are_other_classes():
    """Sorted, they are the same, and a model trained on would take each picture for one of another class."""
    compare_classes({"classes": ["cat", "dog"]}, ["cat", "dog"])
    compare_classes({}, ["dog"])
    with pytest.raises(CheckpointError, match="classes are dog, cat, but the checkpoint was trained with cat, dog: "):
        compare_classes({"classes": ["cat", "dog"]}, ["dog", "cat"])


def test_nothing_is_said_of_what_an_older_checkpoint_lacks():
    older = {key: MANIFEST[key] for key in ("step", "training", "run")}
    older["course"] = {"gradient_clipping": 1.0}
    for path in leaves(MANIFEST["course"], "course"):
        assert bool(differences(older, changed(path, "another"))) == (path == "course/gradient_clipping")


ELSEWHERE = {
    "engine", "engine_options", "fallback", "task", "seed", "order", "optimizers", "adapter", "no_decay",
    "parameter_groups", "inherit", "ddp", "horovod",
    "optimizer", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "dataloader_drop_last",
}  # fmt: skip
"""Keys that are compared in another way: by what they make."""
NO_OTHER_TRAINING = {
    # How long, and what is shown, kept and watched.
    "epochs", "steps", "eval_before_training", "eval_samples", "eval_micro_batch_size", "log_every_steps",
    "run_dir", "checkpoints", "hooks", "threads_per_rank", "hang_timeout_seconds", "pass_through",
    "steps_per_print", "dump_state", "log_level", "wall_clock_breakdown", "memory_breakdown", "flops_profiler", "comms_logger",
    "tensorboard", "wandb", "csv_monitor", "comet", "timers", "checkpoint", "datastates_ckpt", "vocabulary_size", "autotuning",
    # Where things lie, and in which order they are summed.
    "fsdp", "zero_optimization", "activation_checkpointing", "pipeline", "aio", "tensor_parallel", "expert_parallel", "compile",
    "prescale_gradients", "gradient_predivide_factor", "disable_python_gc", "disable_allgather", "allgather_size",
    "sequence_parallel_size", "data_parallel_size", "seq_parallel_communication_data_type",
    "use_data_before_expert_parallelism", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "managed_gradient_accumulation",
    # Refused.
    "hybrid_engine", "data_efficiency", "weight_quantization",
}  # fmt: skip


def test_every_key_of_the_file_is_compared_or_makes_no_other_training():
    """A new setting belongs to one of them."""
    keys = {*Settings.model_fields, *DeepSpeed.model_fields}
    assert keys == {*_OWN, *_FILE, *ELSEWHERE, *NO_OTHER_TRAINING}
    assert set(Model.model_fields) == {
        *_OWN["model"], "compile", "channels_last", "activation_checkpointing"
    }  # fmt: skip
    assert {*_OWN, *_FILE} <= MANIFEST["course"].keys() <= FOLLOWS.keys()


def test_nothing_is_said_of_what_only_one_of_them_has():
    """Another engine's library, a module that was added, a sample that there was no time to read."""
    other = copy.deepcopy(MANIFEST)
    other["versions"] = {"torch": "2.12.0", "horovod": "0.28.1"}
    other["source"] = {"circles": "aa", "more": "ee"}
    other["data"] = {"0": "aa"}
    assert differences(MANIFEST, other) == []


@pytest.mark.parametrize(
    ("before", "now", "drop_last", "step", "stands_at"),
    [
        (64, 128, False, 101, 50),
        (64, 48, False, 100, 133),
        (100, 300, True, 25, 7),  # epochs of 10 steps: two of them and 5 steps; now of 3 steps: 2 * 3 + 500 // 300
        (300, 100, True, 7, 23),
        (300, 100, True, 3, 10),  # the end of an epoch is the end of it
    ],
)
def test_a_new_batch_stands_where_the_samples_do(before, now, drop_last, step, stands_at):
    saved, own = copy.deepcopy(MANIFEST), copy.deepcopy(MANIFEST)
    for one, batch in ((saved, before), (own, now)):
        one["training"] |= {"train_batch_size": batch, "dataloader_drop_last": drop_last}
    saved["step"] = step
    assert step_now(saved, own) == stands_at


TASK = """
import torch
from torch import Tensor, nn
import dsframe
from nets import net

class Counting(dsframe.Task):
    def model(self):
        return net()

    def loss(self, outputs, targets):
        if not self.context.evaluating:  # as in a look at the first samples
            print("samples", *targets[:, 0].long().tolist())
        return nn.functional.mse_loss(outputs, targets)

    def train_data(self):
        numbers = torch.arange(64.0)[:, None]
        return torch.utils.data.TensorDataset(numbers / 64, numbers)

if __name__ == "__main__":
    dsframe.main(Counting())
"""
NETS = """
from torch import nn

class net(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
"""
FILE = ds_config(8, "AdamW", 0.01)


def train(folder, run, *arguments, batch=8, steps=8):
    file = FILE | ds_config(batch, engine="single", steps=steps)
    write_json(folder / "my.json", file)
    command = [str(folder / "task.py"), "--config", "my.json", "--run-dir", run, *arguments]
    return run_ranks(warm(1, command), cwd=folder, env={"PYTHONPATH": f"{folder}:{REPOSITORY}"}, timeout_seconds=90)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def samples(finished):
    """Those that the loss has seen, in order."""
    return [
        int(word) for line in finished.check().stdout.splitlines() for word in line.split()[1:] if "samples" in line
    ]


def changes(finished):
    return [line.partition("a change: ")[2] for line in finished.check().stderr.splitlines() if "a change: " in line]


def test_code_rate_and_data_that_changed_are_said_by_a_run(folder):
    train(folder, "run", steps=2).check()
    assert changes(train(folder, "run", "--resume", "auto", steps=3)) == []
    (folder / "nets.py").write_text(NETS + "# changed\n")
    (folder / "task.py").write_text(TASK.replace("arange(64.0)[:, None]", "arange(64.0)[:, None] * 2"))
    said = changes(train(folder, "run", "--resume", "auto", "--set", "optimizer.params.lr=0.02", steps=4))
    assert said == [
        "learning rate was 0.01, is 0.02: the new schedule continues at the saved number of updates",
        "the source of nets, task was changed: the new code continues from the saved state",
        f"the training data: sample 31 was another one: {FOLLOWS['training data']}",
        "the learning rate continues at 0.02; with the saved settings it would be 0.01",
    ]


def test_a_new_batch_goes_on_with_the_samples_that_come_next(folder):
    whole = samples(train(folder, "whole", steps=8))
    assert sorted(whole) == list(range(64))
    first = samples(train(folder, "run", steps=3))
    (path,) = Store(folder / "run" / "checkpoints").newest_first()
    refused = train(folder, "run", "--resume", "auto", batch=16, steps=4)
    assert refused.returncode == 8
    assert "train on in another directory: --run-dir NEW --resume PATH" in refused.stderr
    more = train(folder, "more", "--resume", str(path), batch=16, steps=4)
    assert first == whole[:24]
    assert samples(more) == whole[16:], "8 of them once more"
    (line,) = [line for line in changes(more) if line.startswith("train_batch_size")]
    assert "was 8, is 16: step 3 is step 1 now" in line
    assert "continuing after step 1 from" in more.stderr
    (newest,) = Store(folder / "more" / "checkpoints").newest_first()
    assert (read_manifest(newest)["step"], read_manifest(newest)["updates"]) == (4, 6)


class Shaped(HeldOut):
    """A task with an argument."""

    inputs, outputs, rows = 8, 3, 48

    def __init__(self, kind=""):
        self.kind = kind

    def model(self):
        layers = [nn.Linear(8, 16), nn.ReLU() if self.kind == "relu" else nn.Tanh(), nn.Linear(16, 3)]
        if self.kind == "frozen":
            layers[0].requires_grad_(False)
        drawn = np.random.default_rng().normal(size=8)  # no seed fixes it
        if self.kind == "buffer":
            layers[0].register_buffer("drawn", torch.from_numpy(drawn), persistent=False)
        if self.kind in ("attribute", "array"):
            layers[0].drawn = torch.from_numpy(drawn) if self.kind == "attribute" else drawn
        return nn.Sequential(*layers)

    def metrics(self, outputs, targets):
        right = (outputs.argmax(1) == targets.argmax(1)).sum()
        return {**super().metrics(outputs, targets), "accuracy": dsframe.Sum(right, len(targets))}


@pytest.fixture
def said_at_a_resume(tmp_path, capsys):
    """Trains, resumes with changes, and returns the lines about them."""

    def run(first, then, resume="auto"):
        def fit(task=Shaped(), top=None, name="run", resume="never", **own):  # noqa: B008
            file = FILE | (top or {}) | {"dsframe": {"engine": "single", "run_dir": str(tmp_path / name), **own}}
            dsframe.fit(task, file, resume=resume)

        fit(**{"steps": 6, **first})
        capsys.readouterr()
        fit(**{"steps": 8, "resume": resume.format(tmp_path), **then})
        return [
            line.partition("a change: ")[2] for line in capsys.readouterr().err.splitlines() if "a change: " in line
        ]

    return run


EMA = {"ema": {"decay": 0.9}}
LATE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
STOP = {"stop": {"metric": "loss:min", "patience": 9}}
PLATEAU = {"scheduler": {"type": "ReduceLROnPlateau", "params": {"metric": "loss"}}}
SLOW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}


@pytest.mark.parametrize(
    ("first", "then", "line"),
    [
        (EMA, EMA, ""),
        (EMA, {"ema": {"decay": 0.99}}, "ema.decay was 0.9, is 0.99: "),
        (
            {"stop": {"metric": "loss:min"}},
            {"stop": {"metric": "accuracy:max"}},
            'stop.metric was "loss:min", is "accuracy:max": the counts continue; those of another metric start again',
        ),
        ({"task": Shaped("frozen")}, {}, 'modules.trained parameters was "2 of 4, digest '),
        ({}, {"task": Shaped("relu")}, 'modules.digest of str(model) was "'),
        *(
            ({"task": Shaped(kind)}, {"task": Shaped(kind)}, "modules.digest of values that no checkpoint has was ")
            for kind in ("buffer", "attribute", "array")
        ),
        ({"top": LATE, "steps": 1}, {"top": LATE | SLOW}, "learning rate was 0.01, is 0.001: the new schedule"),
        ({"eval_every_steps": 1}, {"eval_every_steps": 2}, ""),
        *(
            (
                {"eval_every_steps": 1, **follows},
                {"eval_every_steps": 2, **follows},
                "eval_every_steps was 1, is 2: early ",
            )
            for follows in (STOP, {"top": PLATEAU})
        ),
    ],
)
def test_a_change_of_a_setting_or_of_the_model_is_said_by_a_run(said_at_a_resume, first, then, line):
    said = [text for text in said_at_a_resume(first, then) if not text.startswith("attributes.")]  # of the task
    assert len(said) == bool(line)
    assert not line or said[0].startswith(line)


class Scaled(nn.Linear):
    def __init__(self, settings):
        super().__init__(8, 3)
        self.settings = settings

    def forward(self, inputs):
        return super().forward(inputs) * self.settings.scale


class Argued(Shaped):
    """With the arguments of a program, as one that parses its command line has them, and validation data of a file."""

    def __init__(self, scale=1.0, evaluated=24, first=0, **arguments):
        super().__init__()
        self.network, self.evaluated = Namespace(scale=scale, folder="/data"), slice(first, first + evaluated)
        self.arguments = Namespace(alpha=0.5, kind="focal", weights=torch.ones(3), token="of today")
        vars(self.arguments).update(arguments)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=self.arguments.alpha)

    def model(self):
        return Scaled(self.network)

    def eval_data(self):
        return TensorSource(*(part[self.evaluated] for part in self.train_data()._data))


@pytest.mark.parametrize(
    ("then", "line"),
    [
        ({}, ""),
        ({"token": "of tomorrow"}, ""),
        ({"hash": hash("cat") | 1 << 60}, ""),
        ({"alpha": 0.1}, "attributes.task.arguments.alpha was 0.5, is 0.1: the next step uses it"),
        ({"kind": "dice"}, 'attributes.task.arguments.kind was "a text, digest '),
        ({"weights": torch.tensor([1.0, 1, 2])}, 'attributes.task.arguments.weights was "[3] 3", is "[3] 4": '),
        ({"scale": 2.0}, "attributes.digest of numbers in the model was "),
        ({"evaluated": 8}, "the evaluation data: the number of samples was another one: "),
        ({"first": 1}, "the evaluation data: sample 0 was another one: metrics from before, the best one and "),
    ],
)
def test_arguments_and_validation_data_that_changed_are_said(said_at_a_resume, then, line):
    """Neither weights nor source show them."""
    said = said_at_a_resume({"task": Argued()}, {"task": Argued(**then)})
    assert [text for text in said if text.startswith(line)] if line else not said


def test_what_one_of_several_models_is_told_is_said(said_at_a_resume):
    class Two(Argued):
        model = dsframe.Task.model

        def models(self):
            return {"one": lambda: nn.Linear(8, 3), "other": lambda: Scaled(self.network)}

        def losses(self):
            return {"one": self.measured, "other": self.measured}

        def measured(self, models, inputs, targets):
            return sum(nn.functional.cross_entropy(model(inputs), targets) for model in models.values())

    said = said_at_a_resume({"task": Two()}, {"task": Two(scale=2.0)})
    assert [text for text in said if text.startswith("attributes.digest of numbers in the model, other was ")]


class Opened(Shaped):
    """Its data are behind a key."""

    def __init__(self, api_key):
        super().__init__()


def test_where_the_data_are_and_what_opens_them_may_change_and_is_not_kept(tmp_path):
    images = {"name": "vision", "dataset": "synthetic", "image_size": 16, "samples": 8}
    elsewhere = {"workers": 1, "data_dir": str(tmp_path)}
    opened = {"name": f"{__name__}:Opened", "options": {"api_key": "the-key"}}
    for one, other in ((images, images | elsewhere), (opened, opened | {"options": {"api_key": "the-key of today"}})):
        folder = tmp_path / one["name"].rpartition(":")[2]
        for steps, task in ((1, one), (2, other)):
            file = FILE | {"dsframe": {"engine": "single", "steps": steps, "run_dir": str(folder), "task": task}}
            execute(load(file), resume="auto", quiet=True)
        newest = Store(folder / "checkpoints").newest_first()[0]
        assert "the-key" not in (newest / "manifest.json").read_text()


def test_the_first_evaluation_of_a_new_metric_may_lack_it(said_at_a_resume):
    """It was another code's: the next evaluation has it."""

    class Before(Shaped):
        metrics = dsframe.Task.metrics

    Before.__module__, Before.__qualname__ = Shaped.__module__, Shaped.__qualname__
    more = {"eval_every_steps": 2, "stop": {"metric": "loss:min"}}
    (line,) = said_at_a_resume({"task": Before(), **more}, {**more, "stop": {"metric": "accuracy:max"}})
    assert line.startswith("stop.metric was ")


def test_a_new_batch_says_that_the_schedule_ends_elsewhere(said_at_a_resume):
    key = "num_training_steps"

    def top(batch):
        return {"train_batch_size": batch, "scheduler": {"type": "linear", "params": {key: "auto"}}}

    first = {"top": top(6), "epochs": 6, "steps": None, "checkpoints": {"every_steps": 24, "keep_last": 9}}
    path, then = "{}/run/checkpoints/step-00000024", {"epochs": 6, "steps": None, "name": "more"}
    said = said_at_a_resume(first, {**then, "top": top(12)}, path)
    (line,) = [line for line in said if line.startswith("the schedule is for")]
    assert line.startswith(f"the schedule is for 24 updates ({key}), the training has 36: the last has the rate ")
    assert line.endswith(f"; write {key} 36 to end with it")


def test_a_model_is_described_without_addresses_and_earlier_trainings():
    class Addressed(nn.Module):
        def __init__(self):
            super().__init__()
            self.of = object()

        def extra_repr(self):
            return repr(self.of)

    model, other = (nn.Sequential(nn.Linear(2, 2), Addressed()) for _ in range(2))
    before = described(model)
    assert str(other) != str(model)
    assert described(other) == before
    model[0].weight.requires_grad_(False)
    assert described(model)["trained parameters"].startswith("1 of 2, ")
    vars(model[0].weight)[FROZEN] = True  # by a group, which does so again or does not
    assert described(model) == before


def test_the_description_does_not_depend_on_the_order_of_a_set():
    """Each process has another one: rotary embeddings of transformers have two such buffers."""
    names = [f"buffer_{number}" for number in range(9)]
    digests = set()
    for order in (names, names[::-1]):
        model = nn.Module()
        for name in names:
            model.register_buffer(name, torch.full([2], float(name[-1])), persistent=False)
        model._non_persistent_buffers_set = order  # in the place of the set
        digests.add(described(model)["digest of values that no checkpoint has"])
    assert len(digests) == 1


def test_a_data_set_that_the_task_holds_is_not_read(monkeypatch):
    """Its samples are compared elsewhere; a sum in float64 would take several times its memory."""
    monkeypatch.setattr(build, "_PIECE", 4)
    task = Line()
    task.weights, task.images = torch.ones(3), torch.ones(3, 3)
    recorded = attributes(nn.Linear(2, 2), task)
    assert {recorded["task.weights"], recorded["task.images"]} == {"[3] 3", "9 values"}


def test_any_object_in_an_attribute_is_recorded_or_left_out():
    """A compiled model keeps classes of torch, whose shape is a descriptor."""
    task = Line()
    task.values = [
        Tensor,
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.ones(2).to_sparse(),
    ]
    task.arrays = [np.float32(0.5), np.arange(3, dtype=">f4"), np.array(["text"]), np.ones((2, 2), complex).T]
    task.odd = SimpleNamespace(shape="round", dtype=None, size=lambda: 2)
    recorded = attributes(nn.Linear(2, 2), task)
    assert recorded["task.arrays.0"] == 0.5
    assert (recorded["task.arrays.1"], recorded["task.arrays.3"]) == ("[3] 3", "[2, 2] 4")
    assert "task.odd.shape" in recorded
    assert not any(key.startswith("task.values") for key in recorded)


OF_ONE_START = {
    "seconds": time.time,
    "nanoseconds": time.time_ns,
    "since the machine started": lambda: time.perf_counter() // 1 - 0.5,
    "a tuple": time.localtime,
    "an object": datetime.now,
    "ISO": lambda: datetime.now().isoformat(),
    "of the day": lambda: time.strftime("%H:%M"),
    "a number in a name": lambda: f"run-{time.time():.0f}",
    "a host": lambda: f"{socket.gethostname()}-3",
    "a UUID": lambda: uuid.uuid4().hex,
    "a path": lambda: Path("runs") / "a",
    "a temporary name": lambda: "tmpab3_x9k1",
    "a handle of a hook": lambda: nn.Linear(1, 1).register_forward_hook(print),
    "a process": lambda: os.getpid() if os.getpid() >= 1000 else time.time(),
}


@pytest.mark.parametrize("kind", OF_ONE_START)
def test_what_belongs_to_one_start_is_no_argument(kind):
    task = Line()
    task.begun = OF_ONE_START[kind]()
    assert [key for key in attributes(nn.Linear(2, 2), task) if key.startswith("task.begun")] == []


@pytest.mark.parametrize("value", [0.5, 64, math.inf, "relu", "resnet50", "1e-3", "deadbeef", True])
def test_an_argument_is_recorded(value):
    task = Line()
    task.value = value
    assert "task.value" in attributes(nn.Linear(2, 2), task)


def test_large_values_of_a_model_are_summed_in_pieces(monkeypatch):
    model = nn.Linear(2, 2)
    model.table = torch.arange(9.0)
    before = described(model)
    monkeypatch.setattr(build, "_PIECE", 4)
    assert described(model) == before
    model.table[8] = 100.0
    assert described(model) != before
