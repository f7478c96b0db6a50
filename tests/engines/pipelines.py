"""What test_pipeline.py runs on both ranks: pipelines of two stages that have to train alike, and what they hold.

torchrun --nproc-per-node=2 -m tests.engines.pipelines REPORT.json
"""

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from dsframe import Task
from dsframe.cluster.exchange import all_gather_text
from dsframe.config.schema.settings import LanguageTask as LanguageSettings
from dsframe.engines.deepspeed.imports import deepspeed
from dsframe.errors import TaskError
from dsframe.model.micro_batch import MicroBatch
from dsframe.tasks.language import LanguageTask
from dsframe.tasks.layers import Tied
from dsframe.train import leave_at_once
from tests.contract import Blobs, make, micro_batches
from tests.engines.several import one_process_group, prepare
from tests.engines.snapshot import Snapshot
from tests.files import ds_config, write_json

GPT = {"name": "language", "layers": 2, "heads": 2, "width": 16, "context": 8, "corpus": "synthetic", "samples": 64}
FILE = ds_config(8, "AdamW", 0.01, sections={"gradient_accumulation_steps": 4, "gradient_clipping": 0.05})
SAME = {
    "parameters": ({}, {}),
    "uniform": ({"partition": "uniform"}, {}),
    "by type": ({"partition": "type:^block$"}, {}),
    "every layer recomputed": ({"activation_checkpoint_interval": 1}, {}),
    "every second layer recomputed": ({"activation_checkpoint_interval": 2}, {}),
    "blocks recomputed": ({}, {"model": {"activation_checkpointing": True}}),
}
"""Keys of "pipeline" and of "dsframe" that change where and when, and not what is computed."""
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
BUILT = []
"""Layers that this process has built with memory."""


class Recorded(LanguageTask):
    """The GPT, whose layers say that they are built."""

    def __init__(self):
        super().__init__(LanguageSettings.model_validate(GPT), seed=0)

    def layers(self):
        layers = super().layers()
        return [layer if isinstance(layer, Tied) else partial(_record, i, layer) for i, layer in enumerate(layers)]


class Normed(Blobs):
    """Running statistics and dropout in both stages."""

    model = Task.model

    def layers(self):
        wide = partial(nn.Sequential, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        return [partial(nn.Linear, 2, 8), wide, partial(nn.BatchNorm1d, 8), partial(nn.Linear, 8, 3)]


def _record(index, layer):
    made = layer()
    if not next(made.parameters()).is_meta:
        BUILT.append(index)
    return made


def losses(pipeline, more):
    """Three steps."""
    return course(FILE | {"pipeline": {"stages": 2, **pipeline}, "dsframe": {"task": GPT, **more}}, "deepspeed")


def course(file, name):
    """The global batch's loss over three steps."""
    start, loader = prepare(file, name)
    engine = start()
    found = []
    for step in range(3):
        loss = engine.train_step(MicroBatch.of(loader.micro_batches(step))).loss
        found.append(float(engine.sum_over_ranks(loss.double().reshape(1))) / engine.plan.world.size)
    if name == "deepspeed":
        engine._engine.destroy()
    return found


def clipped():
    """SGD under a tight clip, which no moment hides, beside an engine of full replicas."""
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    file = FILE | {"optimizer": sgd, "pipeline": {"stages": 2}, "dsframe": {"task": GPT}}
    return {"pipeline": course(file, "deepspeed"), "replicas": course(file, "ddp")}


FROZEN = {"match": ["3.*"], "freeze": True}


def grouped():
    """ZeRO-1 under a tight clip, where the last stage alone has a group of its own: as many norms are not there in the first."""
    settings = {"task": GPT, "parameter_groups": [{"match": ["4.*"], "lr_scale": 3.0}, FROZEN]}
    file = FILE | {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_allow_untested_optimizer": True}
    staged = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}
    return {
        "pipeline": course(file | staged | {"dsframe": settings}, "deepspeed"),
        "replicas": course(file | {"dsframe": settings}, "ddp"),
    }


def scaled():
    """fp16, whose loss scale grows at the second step, without a clip that would hide by what gradients are divided."""
    fp16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1}
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    file = FILE | {"fp16": fp16, "optimizer": sgd, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    cases = {
        "replicas": ({}, "ddp"),
        "zero3": ({"zero_optimization": {"stage": 3}}, "deepspeed"),
        "pipeline": ({"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}, "deepspeed"),
    }
    # DeepSpeed allows fp16 where it is fast; for a small model it need not be.
    with mock.patch.object(deepspeed.get_accelerator(), "is_fp16_supported", return_value=True):
        return {
            name: course(file | more | {"dsframe": {"task": GPT}}, engine) for name, (more, engine) in cases.items()
        }


def built():
    """Which layers each rank builds, and the bounds of its stages."""
    task = {"name": "tests.engines.pipelines:Recorded"}
    start, _ = prepare(FILE | {"pipeline": {"stages": 2}, "dsframe": {"task": task}}, "deepspeed")
    recorder = importlib.import_module("tests.engines.pipelines")  # this file, under the name that the task is found by
    engine = start()
    told = [json.loads(text) for text in all_gather_text(engine, json.dumps(recorder.BUILT))]
    aliases = dict(engine.state().aliases)
    engine._engine.destroy()
    return {"layers": told, "bounds": engine._engine.module.parts, "aliases": aliases}


def recomputed():
    """A loss and all buffers after one step under autocast, without and with layers that are computed a second time."""
    report = {}
    for interval in (0, 1):
        engine = _normed(AUTOCAST, activation_checkpoint_interval=interval)
        loss = float(engine.train_step(MicroBatch.of(micro_batches(engine, 0))).loss)
        buffers = engine.state().buffers.items()
        report[str(interval)] = [loss, {name: buffer.tolist() for name, buffer in buffers}]
        engine._engine.destroy()
    return report


def _normed(more, **pipeline):
    """The engine of :class:`Normed`."""
    section = {"stages": 2, "partition": "uniform", **pipeline}
    task = {"name": "tests.engines.pipelines:Normed"}
    return prepare(FILE | more | {"pipeline": section, "dsframe": {"task": task}}, "deepspeed")[0]()


def not_finite():
    """One stage alone sees a gradient that is not finite, and both leave the update out."""
    file = {**FILE, "train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
    engine = make(file | {"pipeline": {"stages": 2}, "dsframe": {"on_nonfinite": "skip"}}, "deepspeed")
    before = Snapshot(engine.state())
    if engine.plan.world.rank == 1:  # a hook of one stage: what it sends back is sound
        next(engine._engine.module.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    result = engine.train_step(MicroBatch.of(micro_batches(engine, 0)))
    after = Snapshot(engine.state())
    same = all(torch.equal(before.parameter(n).weight, after.parameter(n).weight) for n in before.shapes)
    said = [json.loads(text) for text in all_gather_text(engine, json.dumps([result.skipped, same]))]
    inputs, targets = next(micro_batches(engine, 0))
    refused = ""
    try:
        engine.train_step(MicroBatch.of([({"points": inputs}, targets)] * 2))
    except TaskError as error:
        refused = str(error)
    engine._engine.destroy()
    return {"said": said, "refused": all_gather_text(engine, refused)}


class Shrinking(nn.Module):
    """A layer that passes on fewer rows each time."""

    left = 4

    def forward(self, rows):
        self.left -= 1
        return rows[: self.left]


class Unsteady(Blobs):
    """Whose activations have sizes that do not follow from the inputs'."""

    model = Task.model

    def layers(self):
        return [partial(nn.Linear, 2, 8), Shrinking, partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 3)]


def sizes():
    """Steps of one size and of several: losses as stages announce what they have to, and as they announce every activation; how
    often they do, by step; and what is said of a stage that has not told the next one the size that it sends."""
    lengths = ([8] * 4, [8] * 4, [8, 5, 8, 3], [5] * 4, [8] * 4)
    report = {}
    for always in (False, True):
        engine = prepare(FILE | {"pipeline": {"stages": 2}, "dsframe": {"task": GPT}}, "deepspeed")[0]()
        inner, draw = engine._engine, torch.Generator().manual_seed(0)
        if always:
            engine._settle_sizes = lambda sizes, inner=inner: setattr(inner, "dynamic_shape", True)
        heard = mock.patch.object(inner, "_recv_tensor_meta", side_effect=inner._recv_tensor_meta)
        found = [[], []]
        for step in lengths:
            rows = [torch.randint(256, (2, length + 1), generator=draw) for length in step]
            with heard as announced:
                result = engine.train_step(MicroBatch.of([(one[:, :-1].contiguous(), one[:, 1:]) for one in rows]))
            found[0].append(float(result.loss))
            found[1].append(announced.call_count)
            tokens = torch.randint(256, (1, 7), generator=draw)
            if len(found[0]) == 4:
                engine.eval_step((tokens[:, :-1].contiguous(), tokens[:, 1:]), engine.plan.task.metrics)
        key = "always" if always else "needed"
        report[key] = found[0]
        report[f"announced {key}"] = json.loads(all_gather_text(engine, json.dumps(found[1]))[1])
        inner.destroy()
    file = FILE | {"pipeline": {"stages": 2, "partition": "uniform"}}
    engine = prepare(file | {"dsframe": {"task": {"name": "tests.engines.pipelines:Unsteady"}}}, "deepspeed")[0]()
    if engine.plan.world.rank == 0:  # a stage by itself: nobody waits for what it does not send
        engine._stage_module(torch.ones(4, 2))
        try:
            engine._stage_module(torch.ones(4, 2))
        except TaskError as error:
            report["refused"] = str(error)
    engine._engine.destroy()
    return report


class Split(nn.Module):
    """A first layer whose output is more than one tensor, of which one has no gradient and one is not used."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 8)

    def forward(self, rows):
        hidden = self.linear(rows)
        return hidden.view(-1, 2, 4).transpose(1, 2), (rows[:, :1] > 0).float(), rows[:, 1:] > 0, hidden * 2


class Join(nn.Module):
    """The next one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, parts):
        hidden, factor, chosen, _ = parts
        return self.linear(hidden.flatten(1) * factor).where(chosen, 0)


class Passing(Blobs):
    """Several tensors between two stages."""

    model = Task.model

    def layers(self):
        return [Split, Join]


def passed():
    """As full replicas train, and as stages do."""
    file = FILE | {"dsframe": {"task": {"name": "tests.engines.pipelines:Passing"}}}
    found = {"replicas": course(file, "ddp")}
    for interval in (0, 1):
        pipeline = {"stages": 2, "activation_checkpoint_interval": interval}
        found[str(interval)] = course(file | {"pipeline": pipeline}, "deepspeed")
    return found


def normed():
    """BatchNorm in both stages, in float32 and in bf16, which CPUs do not compute with weights of bf16."""
    task = {"dsframe": {"task": {"name": "tests.engines.pipelines:Normed"}}, "pipeline": {"stages": 2}}
    return {
        name: course(FILE | task | more, "deepspeed")
        for name, more in {"float32": {}, "bf16": {"bf16": {"enabled": True}}}.items()
    }


def main(path):
    """Writes the report."""
    torch.set_num_threads(1)
    with one_process_group():
        # First: after a pipeline DeepSpeed's global groups no longer suit a stage 3.
        report = {"scaled": scaled()}
        report["losses"] = {name: losses(*case) for name, case in SAME.items()}
        report["clipped"] = clipped()
        report["grouped"] = grouped()
        report["built"] = built()
        report["recomputed"] = recomputed()
        report["not finite"] = not_finite()
        report["sizes"] = sizes()
        report["passed"] = passed()
        report["normed"] = normed()
        speaks = torch.distributed.get_rank() == 0
        if speaks:
            write_json(Path(path), report)
    leave_at_once(0)


if __name__ == "__main__":
    main(sys.argv[1])
