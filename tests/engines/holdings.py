"""What a process holds: every tensor that the garbage collector knows, by what it is for. Names no engine."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dsframe.data import Loader
from dsframe.engine import Engine
from dsframe.model.forward import MicroBatch
from dsframe.observe.communication import Communication


class Observer:
    """Tells what was made after it: load the data before, build the engine afterwards."""

    def __init__(self) -> None:
        gc.collect()
        self._before = list(_tensors())  # held, so that none of their addresses is used again
        self._old = {address for address, _ in _blocks(self._before)}
        self._updated: set[int] = set()

    def measure(self, engine: Engine, loader: Loader) -> dict[str, float]:
        """**Collective.** Two steps to settle, one that is looked at, one whose communication is counted. Bytes, but ``model``."""
        settling = register_optimizer_step_pre_hook(lambda optimizer, *_: self._note(optimizer))
        for step in range(2):
            engine.train_step(MicroBatch.of(loader.micro_batches(step)))
        settling.remove()
        samples: list[dict[str, int]] = []
        at_update: list[int] = []
        backward = torch.autograd.backward

        def looked_at(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            samples.append(self.held())

        hook = register_optimizer_step_pre_hook(lambda *_: at_update.append(sum(self.held().values())))
        with mock.patch.object(torch.autograd, "backward", looked_at):
            engine.train_step(MicroBatch.of(loader.micro_batches(2)))
        hook.remove()
        with Communication() as counted:
            engine.train_step(MicroBatch.of(loader.micro_batches(3)))
        model = sum(parameter.weight.numel() for parameter in engine.state().parameters)
        return {
            **samples[-1],
            "at_update": max(at_update, default=0),  # none where another rank updates
            "sent": counted.bytes_sent,
            "received": counted.bytes_received,
            "model": model,
        }

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """Remembers what is updated: ZeRO-3 shows its copies to the optimizer only while it updates."""
        self._updated |= {address for group in optimizer.param_groups for address, _ in _blocks(group["params"])}

    def held(self) -> dict[str, int]:
        """Bytes of parameters, optimizer state and everything else (gradients, buckets) that is alive now."""
        living = list(_tensors())
        modules = [thing for thing in gc.get_objects() if _is(thing, nn.Module)]
        optimizers = [thing for thing in gc.get_objects() if _is(thing, torch.optim.Optimizer)]
        parameters = [
            tensor
            for module in modules
            for parameter in module._parameters.values()
            if parameter is not None
            for tensor in (parameter, getattr(parameter, "ds_tensor", None))  # where ZeRO-3 keeps a rank's piece
            if isinstance(tensor, Tensor)
        ]
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        state = [
            tensor
            for optimizer in optimizers
            for tensor in (
                *(one for held in optimizer.state.values() for one in held.values() if isinstance(one, Tensor)),
                *(one for group in optimizer.param_groups for one in group["params"]),
            )
        ]
        state += [tensor for tensor in living if any(address in self._updated for address, _ in _blocks([tensor]))]
        counted = set(self._old) | {address for address, _ in _blocks(buffers)}
        found = {}
        for kind, tensors in (("parameters", parameters), ("optimizer", state), ("gradients", living)):
            blocks = {address: size for address, size in _blocks(tensors) if address not in counted}
            counted |= blocks.keys()
            found[kind] = sum(blocks.values())
        return found


def _is(thing: Any, cls: type) -> bool:
    return issubclass(type(thing), cls)  # isinstance would wake lazy proxies


def _tensors() -> Iterator[Tensor]:
    """Every tensor alive, and every gradient, which Python may not have seen yet."""
    for thing in gc.get_objects():
        if _is(thing, Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def _blocks(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Address and size of the memory under ``tensors``; of a DTensor, this rank's piece."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            try:
                block = local.untyped_storage()
                address, size = block.data_ptr(), block.nbytes()
            except (RuntimeError, NotImplementedError):  # a meta or functional tensor has none
                continue
            if size and address:
                yield address, size
