"""Checks the torch functions that user code calls with weights, and refuses calls that an engine cannot support. Code
that reads a shard computes with a part of a weight, and code that writes to one writes to a copy."""

from __future__ import annotations

import sys
import sysconfig
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from xxhash import xxh3_64_hexdigest

from dsframe.errors import EngineError, TaskError
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
"""Functions and attributes that do not depend on a tensor's values."""
_TORCH = str(Path(torch.__file__).parent)
_SITE = str(Path(_TORCH).parent)
_MOVERS = tuple(f"{_SITE}{folder}" for folder in ("/torch/distributed/", "/deepspeed/", "/horovod/"))
"""Libraries that move weights. Other installed packages, such as transformers, count as the model's code."""
_LINEAR = f"{_SITE}/deepspeed/runtime/zero/linear.py"
"""DeepSpeed's replacement of ``torch.nn.functional.linear`` at ZeRO-3."""
_MODULES = str(Path(_TORCH, "nn", "modules"))
_STDLIB = sysconfig.get_path("stdlib")
_WHOLE_STEPS = (
    "write whole_weights = True in the task, which gathers all for each step, or choose an engine that keeps whole weights on each "
    "rank (ddp, horovod, or ZeRO 0 to 2)"
)

_WATCH = (
    __file__,
    *(str(Path(__file__).parents[1] / file) for file in ("model/weight_watch.py", "training/halves.py")),
)
"""Files with modes of torch's, which are on the stack between torch and its caller."""


class CallWatch(TorchFunctionMode):
    """Watches the calls with the weights of one engine's model."""

    def __init__(self, engine: Any, model: nn.Module, memory: BuiltMemory) -> None:
        """``engine``: a ``dsframe.engine.Engine``, held weakly. ``memory``: of the weights as built."""
        super().__init__()
        self._memory = memory
        self._engine, self._model = weakref.proxy(engine), model
        # Parameters that the model's code may hold and a library replaces; weak references, because they are a complete
        # model.
        self._built = {id(parameter): (name, weakref.ref(parameter)) for name, parameter in model.named_parameters()}
        self._parameters: dict[str, nn.Parameter] = {}
        self._held = ""
        """A digest of their names: ranks of another pipeline stage have others."""
        self._trained: list[bool] = []
        self._dtypes: list[torch.dtype] = []
        self._whole, self._never_whole, self._gives_up = True, "", False
        self.whole_steps = False
        """True if the engine gathers its shards for complete steps: copies of the weights that any code may read."""
        self._direct: dict[str, str] = {}
        """Weight -> the line that has used it directly, not by a call of its module."""
        self._writes: dict[str, str] = {}
        """Weight -> the line that has written to it."""
        self._replaced: dict[str, Tensor] | None = None
        """In a trial, the contents of the weights that it writes to."""
        self._examined = False
        """True once the first loss of a step has been checked."""
        self._aside = False
        self._without_gradients: Counter[nn.Module] = Counter()
        self.notes: list[str] = []
        """Messages that the run prints once."""

    def note_parameters(self) -> None:
        """Records the parameters after the engine has been created."""
        if self._parameters:
            return
        self._parameters = dict(self._model.named_parameters())
        self._held = xxh3_64_hexdigest("\n".join(self._parameters).encode())
        self._trained = [parameter.requires_grad for parameter in self._parameters.values()]
        self._dtypes = [parameter.dtype for parameter in self._parameters.values()]
        self._memory.keep_left(self._model)
        libraries = [library_of(parameter) for parameter in self._parameters.values()]
        self._whole = not any(libraries)
        self._others = next((library.others for library in libraries if library and library.others), None)
        self._never_whole = next((library.never_whole for library in libraries if library and library.never_whole), "")
        self._gives_up = any(library is not None and not library.never_whole for library in libraries)

    @property
    def model(self) -> nn.Module:
        """The watched model."""
        return self._model

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Disables the checks of :meth:`inside` for dsframe's own calls, unless weights are sharded."""
        self._aside = self._whole
        try:
            yield
        finally:
            self._aside = False

    def _called(self, module: nn.Module, _: Any) -> None:
        """Called before each module, and before a library's hooks."""
        self._refuse_transforms()
        if module.training and not torch.is_grad_enabled() and next(module.parameters(), None) is not None:
            self._without_gradients[module] += 1

    def _refuse_transforms(self) -> None:
        if self._whole or self.whole_steps or self._others:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:  # no public name in torch
            raise EngineError(
                f"{_caller()} uses weights inside of a transform of torch.func, for which {self._engine.description} cannot gather "
                f"them; {self._whole_steps}"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._aside:
            return func(*args, **kwargs)
        if func is Tensor.register_hook and not args[0].is_leaf and (line := _caller()):
            text, say = f"{line} changes the gradient of an output", None if self._examined else self._say_not_linear
            args = args[0], linearity.examining(args[1], text, say, self)
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
        forward = torch._C._current_graph_task_id() == -1
        if func is torch.autograd.grad and forward and not (self._whole or self.whole_steps) and (line := _caller()):
            raise EngineError(
                f"{line} takes derivatives in the middle of a step, when {self._engine.description} has given weights up; "
                f"{self._whole_steps}"
            )
        alone = self._whole and self._engine.updates_in_place and self._engine.plan.world.size == 1
        if func is Tensor.backward and forward and not alone and (line := _caller()):
            raise EngineError(
                f"{line} calls backward() itself, which adds to the gradients that {self._engine.description} reduces and updates "
                "with; use torch.autograd.grad, which only computes derivatives"
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
                self._check_read(leaf)
            elif (left := self._memory.name_of(leaf)) and (line := _caller()):
                raise EngineError(
                    f"{line} uses a tensor in the memory that {left} had when the model was built. {self._engine.description} has "
                    "moved the weight, so the tensor stays as it was: use the weight itself, or clone() the tensor in model() if "
                    "it shall stay so"
                )
        in_place = name.startswith("=") or name == "__setitem__" or (name.endswith("_") and name[-2:] != "__")
        written = args[:1] or kwargs.get("tensor") if in_place else ()  # torch.nn.init gives it by name
        for target in tensors_of([written, kwargs.get("out")]) if in_place or kwargs else ():
            self._check_write(target)

    def _check_read(self, parameter: nn.Parameter) -> None:
        known, original = self._built.get(id(parameter), ("", None))
        known = known if original and original() is parameter else ""
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

    def _check_write(self, target: Tensor) -> None:
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
        """Returns the weight whose memory contains the tensor; "" if none."""
        storage = storage_of(tensor)
        weights = self._parameters.items() if self._whole else self._model.named_parameters()
        names = {
            name: weight for name, weight in weights if storage and is_whole(weight) and storage_of(weight) == storage
        }
        if len(names) > 1:  # of several in an engine's flat buffer
            place = tensor.data_ptr()
            for name, weight in names.items():
                if 0 <= place - weight.data_ptr() < weight.nbytes:
                    return name
        return next(iter(names), "")

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


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (tuple, list)):
            yield from tensors_of(argument)


def _caller(*, direct: bool = False) -> str:
    """Returns file and line of the model or task code that called torch; "" if the caller is a library that moves
    weights, or, if ``direct``, one of torch's modules."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        ours = source_files.is_ours(file) and "/tasks/" not in file and file not in _WATCH
        if ours or (file.startswith(_MOVERS) and file != _LINEAR) or (direct and file.startswith(_MODULES)):
            return ""
        if file not in _WATCH and not file.startswith((_TORCH, _LINEAR, "<")) and str(Path(file).parent) != _STDLIB:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
