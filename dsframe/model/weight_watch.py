"""Sees what a model, a loss or a hook does with weights outside of what the engine knows, and says so before a second update.

Weights belong to the optimizer. Who writes to them elsewhere trains another model where ranks hold copies (each writes what its own
rows ask for), and nothing where the optimizer has masters or shards of its own. Who reads a shard computes with a part of a weight.
So the first steps are watched, and then every step whose number is a power of two:

- what is read or written while this rank holds only a shard, by the functions of torch that are called (``TorchFunctionMode``);
- what was written in the forward pass, in the loss, or between two steps, by sums over each weight;
- parameters that are made, frozen or unfrozen after the start, in every step;
- parameters that take part in the loss and are not the model's.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from xxhash import xxh3_64_hexdigest

from dsframe.cluster.exchange import all_gather_text
from dsframe.errors import DsframeError, EngineError, TaskError
from dsframe.host import source_files
from dsframe.model import linearity
from dsframe.model.built_memory import BuiltMemory, storage_of
from dsframe.model.gathered import is_whole, library_of
from dsframe.values import tensors_of

_METADATA = frozenset(
    "shape dtype device layout ndim requires_grad is_leaf grad_fn grad size dim numel nelement element_size is_floating_point "  # noqa: SIM905
    "is_complex is_contiguous stride names _version is_cuda is_sparse is_meta is_quantized itemsize nbytes register_hook "
    "__hash__ __repr__ __format__ __len__ data_ptr untyped_storage storage_offset _backward_hooks requires_grad_ "
    "register_post_accumulate_grad_hook".split()
)
"""What tells nothing of a tensor's numbers."""
_TORCH = str(Path(torch.__file__).parent)
_SITE = str(Path(_TORCH).parent)
_MOVERS = tuple(f"{_SITE}{folder}" for folder in ("/torch/distributed/", "/deepspeed/", "/horovod/"))
"""Libraries that move weights. Other installed packages count as the model's code, transformers for example."""
_LINEAR = f"{_SITE}/deepspeed/runtime/zero/linear.py"
"""What DeepSpeed puts in the place of ``torch.nn.functional.linear`` at ZeRO-3."""
_MODULES = str(Path(_TORCH, "nn", "modules"))
_STDLIB = sysconfig.get_path("stdlib")
_OTHER_ENGINES = 'choose engine "single" or "horovod", or ZeRO 0 to 2'
_WHOLE_STEPS = (
    "write whole_weights = True in the task, which gathers all for each step, or choose an engine that keeps whole weights on each "
    "rank (ddp, horovod, or ZeRO 0 to 2)"
)


class WeightWatch(TorchFunctionMode):
    """The watch over one engine's model."""

    def __init__(self, engine: Any, model: nn.Module, memory: BuiltMemory, but: frozenset[str] = frozenset()) -> None:
        """``engine``: a ``dsframe.engine.Engine``, held weakly. ``memory``: of the weights, as ``model()`` has returned them.
        ``but``: weights that dsframe itself writes in forward passes."""
        super().__init__()
        self._memory = memory
        self._engine, self._model, self._but = weakref.proxy(engine), model, but
        self._looks_inside = not engine.plan.config.settings.model.compile  # a compiler would see the mode
        if self._looks_inside:
            linearity.examine_hooks(model, self._say_not_linear)
        # Objects that the model's code may hold, and that a library replaces; weakly, for they are a whole model.
        self._built = {id(parameter): (name, weakref.ref(parameter)) for name, parameter in model.named_parameters()}
        self._parameters: dict[str, nn.Parameter] = {}
        self._held = ""
        """A digest of their names: ranks of another stage of a pipeline have others."""
        self._trained: list[bool] = []
        self._dtypes: list[torch.dtype] = []
        self._whole, self._never_whole, self._gives_up = True, "", False
        self.whole_steps = False
        """True if the engine gathers what it shards for whole steps: copies of the weights, which anybody may read."""
        self._direct: dict[str, str] = {}
        self._writes: dict[str, str] = {}
        self._replaced: dict[str, Tensor] | None = None
        """In a trial, the contents of the weights that it writes to."""
        self._before: dict[str, Any] = {}
        self._after: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._versions: list[int] = []
        self._examined = False
        """True once the first loss of a step has been looked at."""
        self._unconfirmed: set[str] = set()
        """Weights that this rank has seen written since the ranks last compared what each has written."""
        self._watching = self._aside = False
        self._first = 0
        self._without_gradients: Counter[nn.Module] = Counter()
        self.recomputes_inside = False
        """True if the model has blocks that torch recomputes by a backward pass inside of the backward pass (``use_reentrant``)."""
        self._said = False
        self.elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around a loss or metrics: refuses what other ranks have of the model."""
        self.notes: list[str] = []
        """What the run says once."""

    # One step.

    def begin(self, step: int) -> None:
        """**Collective.** Before a step. Raises EngineError, TaskError where weights were written since the last one."""
        self.note_parameters()
        self._first = self._first or step
        self._watching = step <= self._first + 1 or step & (step - 1) == 0
        if self._after or (self._watching and step > self._first):
            marks = self._marks() if self._unconfirmed else {}
            written = self._changed(self._after) | {name: marks[name] for name in sorted(self._unconfirmed)}
            self._check_writes(written, "between two steps, in a hook for example")
            self._after = {}
            self._unconfirmed.clear()
        self._last = {}
        self._versions = self._counted()
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
            with self.inside():  # some write to weights there, as loralib does
                self._model.eval()
                self._model.train()

    def end(self, step: int) -> None:
        """**Collective.** After a step, and before the next one's update. Raises EngineError, TaskError."""
        self._refuse_changed(f"in step {step}")
        if not self._watching:
            return
        self._refuse_added(f"in step {step}")
        self._check_writes(self._written, "in the forward pass or the loss")
        self._after = self._marks()

    def before_update(self, *_: Any) -> None:
        """For an engine that runs the model itself: what has changed by now was written in forward passes."""
        if self._watching and not self._last:
            self._last = self._marks()

    @property
    def _written(self) -> dict[str, Any]:
        return {name: mark for name, mark in self._last.items() if mark != self._before[name]}

    def note_parameters(self) -> None:
        """The model as the engine has made it."""
        if self._parameters:
            return
        self._parameters = dict(self._model.named_parameters())
        self._held = xxh3_64_hexdigest("\n".join(self._parameters).encode())
        self._trained = [parameter.requires_grad for parameter in self._parameters.values()]
        self._dtypes = [parameter.dtype for parameter in self._parameters.values()]
        self._memory.keep_left(self._model)
        libraries = [library_of(parameter) for parameter in self._parameters.values()]
        self._whole = not any(libraries)
        self._puts_others = any(library is not None and library.puts_others for library in libraries)
        self._never_whole = next((library.never_whole for library in libraries if library and library.never_whole), "")
        self._gives_up = any(library is not None and not library.never_whole for library in libraries)

    @property
    def model(self) -> nn.Module:
        """The model that is watched."""
        return self._model

    @property
    def has_writes(self) -> bool:
        """True if forward passes write to weights, or may, as far as the last watched step has shown."""
        return bool(self._but or self._written)

    # What is called.

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Around an evaluation before the first step. Puts back what it writes to weights."""
        self._watching, self._replaced = True, {}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, content in self._replaced.items():
                    self._parameters[name].copy_(content)
            self._watching, self._replaced = False, None

    @contextmanager
    def inside(self, *, always: bool = False) -> Iterator[None]:
        """Around a forward pass, a loss, metrics or hooks: looks at what they call. ``always``: around hooks, in every step."""
        self.note_parameters()
        if not (self._looks_inside and (self._watching or always)):
            yield
            return
        before, self._writes = self._writes, {}
        with self, register_module_forward_pre_hook(self._called):
            yield
        if always:
            self._refuse_changed("in a hook")
            self._refuse_added("in a hook")
            self._refuse_converted("in a hook")
            self._note_writes(self._writes, "in a hook")
        self._writes = self._writes | before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside of :meth:`inside`, around what dsframe makes the model do: not looked at, unless weights are shards."""
        self._aside = self._whole
        try:
            yield
        finally:
            self._aside = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass, whose hooks torch calls where it likes: counts writes, which some libraries hide."""
        self._versions = self._counted()
        yield
        if self._engine.averages_gradients:  # else the engine itself may update weights there
            self._note_writes(self._rewritten(), "in the backward pass")

    def _counted(self) -> list[int]:
        return [parameter._version for parameter in self._parameters.values()]

    def _rewritten(self) -> list[str]:
        """The weights that were written since they were counted."""
        counts = zip(self._parameters, self._versions, self._counted(), strict=True)
        return [name for name, before, now in counts if before != now]

    def _called(self, module: nn.Module, _: Any) -> None:
        """Before each module is called, and before a library's own hooks."""
        self._refuse_transforms()
        if module.training and not torch.is_grad_enabled() and next(module.parameters(), None) is not None:
            self._without_gradients[module] += 1

    def _refuse_transforms(self) -> None:
        if self._whole or self.whole_steps or self._puts_others:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:  # torch has no public name for it
            raise EngineError(
                f"{_caller()} uses weights inside of a transform of torch.func, for which {self._engine.description} cannot gather "
                f"them; {self._whole_steps}"
            )

    def computed(self, loss: Tensor) -> None:
        """After each micro-batch's loss. Raises TaskError where parameters that are not the model's take part."""
        if not self._whole:  # some libraries put other objects in the place of parameters while modules run
            now = [parameter.requires_grad for parameter in self._model.parameters()]
            if len(now) == len(self._trained) and now != self._trained:
                self._refuse_frozen(now, "in this step")
        if not self._first:
            return
        if not self._watching:
            self._note_writes(self._rewritten() if self._whole else [], "in the forward pass or the loss")
            return
        if not self._examined:
            self._examined = True
            self._refuse_added(f"in step {self._first}")
            self._refuse_others(loss)
            self._refuse_recomputed_twice()
        self._last = self._marks()

    def _note_writes(self, names: Iterable[str], when: str) -> None:
        """What this rank has seen written: refused where the optimizer would overwrite it, else compared with other ranks later."""
        written = {name: None for name in names if name not in self._but}
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
        """Around a step, or an evaluation. Raises what :meth:`explained` returns in the place of an error."""
        try:
            yield
        except Exception as error:
            if explained := self.explained(error):
                raise explained from error
            raise

    def explained(self, error: Exception) -> DsframeError | None:
        """Returns what is to be said instead of ``error`` where parameters were made meanwhile, or where weights that a library
        gives up were used directly."""
        try:
            if self._parameters:
                self._refuse_added("in this step")
        except TaskError as added:
            return added
        if isinstance(error, EngineError):
            return None  # the engine has said why
        words = str(error) or traceback.extract_tb(error.__traceback__)[-1].name
        if remedy := next((known for text, known in self._engine.explains.items() if text in words), ""):
            return EngineError(f"{remedy.format(self._engine.description)}; {_OTHER_ENGINES}")
        known = isinstance(error, (RuntimeError, AssertionError, AttributeError))
        if self._whole or self._never_whole or not self._direct or not known:
            return None
        name, line = next(iter(self._direct.items()))
        return EngineError(
            f"{line} uses {name} itself, not by a call of its module, and the backward pass failed: {self._shards()}"
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._aside:
            return func(*args, **kwargs)
        if func is Tensor.register_hook and not self._examined and not args[0].is_leaf and (line := _caller()):
            args = (args[0], linearity.examining(args[1], line, self._say_not_linear))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = "=" + getattr(func.__self__, "__name__", "") if name == "__set__" else func.__self__.__name__
        if name not in _METADATA or func is torch.autograd.grad:
            self._check_call(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _say_not_linear(self, what: str) -> None:
        text = f"{what}, and not linearly: it is of one micro-batch, so the training depends on the micro batch size"
        if text not in self.notes:  # once for a line that registers many
            self.notes.append(text)

    def _check_call(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._refuse_transforms()
        if func is torch.autograd.grad and not (self._whole or self.whole_steps) and (line := _caller()):
            raise EngineError(
                f"{line} takes derivatives in the middle of a step, when {self._engine.description} has given weights up; "
                f"{self._whole_steps}"
            )
        alone = self._whole and self._engine.updates_in_place and self._engine.plan.world.size == 1
        if func is Tensor.backward and not alone and (line := _caller()):
            raise EngineError(
                f"{line} calls backward() itself, which adds to the gradients that {self._engine.description} reduces and updates "
                "with; use torch.autograd.grad, which gives derivatives alone"
            )
        if kwargs.get("max_norm") is not None and not self._whole:
            raise EngineError(
                f"max_norm of a function writes to its weight, and {self._engine.description} shards weights: use "
                "nn.Embedding(max_norm=...), which dsframe applies on every engine"
            )
        sparse = kwargs.get("sparse") or kwargs.get("sparse_grad")
        if sparse and any(leaf.requires_grad for leaf in _tensors(args, kwargs)) and (line := _caller()):
            raise TaskError(
                f"{line} asks for a sparse gradient, which no engine adds up; leave sparse out: dense ones are the same numbers"
            )
        if name in ("numpy", "__array__") and not self._whole and (known := self._name_of_memory(args[0])):
            raise EngineError(
                f"{_caller()} takes {known} to NumPy without a copy, and {self._engine.description} frees its memory; write "
                "clone() before numpy()"
            )
        for leaf in _tensors(args, kwargs):
            if isinstance(leaf, nn.Parameter):
                self._touched(leaf)
            elif (left := self._memory.name_of(leaf)) and (line := _caller()):
                raise EngineError(
                    f"{line} uses a tensor in the memory that {left} had when the model was built. {self._engine.description} has "
                    "moved the weight, so the tensor stays as it was: use the weight itself, or clone() the tensor in model() if "
                    "it shall stay so"
                )
        if (
            args
            and isinstance(args[0], Tensor)
            and (name.startswith("=") or (name.endswith("_") and name[-2:] != "__"))
        ):
            self._wrote(args[0])

    def _touched(self, parameter: nn.Parameter) -> None:
        known, original = self._built.get(id(parameter), ("", None))
        if original is None or original() is not parameter:
            known = ""
        stale = known and not self._whole and self._parameters.get(known) is not parameter
        if not stale and is_whole(parameter):
            if not self._whole and known and (line := _caller(direct=True)):
                self._direct.setdefault(known, line)
            return
        line = _caller()
        if line:
            if stale:
                raise EngineError(
                    f"{line} uses {known} by a reference from before the training (in a list or a dict, for example), and "
                    f"{self._engine.description} has put another tensor in its place: take it from its module where it is used"
                )
            name = known or next((n for n, other in self._parameters.items() if other is parameter), "a weight")
            raise EngineError(f"{line} uses {name} outside of its module's forward pass: {self._shards()}")

    def _wrote(self, target: Tensor) -> None:
        if target.requires_grad and not target.is_leaf:
            return
        name = self._name_of_memory(target)
        if name and (line := _caller()):
            if not self._whole:
                raise EngineError(
                    f"{line} writes to {name} in the middle of a step, and only to a copy: {self._shards()}"
                )
            self._writes.setdefault(name, line)
            if self._replaced is not None and name not in self._replaced:
                self._replaced[name] = self._parameters[name].detach().clone()

    def _name_of_memory(self, tensor: Tensor) -> str:
        """The weight in whose memory a tensor lies; "" for none."""
        storage = storage_of(tensor)
        weights = self._parameters.items() if self._whole else self._model.named_parameters()
        names = {
            name: weight for name, weight in weights if storage and is_whole(weight) and storage_of(weight) == storage
        }
        if len(names) > 1:  # of a flat buffer of an engine's, the one that is there
            place = tensor.data_ptr()
            for name, weight in names.items():
                if 0 <= place - weight.data_ptr() < weight.nbytes:
                    return name
        return next(iter(names), "")

    # What is found.

    def _marks(self) -> dict[str, Any]:
        """What changes when a weight does: its sum and norm where it is whole, else how often it was written to."""
        watched = {name: parameter for name, parameter in self._parameters.items() if name not in self._but}
        if self._gives_up:
            return {name: parameter._version for name, parameter in watched.items()}
        return _sums(watched)

    def _changed(self, before: Mapping[str, Any]) -> dict[str, Any]:
        return {name: mark for name, mark in self._marks().items() if name in before and mark != before[name]}

    def _check_writes(self, written: Mapping[str, Any], when: str) -> None:
        """**Collective** where this rank has whole weights. Raises EngineError, TaskError."""
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
        if not self._said:
            self._said = True
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
        trained = [parameter.requires_grad for parameter in self._parameters.values()]
        if trained != self._trained:
            self._refuse_frozen(trained, when)

    def _refuse_frozen(self, trained: Sequence[bool], when: str) -> None:
        names = [name for name, was, now in zip(self._parameters, self._trained, trained, strict=True) if was != now]
        self._refuse_changes(names, f"frozen or unfrozen {when}")

    def _refuse_added(self, when: str) -> None:
        now = {name for name, _ in self._model.named_parameters()}
        if added := [name for name in now if name not in self._parameters]:
            self._refuse_changes(sorted(added), f"made {when}")
        if replaced := [
            name for name, parameter in self._model.named_parameters() if self._is_another(name, parameter)
        ]:
            self._refuse_changes(replaced, f"replaced {when}")
        if gone := [name for name in self._parameters if name not in now]:
            self._refuse_changes(gone, f"removed {when}")

    def _is_another(self, name: str, parameter: Tensor) -> bool:
        """Some libraries put a whole parameter in the place of its shard while a module runs."""
        known = self._parameters.get(name, parameter)
        if self.whole_steps and not isinstance(parameter, nn.Parameter):  # a copy, for this step
            return False
        return known is not parameter and not self._puts_others

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
        linearity.examine_functions(nodes, self._say_not_linear)
        leaves = [node.variable for node in nodes if isinstance(getattr(node, "variable", None), nn.Parameter)]
        strangers = [parameter for parameter in leaves if id(parameter) not in known]
        if self._puts_others:  # and has taken the memory back from those that are out of the model
            strangers = [parameter for parameter in strangers if parameter.untyped_storage().size()]
        if strangers:
            shapes = ", ".join(str(list(parameter.shape)) for parameter in strangers[:3])
            raise TaskError(
                f"{type(self._engine.plan.task).__name__}: the loss depends on {len(strangers)} trainable parameter(s) "
                f"that are not the model's (shape {shapes}): nothing would train or save them. Let model() return a "
                "module that holds them too, or freeze them with requires_grad_(False)"
            )

    def _refuse_recomputed_twice(self) -> None:
        ours = set(self._model.modules())  # a library's wrapper is in training mode in an evaluation, too
        called = self._without_gradients.items()
        twice = [type(module).__name__.removeprefix("FSDP") for module, calls in called if calls > 1 and module in ours]
        if self.recomputes_inside and twice and not self._engine.reduces_repeatedly:
            raise EngineError(
                f"{twice[0]} is called more than once in a step by torch.utils.checkpoint with "
                f"use_reentrant=True, and {self._engine.description} would count a part of its gradients; write "
                "use_reentrant=False: the same numbers"
            )

    @property
    def _whole_steps(self) -> str:
        return self._never_whole or _WHOLE_STEPS

    def _shards(self) -> str:
        if self._never_whole:
            return f"{self._engine.description} shards weights, and no rank has whole ones; {self._never_whole}"
        return (
            f"{self._engine.description} shards weights, and this rank has whole ones only while the module that owns them "
            "runs. Read them inside of dsframe.gathered(module), write them in the task's after_step(name, weight), or "
            f"{_WHOLE_STEPS}"
        )


_UNUSUAL: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda parameter: parameter.is_complex(),
        "is complex; optimizers, norms and shards are of real numbers. Keep it as pairs, nn.Parameter(torch.view_as_real(weight)), "
        "and use torch.view_as_complex(self.weight) in the forward pass; a frozen one may be a buffer",
    ),
    (
        is_lazy,
        "have no shape before the first forward pass, and the optimizer is made before it. Call the model once in model(), or give "
        "the layer its sizes",
    ),
    (
        lambda parameter: parameter.is_meta,
        'have no memory (device "meta"), so there is nothing to train; make them on the CPU, or give them memory and numbers in '
        'model(): to_empty(device="cpu"), then an initialisation or load_state_dict()',
    ),
    (
        lambda parameter: parameter.layout != torch.strided,
        "is a sparse tensor, which no engine can send; train its values() as a dense parameter, and make the sparse tensor of them "
        "in the forward pass; a frozen one may be a buffer",
    ),
)
"""Kinds of parameters that no engine trains, and what to do."""


def refuse_unusual(model: nn.Module, whose: str) -> None:
    """Raises TaskError for parameters that get their shapes in the first forward pass, for complex and sparse ones, and for memory
    that a trained one shares with another."""
    for is_unusual, text in _UNUSUAL:
        if names := [name for name, parameter in model.named_parameters() if is_unusual(parameter)]:
            raise TaskError(f"{whose}.model: {', '.join(names)} {text}")
    if pair := _shared_memory(model):
        raise TaskError(
            f"{whose}.model: {pair[0]} and {pair[1]} are two tensors in the same memory, which come apart where an engine moves "
            "weights. To share a weight, give both modules the one parameter (head.weight = embedding.weight); else clone() it"
        )


def _shared_memory(model: nn.Module) -> tuple[str, str] | None:
    """The names of two tensors of which at least one is trained, and that have an element in common."""
    tensors = [
        (name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.numel() and tensor.layout == torch.strided and tensor.device.type != "meta"
    ]
    end, before = 0, None
    for name, tensor in sorted(tensors, key=lambda entry: entry[1].data_ptr()):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if before and tensor.data_ptr() < end and (before[1].requires_grad or tensor.requires_grad):
            places = (_places(tensor), _places(before[1]))
            if torch.isin(*places).any():
                return before[0], name
        if (reaches := tensor.data_ptr() + (last + 1) * tensor.element_size()) > end:
            end, before = reaches, (name, tensor)
    return None


def _places(tensor: Tensor) -> Tensor:
    """Where the elements of a tensor lie in its storage."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.arange(elements).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten()


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (tuple, list)):
            yield from tensors_of(argument)


def _caller(*, direct: bool = False) -> str:
    """File and line of the model's or the task's code that has called torch; "" where a library that moves weights has, or, if
    ``direct``, one of torch's own modules."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        ours = source_files.is_ours(file) and "/tasks/" not in file and file != __file__
        if ours or (file.startswith(_MOVERS) and file != _LINEAR) or (direct and file.startswith(_MODULES)):
            return ""
        if file != __file__ and not file.startswith((_TORCH, _LINEAR, "<")) and str(Path(file).parent) != _STDLIB:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@torch.no_grad()
def _sums(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    sums = []
    for parameter in parameters.values():
        flat = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        if not flat.is_floating_point():
            flat = flat.double()
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        sums.append(torch.stack([flat.sum(dtype=wide), torch.linalg.vector_norm(flat, dtype=wide)]).double())
    if not sums:
        return {}
    return {
        name: [each.hex() for each in row] for name, row in zip(parameters, torch.stack(sums).tolist(), strict=True)
    }


def _nodes(loss: Tensor) -> list[Any]:
    """Returns autograd's nodes that the backward pass of ``loss`` goes through."""
    seen, ahead = dict[Any, None](), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen[node] = None
            ahead += [following for following, _ in node.next_functions]
    return list(seen)
