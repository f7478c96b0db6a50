"""What a step costs beside the model: no Python that grows with the number of parameters, and nothing that waits for the device."""

import gc
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dsframe
from benchmarks.overhead import ManyTask
from dsframe import engines, run
from dsframe.cluster.world import World
from dsframe.config import Facts, load
from dsframe.guard.signals import StopRequest
from dsframe.model import optimizers, schedules
from dsframe.model.micro_batch import MicroBatch
from dsframe.model.plan import Plan
from dsframe.trainer import Trainer
from dsframe.training.checkpoints import Checkpoints
from dsframe.training.step_log import StepLog
from tests.files import ds_config


def make(engine, task, clipping, **settings):
    document = ds_config(4, "AdamW", 1e-3, {"gradient_clipping": clipping}, **settings)
    config = load(document).resolve(Facts(1, 100, None, replicas=True))
    batch, optimizer = config.batch(1, replicas=True), optimizers.read(config)
    plan = Plan(config, World(), task, optimizer, schedules.constant(1e-3), batch, torch.device("cpu"))
    return engines.load(engine, config)(plan)


def one_step(engine):
    result = engine.train_step(MicroBatch.of([(torch.ones(4, 3), torch.ones(4))]))
    assert not result.loss.requires_grad, "it would keep the step's graph"


def test_a_model_that_comes_again_brings_no_gradients(monkeypatch):
    """Half-reduced ones of a step in which a process was lost would be added to the next step's."""
    task = ManyTask()
    model = task.model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    monkeypatch.setattr(task, "model", lambda: model)
    engine = make("single", task, 0.0)
    assert engine.model is model
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_begins_in_training_mode_and_what_it_depends_on_is_announced(monkeypatch):
    """A model that was loaded comes in evaluation mode, in which dropout would stay off until the first evaluation's end."""
    task = ManyTask()
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout()).eval()
    monkeypatch.setattr(task, "model", lambda: model)
    engine = make("single", task, 0.0)
    assert all(module.training for module in engine.model.modules())
    assert [what.text.partition(" ")[0] for what in engine.built.depends] == ["BatchNorm", "dropout"]


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_the_calls_of_a_step_do_not_grow_with_the_parameters(engine, monkeypatch):
    """Every call of a function, Python's and C's, in the third step, but those of torch's own optimizer, which looks up each
    parameter's state: measured, 0.1 to 0.5 % of a step of ResNet-18 and of a GPT."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # what a process group sets is taken back afterwards
        monkeypatch.delenv(name)
    found = {}
    for count in (10, 1000):
        task = ManyTask()
        task.count = count
        made, calls = make(engine, task, 1.0), Counter()
        try:
            one_step(made)
            one_step(made)
            monkeypatch.setattr(made.optimizer, "step", lambda: None)
            calls = called(lambda made=made: one_step(made))
        finally:
            made.close()
        found[count] = calls
    assert found[10].total() > 50
    assert found[1000] == found[10]


def called(work):
    calls = Counter()

    def look(frame, event, argument):
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            calls[argument.__name__] += 1

    gc.disable()  # others hang callbacks on it, hypothesis one that counts as calls, and when it runs is chance
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


class Words(dsframe.Task):
    """Embeddings whose gradients would be sparse."""

    def model(self):
        return nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Flatten(), nn.Linear(9, 1))

    def loss(self, outputs, targets):
        return (outputs * targets).mean()

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.ones(64, 3, dtype=torch.int64), torch.ones(64, 1))


def test_sparse_embeddings_train_with_dense_gradients():
    with pytest.warns(UserWarning, match="dense gradients"):
        made = make("single", Words(), 1.0)
    before = [one.weight.clone() for one in made.state().parameters]
    made.train_step(MicroBatch.of([(torch.ones(4, 3, dtype=torch.int64), torch.ones(4, 1))]))
    after = [one.weight for one in made.state().parameters]
    assert [bool((one != other).any()) for one, other in zip(before[0], after[0], strict=True)] == [
        row == 1 for row in range(7)
    ]


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a number from the device."""

    def __init__(self):
        super().__init__()
        self.steps = self.reads = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.reads += "_local_scalar_dense" in str(function)
        self.steps += "_fused_adamw" in str(function)
        return function(*arguments, **(keywords or {}))


def test_nothing_is_read_off_the_device_but_on_steps_that_log(here, monkeypatch):
    """The whole loop, without what is written down: logs, checkpoints and, about every two seconds, the ranks' agreement."""
    monkeypatch.setattr(StepLog, "on_step", lambda *_: None)
    monkeypatch.setattr(Checkpoints, "save", lambda *_: None)
    monkeypatch.setattr(StopRequest, "agreed", lambda *_: False)
    settings = {"engine": "single", "steps": 12, "run_dir": "run", "hang_timeout_seconds": 0}
    document = ds_config(4, "AdamW", 1e-3, {"gradient_clipping": 0.0}, **settings)
    with Reads() as found:
        float(torch.ones(()))
    assert found.reads == 1
    loop = Trainer.fit

    def watched(trainer, start):
        with found:
            return loop(trainer, start)

    monkeypatch.setattr(Trainer, "fit", watched)
    monkeypatch.setattr("dsframe.trainer.all_gather_json", lambda *_: (0,))
    run.execute(load(document), task=ManyTask(), world=World(), quiet=True)
    # Nine more in the first step: the loss of the micro-batch, twice and once again, and those of its halves, three times. After it
    # eight: the losses of four samples, twice, and of their halves. In steps 2 and 5 seven: those of a micro-batch and its halves.
    # In the first step seven more: those of samples and halves in training mode.
    assert (found.steps, found.reads) == (12, 39)
