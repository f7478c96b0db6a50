"""Decides whether an exception was caused by the user's code, or by dsframe and the libraries. Exceptions pass through
dsframe unchanged, because engines and launchers recognize some by class (a lost peer, for example). Only when one ends
a process does :func:`user_traceback` read its traceback."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from torch.nn import functional

from dsframe.data.datasets import DatasetSource, StreamSource
from dsframe.data.loader import EvaluationBatch, Loader
from dsframe.engines import precision
from dsframe.host import source_files
from dsframe.model import forward
from dsframe.model.micro_batch import Arguments
from dsframe.tasks.task import Task

_COMMUNICATION = ("/deepspeed/", "/horovod/", "/torch/distributed/")
"""An error raised here below the user's frames is not the user's: a hook in the model communicates with other ranks."""
_OF_ONE_RANK = ("/deepspeed/runtime/zero/linear.py", "/torch/distributed/fsdp/_fully_shard/_fully_shard.py")
"""Files in these folders that compute, or that refuse to be copied."""
_REMEDY = "\nFix it there; --verbose prints the whole traceback"
_INPUTS = (
    "A batch's inputs reach the model as model(*inputs) where they are a tuple, as model(**inputs) where they are a dict, "
    "else as model(inputs); here they are {kind}"
)


_IN_BACKWARD = re.compile("modified by an inplace operation|backward through the graph a second time")
"""Autograd's messages about errors in a model. The traceback no longer contains a frame of the model."""
_PASSES_ON = ("model/recomputation.py:", "model/batch_norm.py:_forward", "data/sample_draws.py:")
"""Wrappers that replace a function of the model or of torch and call it."""
_IN_16_BITS = re.compile("same dtype|scalar type|dtype mismatch", re.IGNORECASE)
"""Torch's messages about operands of two dtypes."""
_BUFFERS = (
    '\nUnder "bf16" and "fp16" weights and inputs are 16-bit, and buffers stay float32: cast them where they are used '
    '(x + self.table.to(x.dtype)), or write "torch_autocast" in the place of the section'
)
_EVALUATES = (
    "An evaluation calls the loss with what the model returns in evaluation mode; if that differs from training, as in detectors, "
    "define metrics(outputs, targets)"
)
_OF_CLASSES = {functional.cross_entropy.__code__, functional.nll_loss.__code__}
_READS_A_SAMPLE = {DatasetSource.item.__code__, StreamSource.item.__code__}


def _is_model_call(call: _Call) -> bool:
    return call.frame.f_code is forward.call.__code__


@dataclass(frozen=True)
class _Call:
    frame: FrameType
    line: int

    @cached_property
    def file(self) -> str:
        return str(Path(self.frame.f_code.co_filename).absolute())

    @property
    def ours(self) -> bool:
        return source_files.is_ours(self.file)

    @property
    def passes_on(self) -> bool:
        name = self.frame.f_code.co_name
        where = f"{Path(self.file).relative_to(source_files.OURS)}:{name}" if self.ours else ""
        return name == "__torch_function__" or where.startswith(_PASSES_ON)  # the first is the weight watch

    @property
    def users(self) -> bool:
        made_up = self.frame.f_code.co_filename.startswith("<")
        return not made_up and source_files.is_users(self.file)

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


def is_transient(error: Exception) -> bool:
    """Returns True if a restart may help although the user's code raised the error: a disk, a connection, memory."""
    return isinstance(error, (OSError, MemoryError)) or type(error).__name__ == "OutOfMemoryError"


def user_traceback(error: Exception) -> str | None:
    """Returns the text for the user about an ``error`` that their code or model raised: their frames, and the dsframe
    call that led to them. Returns None if it is not theirs."""
    walked = [_Call(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    calls = [call for call in walked if not call.passes_on]
    first = next((number for number, call in enumerate(calls) if call.ours), len(calls))
    calls = calls[first:]
    theirs = [number for number, call in enumerate(calls) if call.users]
    above = calls[: theirs[0]] if theirs else calls
    by = next((call for call in reversed(above) if call.ours), None)
    if by is None:
        return None
    if _IN_BACKWARD.search(str(error)) and any(call.frame.f_code is forward.backward.__code__ for call in calls):
        return f"the backward pass of the task's model raised {_describe(error)}{_REMEDY}"
    deepest = calls[-1].file
    if any(name in deepest for name in _COMMUNICATION) and not deepest.endswith(_OF_ONE_RANK):
        return None
    in_worker = "DataLoader worker process" in str(error).partition("\n")[0]
    if not (theirs or in_worker or _is_model_call(by)):
        return None
    return _text(error, by, calls)


def _text(error: Exception, by: _Call, calls: Sequence[_Call]) -> str:
    theirs = [(call.file, call.line, call.frame.f_code.co_name, call.source) for call in calls if call.users]
    whose = "the task's model" if _is_model_call(by) else "the task's code"
    lines = [f"{whose} raised {_describe(error)}"]
    lines += [text.rstrip() for text in traceback.StackSummary.from_list(theirs).format()]  # it counts repeated calls
    file = Path(by.file).relative_to(Path(source_files.OURS).parent)
    lines.append(f"called by {file}, line {by.line}, in {by.frame.f_code.co_name}: {by.source}")
    values = by.frame.f_locals
    if _is_model_call(by) and "inputs" in values and not theirs:
        lines.append(_INPUTS.format(kind=_describe_inputs(values["inputs"])))
    if by.frame.f_code in _READS_A_SAMPLE and "index" in values:
        lines.append(f"The sample is number {values['index']} of its data set, counted from 0")
    if by.frame.f_code is Task.validation_loss.__code__:
        lines.append(_EVALUATES)
    lines += _out_of_range(calls) if isinstance(error, IndexError) else []
    model = by.frame.f_locals.get("model")
    short = isinstance(model, nn.Module) and any(precision.is_short(weight.dtype) for weight in model.parameters())
    return "\n".join(lines) + (_BUFFERS if short and _IN_16_BITS.search(str(error)) else "") + _REMEDY


def _out_of_range(calls: Sequence[_Call]) -> list[str]:
    """Returns a message with the number that an embedding or classification loss rejects; torch's error lacks it."""
    code, values = calls[-1].frame.f_code, calls[-1].frame.f_locals
    if code is functional.embedding.__code__:
        numbers, size, what = values["input"], len(values["weight"]), "token"
    elif code in _OF_CLASSES:
        numbers, scores, what = values["target"], values["input"], "label"
        size = scores.shape[min(scores.ndim - 1, 1)]
    else:
        return []
    wrong = (numbers < 0) | (numbers >= size)
    if what == "label":
        wrong &= numbers != values["ignore_index"]
    if numbers.is_floating_point() or not wrong.any():
        return []
    row = int(wrong.nonzero()[0, 0]) if numbers.ndim else 0
    text = f"The {what} {int(numbers[wrong][0])}, in row {row} counted from 0, is not in the {size} that there are, 0 to {size - 1}"
    return [text + _samples(calls, row, len(numbers) if numbers.ndim else 1)]


def _samples(calls: Sequence[_Call], row: int, rows: int) -> str:
    """Returns which samples are at ``row`` of a batch of ``rows`` rows; "" if ``collate`` may have changed them."""
    for values in (call.frame.f_locals for call in reversed(calls)):
        loader, batch, step = getattr(values.get("self"), "loader", None), values.get("batch"), values.get("step")
        if isinstance(batch, EvaluationBatch) and len(batch.samples) == rows:
            return f" (sample {batch.samples[row]} of the evaluation)"
        if isinstance(loader, Loader) and isinstance(step, int):
            of = [] if loader.collates or rows != loader.micro_batch_size else loader.samples_at(step - 1, row)
            return f" (sample {' or '.join(map(str, of))} of the training data)" if of else ""
    return ""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip() or 'no message'}"


def _describe_inputs(inputs: Any) -> str:
    if isinstance(inputs, Arguments):
        inputs = inputs.kwargs or (inputs.args[0] if len(inputs.args) == 1 else inputs.args)
    if isinstance(inputs, Mapping):
        return f"a dict with the keys {', '.join(map(str, inputs))}"
    if isinstance(inputs, (tuple, list)):
        return f"a {type(inputs).__name__} of {len(inputs)}"
    name, shape = type(inputs).__name__, getattr(inputs, "shape", None)
    return name if shape is None else f"one {name} of shape {list(shape)} in {inputs.dtype}"
