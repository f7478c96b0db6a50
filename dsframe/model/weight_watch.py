"""Detects how a model, a loss or a hook uses weights outside the engine's control.

Weights belong to the optimizer. If other code writes to them, replicas diverge (each rank writes values of its own
rows), or the change is lost if the optimizer has masters or shards. Code that reads a shard computes with a part of a
weight. So the first steps are watched, and then every step whose number is a power of two, to report before the next
update:

- reads or writes while this rank holds only a shard, by the torch functions that are called (``TorchFunctionMode``);
- writes in the forward pass, in the loss, or between two steps, by sums over each weight;
- parameters that are created, frozen or unfrozen after the start, in every step;
- parameters in the loss that are not the model's.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dsframe.cluster.exchange import all_gather_text
from dsframe.errors import DsframeError, EngineError, TaskError
from dsframe.model import linearity
from dsframe.model.built_memory import BuiltMemory
from dsframe.model.weight_calls import CallWatch

_OTHER_ENGINES = 'choose engine "single" or "horovod", or ZeRO 0 to 2'


class WeightWatch(CallWatch):
    """The watch over one engine's model."""

    def __init__(self, engine: Any, model: nn.Module, memory: BuiltMemory, but: frozenset[str] = frozenset()) -> None:
        """``engine``, ``memory``: as for :class:`CallWatch`. ``but``: weights that dsframe itself writes in forward
        passes."""
        super().__init__(engine, model, memory)
        self._but = but
        self._looks_inside = not engine.plan.config.settings.model.compile  # a compiler would trace the mode
        if self._looks_inside:
            linearity.examine_hooks(model, self._say_not_linear, self)
        self._before: dict[str, Any] = {}
        self._after: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._versions: list[int] = []
        self._counted: list[tuple[str, Tensor]] = []
        """Those that versions are counted of: the weights, and what a library puts in their place."""
        self._unconfirmed: set[str] = set()
        """Weights that this rank has seen written since ranks last compared what each has written."""
        self._watching = False
        self._first = 0
        self.recomputes_inside = False
        """True if the backward pass recomputes blocks in nested backward passes (``use_reentrant``)."""
        self._reported = False
        self.elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext
        """Encloses a loss or metrics. Refuses uses of model parts that other ranks have."""

    # One step.

    def begin(self, step: int) -> None:
        """**Collective.** Called before a step. Raises EngineError, TaskError if weights were written between steps."""
        self.note_parameters()
        self._first = self._first or step
        self._watching = step <= self._first + 1 or step & (step - 1) == 0
        if self._after or (self._watching and step > self._first):
            marks = self._marks()
            names = {name for name, mark in self._after.items() if marks[name] != mark} | self._unconfirmed
            written = {name: marks[name] for name in sorted(names)}
            self._check_writes(written, "between two steps, in a hook for example")
            self._after = {}
            self._unconfirmed.clear()
        self._last = {}
        self._count_versions()
        if self._watching:
            self._refuse_converted("between two steps")
            self._before = self._marks()
            self._direct.clear()
            self._writes.clear()
        if (
            step == self._first
            and not self._whole
            and any(type(module).train is not nn.Module.train for module in self._model.modules())
        ):
            with self.inside():  # train() and eval() may write to weights, as in loralib
                self._model.eval()
                self._model.train()

    def end(self, step: int) -> None:
        """**Collective.** Called after a step, before the next one's update. Raises EngineError, TaskError."""
        self._refuse_changed(f"in step {step}")
        if not self._watching:
            return
        self._refuse_added(f"in step {step}")
        self._check_writes(self._written, "in the forward pass or the loss of each micro-batch")
        self._after = self._marks()

    def before_update(self, *_: Any) -> None:
        """For an engine that runs the model itself: weights changed by now were written in forward passes."""
        if self._watching and not self._last:
            self._last = self._marks()

    @property
    def _written(self) -> dict[str, Any]:
        return {name: mark for name, mark in self._last.items() if mark != self._before[name]}

    @property
    def has_writes(self) -> bool:
        """True if forward passes write to weights, or may, according to the last watched step."""
        return bool(self._but or self._written)

    # Calls.

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Encloses calls of dsframe's own, which :meth:`inside` watches. Restores the weights that they write to."""
        watching, self._watching, self._replaced = self._watching, True, {}
        try:
            yield
        finally:
            for name, content in self._replaced.items():
                self._parameters[name].data.copy_(content)  # a backward pass may need the tensor
            self._watching, self._replaced = watching, None

    @contextmanager
    def inside(self, *, always: bool = False) -> Iterator[None]:
        """Checks the calls of a forward pass, loss, metrics or hooks. ``always``: in every step, for hooks."""
        self.note_parameters()
        if not (self._looks_inside and (self._watching or always)):
            yield
            return
        before, self._writes = self._writes, {}
        with self.explaining() if always else nullcontext(), self, register_module_forward_pre_hook(self._called):
            yield
        if always:
            self._refuse_changed("in a hook")
            self._refuse_added("in a hook")
            self._refuse_converted("in a hook")
            self._note_writes(self._writes, "in a hook")
        self._writes = self._writes | before

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Counts writes in a backward pass: torch may call its hooks in any thread, and some libraries hide writes."""
        self._count_versions()
        before, self._writes = self._writes, {}
        yield
        if self._engine.averages_gradients:  # else the engine itself may update weights there
            self._note_writes({*self._written_since(), *self._writes}, "in the backward pass")
        self._writes |= before

    def _count_versions(self) -> None:
        if self._watching:
            counted = [*self._parameters.items(), *(self._others(self._model).items() if self._others else ())]
            self._counted = [(name, one) for name, one in counted if not one.is_inference()]
        self._versions = [weight._version for _, weight in self._counted]

    def _written_since(self) -> list[str]:
        """Returns the weights that were written since the last count."""
        counts = zip(self._counted, self._versions, strict=True)
        return [name for (name, weight), before in counts if weight._version != before]

    def computed(self, loss: Tensor) -> None:
        """Called after each micro-batch's loss. Raises TaskError if it depends on parameters outside the model."""
        if not self._whole:  # some libraries replace parameters while modules run
            now = [parameter.requires_grad for parameter in self._model.parameters()]
            if len(now) == len(self._trained):
                self._refuse_frozen(now, "in this step")
        if not self._first:
            return
        if not self._watching:
            self._note_writes(self._written_since(), "in the forward pass or the loss")
            return
        if not self._examined:
            self._examined = True
            self._refuse_added(f"in step {self._first}")
            self._refuse_others(loss)
            self._refuse_recomputed_twice()
        self._last = self._marks()

    def _note_writes(self, names: Iterable[str], when: str) -> None:
        """Records this rank's writes. Refuses them if the optimizer overwrites them; else ranks compare them later."""
        written = {name: None for name in names if name not in self._but}
        if written and not self._whole:
            raise EngineError(f"{self._where(written, when)}: {self._shards()}")
        if not self._engine.updates_in_place:
            self._refuse_overwritten(written, when)
        self._unconfirmed.update(written)

    def _refuse_converted(self, when: str) -> None:
        for (name, parameter), dtype in zip(self._parameters.items(), self._dtypes, strict=True):
            if parameter.dtype != dtype:
                raise TaskError(
                    f"{name} was converted from {dtype} to {parameter.dtype} {when}, which optimizer and checkpoints do not "
                    'follow; write "bf16", "fp16" or "torch_autocast" in the file'
                )

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Encloses a step or an evaluation. Raises the result of :meth:`explained` instead of an error."""
        try:
            yield
        except Exception as error:
            if explained := self.explained(error):
                raise explained from error
            raise

    def explained(self, error: Exception) -> DsframeError | None:
        """Returns a clearer error if ``error`` occurred after parameters were created, or after a direct use of weights
        that a library has freed; else None."""
        try:
            if self._parameters:
                self._refuse_added("in this step")
        except TaskError as added:
            return added
        if isinstance(error, EngineError):
            return None  # the engine has given the reason
        message = str(error) or traceback.extract_tb(error.__traceback__)[-1].name
        if remedy := next((known for text, known in self._engine.explains.items() if text in message), ""):
            return EngineError(f"{remedy.format(self._engine.description)}; {_OTHER_ENGINES}")
        known = isinstance(error, (RuntimeError, AssertionError, AttributeError))
        if self._whole or self._never_whole or not self._direct or not known:
            return None
        name, line = next(iter(self._direct.items()))
        return EngineError(
            f"{line} uses {name} itself, not by a call of its module, and the backward pass failed: {self._shards()}"
        )

    # Findings.

    def _marks(self) -> dict[str, Any]:
        """Returns values that change with a weight: sums and norm of a complete one, else its version."""
        watched = {name: parameter for name, parameter in self._parameters.items() if name not in self._but}
        if self._gives_up:
            return {name: parameter._version for name, parameter in watched.items()}
        return _sums(watched)

    def _check_writes(self, written: Mapping[str, Any], when: str) -> None:
        """**Collective** if this rank has complete weights. Raises EngineError, TaskError."""
        engine, where = self._engine, self._where(written, when)
        if not self._whole:
            if written:
                raise EngineError(f"{where}: {self._shards()}")
            return
        mine = json.dumps([self._held, written], sort_keys=True)
        of_ranks = all_gather_text(engine, mine) if engine.plan.world.size > 1 else [mine]
        kinds = set(of_ranks)
        if not any(theirs for _, theirs in map(json.loads, kinds)):
            return
        if not engine.updates_in_place:
            self._refuse_overwritten(written, when)
        if len(kinds) > len({held for held, _ in map(json.loads, kinds)}):
            raise TaskError(
                f"{where}: not the same numbers on all ranks, whose models would drift apart. "
                "Write numbers that do not depend on a rank's samples, in the task's after_step(name, weight) for example"
            )
        if not self._reported:
            self._reported = True
            self.notes.append(f"{where}: the same on all ranks, and kept")

    def _where(self, written: Mapping[str, Any], when: str) -> str:
        line = next((self._writes[name] for name in written if name in self._writes), "")
        names = ", ".join(sorted(written)) or "weights"
        where = f"{names} {'was' if len(written) == 1 else 'were'} written {when}"
        return where + (f" ({line})" if line else "")

    def _refuse_overwritten(self, written: Mapping[str, Any], when: str) -> None:
        if any(self._parameters[name].requires_grad for name in written):
            raise EngineError(
                f"{self._where(written, when)}: the optimizer keeps these weights a second time and overwrites what was written. "
                "Write to them in the task's after_step(name, weight), or choose an engine that updates the model's own "
                "weights, in fp32"
            )

    def _refuse_changed(self, when: str) -> None:
        self._refuse_frozen([parameter.requires_grad for parameter in self._parameters.values()], when)

    def _refuse_frozen(self, trained: Sequence[bool], when: str) -> None:
        if names := [
            name for name, was, now in zip(self._parameters, self._trained, trained, strict=True) if was != now
        ]:
            self._refuse_changes(names, f"frozen or unfrozen {when}")

    def _refuse_added(self, when: str) -> None:
        now = dict(self._model.named_parameters())
        if added := [name for name in now if name not in self._parameters]:
            self._refuse_changes(sorted(added), f"made {when}")
        others = {*map(id, self._others(self._model).values())} if self._others else set()
        if replaced := [name for name, one in now.items() if self._is_another(name, one) and id(one) not in others]:
            self._refuse_changes(replaced, f"replaced {when}")
        if gone := [name for name in self._parameters if name not in now]:
            self._refuse_changes(gone, f"removed {when}")

    def _is_another(self, name: str, parameter: Tensor) -> bool:
        """Returns True if a parameter was replaced."""
        is_copy = self.whole_steps and not isinstance(parameter, nn.Parameter)  # for this step
        return not is_copy and self._parameters.get(name, parameter) is not parameter

    def _refuse_changes(self, names: Sequence[str], what: str) -> None:
        raise TaskError(
            f"{type(self._engine.plan.task).__name__}: {', '.join(names)} {what}; optimizer, shards and checkpoints were made for "
            "the model as it was at the start. Make all parameters in model(), and freeze them there; to train others later, go "
            "on from the checkpoint with a task that says so"
        )

    def _refuse_others(self, loss: Tensor) -> None:
        known = {id(parameter) for parameter in (*self._parameters.values(), *self._model.parameters())}
        known |= {id(parameter) for _, ref in self._built.values() if (parameter := ref()) is not None}
        nodes = _nodes(loss)
        self.recomputes_inside = any(node.name() == "CheckpointFunctionBackward" for node in nodes)
        linearity.examine_functions(nodes, self._say_not_linear, self)
        leaves = [node.variable for node in nodes if isinstance(getattr(node, "variable", None), nn.Parameter)]
        strangers = [parameter for parameter in leaves if id(parameter) not in known]
        if self._others:  # whose memory of parameters outside the model was freed
            strangers = [parameter for parameter in strangers if parameter.untyped_storage().size()]
        if strangers:
            shapes = ", ".join(str(list(parameter.shape)) for parameter in strangers[:3])
            raise TaskError(
                f"{type(self._engine.plan.task).__name__}: the loss depends on {len(strangers)} trainable parameter(s) "
                f"that are not the model's (shape {shapes}): nothing would train or save them. Let model() return a "
                "module that holds them too, or freeze them with requires_grad_(False)"
            )

    def _refuse_recomputed_twice(self) -> None:
        ours = set(self._model.modules())  # a library's wrapper stays in training mode in an evaluation
        called = self._without_gradients.items()
        twice = [type(module).__name__.removeprefix("FSDP") for module, calls in called if calls > 1 and module in ours]
        if self.recomputes_inside and twice and not self._engine.reduces_repeatedly:
            raise EngineError(
                f"{twice[0]} is called more than once in a step by torch.utils.checkpoint with "
                f"use_reentrant=True, and {self._engine.description} would count a part of its gradients; write "
                "use_reentrant=False: the same numbers"
            )


@torch.no_grad()
def _sums(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    sums = []
    for parameter in parameters.values():
        flat = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        if not flat.is_floating_point():
            flat = flat.double()
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        every_third = flat.reshape(-1)[::3]  # else numbers could trade places
        sums.append([flat.sum(dtype=wide), torch.linalg.vector_norm(flat, dtype=wide), every_third.sum(dtype=wide)])
    if not sums:
        return {}
    rows = torch.stack([torch.stack(row).double() for row in sums]).tolist()  # one copy from the device
    return {name: [each.hex() for each in row] for name, row in zip(parameters, rows, strict=True)}


def _nodes(loss: Tensor) -> list[Any]:
    """Returns the autograd nodes in the backward pass of ``loss``."""
    seen, ahead = dict[Any, None](), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen[node] = None
            ahead += [following for following, _ in node.next_functions]
    return list(seen)
