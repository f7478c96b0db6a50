"""Gives hooks the model in training as a plain module."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from dsframe.cluster.exchange import failures
from dsframe.engine import Engine
from dsframe.errors import TaskError
from dsframe.host import generators
from dsframe.model import ema, extra_state
from dsframe.model.persistent import put
from dsframe.text import reason


def copy_of(engine: Engine, averages: bool, all_ranks: bool = False) -> nn.Module | None:
    """**Collective.** Returns a copy of the model on the CPU, with the weights or their ``averages``, on rank 0 or on
    ``all_ranks``; None on others. Raises TaskError on every rank if there are no averages, or if the task does not
    create a second model."""
    plan = engine.plan
    if averages and plan.config.settings.ema is None:
        raise TaskError('model(averages=True): the file keeps no average of the weights; write "ema"')
    model, failure = None, ""
    if plan.world.is_main or all_ranks:
        try:
            with generators.kept(plan.device):
                model = _new_model(engine)
        except Exception as error:
            failure = reason(error, 400)
    if wrong := failures(engine, failure):
        raise TaskError(f"{type(plan.task).__name__}.model: {wrong[0]}")
    state = engine.state()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())} if model else {}
    weights = (
        (each.name, each.moments.get(ema.KEY, each.weight) if averages else each.weight) for each in state.parameters
    )
    for name, content in itertools.chain(weights, state.buffers.items()):
        if name in tensors:
            put(content, tensors[name])
    if model is not None:
        extra_state.load(model.eval(), state.buffers)
    return model


def _new_model(engine: Engine) -> nn.Module:
    """Returns a new model of the task, with the file's adapter."""
    plan = engine.plan
    generators.seed(plan.seed)
    with torch.device("cpu"):
        model = plan.task.model()
        if engine.built.adapter is not None:
            engine.built.adapter.put_into(model)
    if engine.built.watch and engine.built.watch.model is model:
        raise TaskError("model() gives the module that is trained; make a new one in each call")
    return model
