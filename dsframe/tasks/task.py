"""Defines what a user supplies: a model, a loss and data. Subclass :class:`Task`; everything else has a default.

A complete task::

    class Digits(dsframe.Task):
        def __init__(self, hidden: int = 64) -> None:      # options come from the file: "options": {"hidden": 128}
            self.hidden = hidden

        def model(self):
            return nn.Sequential(nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

        def loss(self, outputs, targets):
            return nn.functional.cross_entropy(outputs, targets)

        def train_data(self):
            return TensorDataset(inputs, targets)

The file names it as ``"task": {"name": "my_package.my_module:Digits"}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from dsframe.cluster.exchange import Ranks
from dsframe.data.source import Source
from dsframe.errors import TaskError
from dsframe.host import generators
from dsframe.tasks.average_of import AverageOf
from dsframe.tasks.global_batch import all_rows
from dsframe.tasks.layers import Layer, assemble
from dsframe.text import Say
from dsframe.values import tensors_of

if TYPE_CHECKING:
    from dsframe.hooks import Hooks

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries, keys and values, ``[rows, time, heads, head size]`` each; the result is like queries."""


@dataclass(frozen=True)
class Sum:
    """A total and the number of items that it was summed over.

    Means over ranks and batches are exact because totals and counts are added up first and divided last.
    """

    total: Tensor
    """Floating-point scalar on the model's device. For metrics, a plain number is allowed."""
    count: int | Tensor
    """Number of samples, tokens, ... in the total."""

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """``total / count``. Waits for the device. NaN if nothing was counted."""
        count = float(self.count)
        return float(self.total.detach()) / count if count else float("nan")


Sums = Mapping[str, Sum]
"""Sums by the name of a metric."""


@dataclass
class TaskContext:
    """Information about the run for its task."""

    dtype: torch.dtype = torch.float32
    """Dtype of the weights in training; those read from files need not be wider."""
    rank: int = 0
    world_size: int = 1
    quiet: bool = False
    step: int = 0
    """The current optimizer step, counted from 1; 0 before the first."""
    evaluating: bool = False
    """True during an evaluation, and while the first loss is tested: each rank then uses its own rows."""
    local_rows: bool = False
    """True if :meth:`Task.all_rows` has returned the rows of one batch of this rank in an evaluation."""
    eval_set: str = ""
    """Name of the set in ``eval_data`` that is being evaluated, if there are several."""
    eval_samples: int = 0
    """Number of samples in the batch that ``metrics`` gets: as many as ``collate`` got."""
    ranks: Ranks | None = None
    """Sums over ranks; set when the model is built."""

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Encloses an evaluation."""
        before, self.evaluating = self.evaluating, True
        try:
            yield
        finally:
            self.evaluating = before


class Task:
    """A model, its loss and metrics, and data. A batch is ``(inputs, targets)``; both may be any nesting of tensors.

    Everything must be the same on every rank: the same model, the same data sets in the same order. dsframe seeds the
    random generators before it asks for the model, and distributes the samples itself.
    """

    seed: int = 0
    """The run's seed, set before any method is called."""
    context = TaskContext()
    """The run, set before :meth:`model` is called."""
    unit: str = "samples"
    """Unit of rates: ``samples``, ``tokens``, ..."""
    units_per_sample: int = 1
    """Number of units in one sample: the context length for a language model."""
    workers: int = 0
    """Processes that read a torch ``Dataset``. A ``Source`` in memory is always read in the training process."""
    collate: Any = None
    """Makes a batch from a list of rows of a torch ``Dataset``: ``(inputs, targets)``, or a dict with ``labels``.

    A method ``collate(self, rows)``, :class:`dsframe.data.Pad`, or a collator of transformers; it runs in the process
    that reads the rows. None: rows are pairs, or dicts with ``labels``, of one size. Random numbers that it draws
    belong to the micro-batch, not to a sample.
    """
    eval_collate: Any = None
    """The same for evaluations and predictions, if :attr:`collate` is only for training, like mixup."""
    eval_gradients: bool = False
    """True if :meth:`metrics` or :meth:`loss` takes derivatives of the outputs, as for a differential equation:
    evaluations then keep the graph of a batch. Refused in a pipeline."""
    whole_weights: bool | None = None
    """Whether all weights are gathered for each complete step, and may be used anywhere, if ranks hold shards (ZeRO-3,
    FSDP). None: only for models and losses whose code takes derivatives (``torch.autograd.grad``, ``torch.func``).
    False: never, for such code that exists and does not run."""
    data_dir: str | None = None
    """Folder that :meth:`prepare` writes to. None: $DSFRAME_DATA, else ~/.cache/dsframe/data."""
    class_names: Sequence[str] = ()
    """Names of the classes by number, if the data have names. A checkpoint with others is refused."""
    prepared_as: str = ""
    """Name of the prepared data, if tasks of one class prepare different data: those do not wait for each other."""
    batch_dependent: bool = False
    """True if a sample's output depends on the rest of its micro-batch. (BatchNorm in training is detected without it.)
    The result then depends on the micro-batch size, and so on the number of ranks; dsframe reports this before
    training."""
    over_micro_batches: str = ""
    """The part of the loss that covers one micro-batch of all ranks, such as a mixture's balance. The result then
    depends on ``gradient_accumulation_steps``; dsframe reports this if it is not 1."""
    loss_is: str = "mean"
    """What :meth:`loss` returns: the ``"mean"`` over the samples of a micro-batch, or their ``"sum"``. For ``"sum"``, a
    step uses the sum over the global batch, on any number of ranks. The first step tests the declaration."""
    metric_objects: Mapping[str, Any] = MappingProxyType({})
    """torchmetrics objects by name, such as ``{"auroc": AUROC(task="binary")}``, used in evaluations together with
    :meth:`metrics`. They get each sample once, on any number of ranks: their states are gathered. Set them in
    ``__init__``."""
    after_step_elementwise: bool = False
    """True if :meth:`after_step` treats each element of a weight independently, like ``clamp_``. If ranks hold shards,
    nothing is then gathered, and each call gets a rank's part of the weight, flat."""
    gathers_rows: bool = False
    """True once :meth:`all_rows` has been called."""
    hooks: Sequence[Hooks] = ()
    """Objects of :class:`dsframe.Hooks`, called together with those that the file names."""
    hidden_size: int | None = None
    """Width of the model, which determines the ``"auto"`` sizes of ``zero_optimization``."""

    partition_config: Mapping[str, Any] | None = None
    """Layers that tensor parallelism shards and how, in the form of DeepSpeed's ``tensor_parallel.partition_config``.
    Used if the file has none. A sharded model must not derive the number of heads or the width from a weight, because
    each rank has a part (``view(batch, time, -1, head_size)``)."""

    @staticmethod
    def from_module(
        model: Callable[[], nn.Module], loss: Callable[[Any, Any], Any], train_data: Any, eval_data: Any = None
    ) -> Task:
        """Returns a task made of parts: ``dsframe.fit(dsframe.Task.from_module(Net, nn.CrossEntropyLoss(), data),
        "zero3.json")``.

        ``model``: a class or function without arguments that creates the model, so that its weights depend on the
        file's seed. ``loss(outputs, targets)``: the mean over the samples. Raises TaskError for an existing module.
        """
        if isinstance(model, nn.Module):
            raise TaskError(
                f"from_module: {type(model).__name__} is made already, from other random numbers on each run; give what makes it: "
                f"{type(model).__name__}, or lambda: {type(model).__name__}(...)"
            )
        return _OfParts(model, loss, train_data, eval_data)

    def model(self) -> nn.Module:
        """Returns a new model, initialized from torch's global random generator, such that ``outputs = model(inputs)``.

        Inputs that are a dict are passed as ``model(**inputs)``, a tuple or list as ``model(*inputs)``.

        Training starts with ``model.train()``, and each evaluation ends with it. A part that is to stay in evaluation
        mode, such as a frozen BatchNorm, overrides ``train()``.
        """
        layers = self.layers()
        if layers is not None:
            return assemble(layers, self.seed)
        if not self.models():
            raise TaskError(f"{type(self).__name__} must define model() or layers()")
        return nn.ModuleDict({name: self.model_of(name) for name in self.models() if name in self.losses()})

    def models(self) -> Mapping[str, Callable[[], nn.Module] | AverageOf]:
        """Returns several models instead of :meth:`model`: for each name a function that creates it; by default none.

        Each is trained by its own optimizer, with its loss in :meth:`losses`. A model without a loss, such as a
        teacher, is frozen, stays in evaluation mode, and is not in checkpoints: its function loads its weights at each
        start. Parameters are named ``NAME.rest``. Evaluations and predictions use the first trained one.

        A model may be the moving average of a trained one (:class:`dsframe.average_of`): in evaluation mode, with that
        one's buffers.
        """
        return {}

    def losses(self) -> Mapping[str, Callable[[Mapping[str, Callable[..., Any]], Any, Any], Any]]:
        """Returns the losses of a step, in their order, by the name of the model that each trains; required with
        :meth:`models`.

        ``loss(models, inputs, targets)`` returns a value like :meth:`loss`, and calls the models by their names:
        ``models["generator"](inputs)``, with positional or keyword arguments. Gradients flow through all models, but
        only to the parameters of the trained one. Each loss sees all micro-batches of a step before the next one does;
        the models before it in the order are updated by then.
        """
        return {}

    def model_of(self, name: str) -> nn.Module:
        """Returns a new instance of one of :meth:`models`. Its random numbers depend only on :attr:`seed` and its
        index. Raises TaskError."""
        models = self.models()
        made = models[name]
        if isinstance(made, AverageOf):
            return self.model_of(made.model)
        if isinstance(made, nn.Module) or not callable(made):
            raise TaskError(
                f"{type(self).__name__}.models: {name!r} is {type(made).__name__}, made already; give what makes the model"
            )
        generators.seed(self.seed * 1_000_003 + list(models).index(name))
        model = made()
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"{type(self).__name__}.models: {name!r} made {type(model).__name__}, which is not a module"
            )
        return model

    def layers(self) -> Sequence[Layer] | None:
        """Returns the model as a list of layers, each of which takes the previous one's output; None if it is not a
        chain.

        Prefer functions that create them, such as ``functools.partial(Block, width)``: each layer is then drawn from
        its own seed, and a pipeline stage builds only its own layers. With layers, :meth:`model` is not needed: it is
        an ``nn.Sequential`` of them. A weight that two layers share is a :class:`dsframe.Tied`.
        """
        return None

    def cut(self, model: nn.Module) -> Sequence[Layer] | None:
        """Returns the modules that, called in sequence, equal ``model``, the result of :meth:`model`; None if it cannot
        be split.

        For models that are created as a whole: a pipeline stage then builds all of it and keeps its own part. Parameter
        names do not change. A layer that uses an earlier one's weight is a :class:`dsframe.Tied`.
        """
        plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        return list(cast(nn.Sequential, model)) if plain else None  # not children(), which lists each module once

    def share_sequences(
        self, model: nn.Module, part: int, parts: int, exchange: Callable[[Attention], Attention]
    ) -> None:
        """Makes ``model``, the result of :meth:`model`, compute slice ``part`` (from 0) of ``parts`` equal ones along
        time.

        Every tensor of a batch then has its slice in dimension 1. The loss has to be the mean over positions, or over
        the number that :meth:`loss_weight` returns for a slice's targets, and metrics have to be sums over positions.
        Attention is replaced by ``exchange(attention)``, which covers all positions; ``parts`` has to divide the heads.
        Raises TaskError if that is impossible, as for any model that does not override it.
        """
        raise TaskError(f"sequence_parallel_size: {type(self).__name__} has no share_sequences(), which it needs")

    def before_slicing(self, inputs: Any) -> Any:
        """Called with the complete inputs of each micro-batch before a rank takes its slice (:meth:`share_sequences`).
        Returns them, with information that a slice needs about its position. By default they are unchanged."""
        return inputs

    def example(self) -> tuple[Any, Any] | None:
        """Returns a batch of one sample, on any device, for ``dsframe plan``, which uses only shapes and dtypes.

        None: the first sample of :meth:`train_data` is used, which then has to exist.
        """
        return None

    def loss(self, outputs: Any, targets: Any) -> Any:
        """Returns a scalar to minimize: the mean over the samples of the batch, or with :attr:`loss_is` ``"sum"`` their
        sum.

        To log more, such as its parts, return ``(loss, {"name": dsframe.Sum(total, count)})``: a log line has the mean
        of each over the global batch, an evaluation over all its samples.

        A step uses the mean of the losses of all micro-batches of all ranks, which have equally many samples. If a loss
        is a mean over a number that differs between micro-batches, such as tokens without padding (``cross_entropy(...,
        ignore_index=-100)``), define :meth:`loss_weight`. Otherwise gradients depend on the number of ranks and on
        accumulation.
        """
        raise TaskError(f"{type(self).__name__} must define loss(outputs, targets)")

    def all_rows(self, rows: Tensor) -> Tensor:
        """**Collective.** For a loss over the global batch: returns the ``rows`` (outputs or targets) of all ranks, in
        rank order, such that gradients equal those of one process. On one process, and in evaluations (which print a
        note), returns ``rows``.

        Call it in :meth:`loss`, equally often on every rank. The loss is then that of the step, a mean or a sum. Raises
        TaskError if a step has several micro-batches, with :attr:`loss_is` ``"sum"``, which is for the rows of one
        rank, and with pipeline, tensor or sequence parallelism.
        """
        self.gathers_rows = True
        if self.loss_is == "sum":
            raise TaskError(f'{type(self).__name__}: all_rows() has the rows of all ranks; leave out loss_is = "sum"')
        self.context.local_rows |= self.context.evaluating
        if self.context.ranks is None or self.context.evaluating:
            return rows
        return all_rows(self.context.ranks, rows)

    def after_step(self, name: str, weight: Tensor) -> None:
        """Called after each update for each trained weight, without gradients. Changes to ``weight`` are kept on every
        engine: ``weight.clamp_(-0.01, 0.01)``.

        ``name``: as in ``model.named_parameters()``. ``weight``: complete, in float32 if the model is in 16 bits.
        Changes must be the same on every rank. If ranks hold shards (ZeRO 1 to 3, FSDP), each weight is gathered in
        turn, unless :attr:`after_step_elementwise`.
        """

    def loss_weight(self, targets: Any) -> Tensor | float:
        """Returns the number of items that a micro-batch's loss is a mean over: ``(targets != -100).sum()`` for tokens
        without padding.

        A step's loss is then the mean over all items of all its micro-batches on all ranks. By default micro-batches
        count equally, because they have equally many samples. An override costs one small collective a step, and a
        step's micro-batches are read at once.
        """
        return len(tree_leaves(targets)[0])

    def metrics(self, outputs: Any, targets: Any) -> Sums:
        """Returns the metrics of a batch by name, as sums and counts; by default :meth:`validation_loss`, which is
        reported even if an override omits it.

        Outputs and targets are those of a complete batch as ``collate`` made it; the last batches have fewer samples.
        Gradients are off; use ``torch.enable_grad()`` to take derivatives.
        """
        return self.validation_loss(outputs, targets)

    def validation_loss(self, outputs: Any, targets: Any) -> Sums:
        """Returns the loss as a mean over samples, even if it is a sum, and the other values that :meth:`loss` returns.
        Without :meth:`loss_weight`, the count is the number of rows in outputs and targets if it is the same, else of
        samples."""
        returned, terms = loss_and_terms(self.loss(outputs, targets))
        loss = tensor_of(returned, f"{type(self).__name__}.loss")
        weighted = gives(self, "loss_weight")
        items = torch.as_tensor(
            self.loss_weight(targets) if weighted else _items(outputs, targets, self.context.eval_samples),
            device=loss.device,
        )
        if self.loss_is == "sum":
            return {**terms, "loss": Sum(loss, items)}
        total = torch.where(items > 0, loss * items, torch.zeros_like(loss))  # a mean over nothing is NaN
        return {**terms, "loss": Sum(total, items)}

    def metrics_of_models(self, models: Mapping[str, Callable[..., Any]], inputs: Any, targets: Any) -> Sums:
        """**Collective.** Returns more metrics of a batch for tasks with several :meth:`models`, from outputs of any of
        them, such as how often a policy prefers another answer than its reference. ``models`` are called as in
        :meth:`losses`, here in evaluation mode and without gradients, equally often on every rank. By default there are
        none."""
        return {}

    def update_metric(self, metric: Any, outputs: Any, targets: Any) -> None:
        """Updates one of :attr:`metric_objects` with a batch, as :meth:`metrics` gets it: ``metric.update(outputs,
        targets)``."""
        metric.update(outputs, targets)

    def keep(self, outputs: Any, targets: Any) -> Any:
        """Returns the input of :meth:`metrics_of_all` for a batch: any nesting of tensors, numbers and texts."""
        return outputs, targets

    def metrics_of_all(self, batches: list[Any]) -> Mapping[str, float]:
        """Returns metrics that are not means, such as mAP, BLEU or an area under a curve, computed from all
        ``batches``: the results of :meth:`keep`, in the order of the samples, on the CPU.

        Called on rank 0, with any number of ranks; the samples in a batch depend on that number. Rank 0 has all of them
        in memory, and every other rank its own part until the end of the evaluation, so keep little. By default there
        are none.
        """
        return {}

    def finalize(self, sums: Sums) -> Mapping[str, float]:
        """Returns the reported metrics, from the ``sums`` of :meth:`metrics` over all samples. By default the mean of
        each.

        For functions of means: perplexity is ``exp(sums["loss"].mean)``, F1 needs three counts. Each sample is in the
        sums once, so the result does not depend on the number of ranks. Called on every rank with the same sums:
        float64, on the CPU.
        """
        return {name: value.mean for name, value in sums.items()}

    def order(self, epoch: int, samples: int) -> Tensor | None:
        """Returns the order of the training samples in ``epoch`` (from 0): int64 ``[samples]``; None: the file's order.

        Must depend only on :attr:`seed` and its arguments, to be the same on every rank and after a restart. An index
        may occur more than once.
        """
        return None

    def schedule(self, updates: int) -> float | None:
        """Returns the factor of the optimizer's learning rate for the next update, after ``updates`` updates; None: no
        schedule.

        Replaces the file's ``scheduler``. Must depend only on its argument, so that a resumed run has the same learning
        rates.
        """
        return None

    def weight_decay(self, updates: int) -> float | None:
        """Returns the weight decay of the next update, after ``updates`` updates; None: the file's.

        Applies to all parameters with a weight decay in the file, not to those of a group without one. Must depend only
        on its argument, like :meth:`schedule`.
        """
        return None

    def parameter_groups(self, model: nn.Module) -> Sequence[Mapping[str, Any]]:
        """Returns groups of parameters with their own weight decay or learning rate, or frozen ones; by default none.

        Dicts as in the file's ``parameter_groups``, which they replace: ``{"match": [names or patterns],
        "weight_decay": 0}``. ``model``: the result of :meth:`model`, for names, shapes and classes; in a pipeline it
        may have no values. Must depend only on its argument: the same on every rank.
        """
        return ()

    def optimizer(self, groups: list[Any], **params: Any) -> torch.optim.Optimizer:
        """Returns the optimizer, if the file has ``"optimizer": {"type": "task", "params": {"lr": 1e-3}}``.

        ``groups``: tensors, or dicts of them, as for torch's optimizers: parameters, their fp32 masters, or at ZeRO-1
        to 3 flat shards of many, where the update of each element must not depend on others. Pass all of them on.
        ``params``: the file's; ``lr`` is set before each update, in proportion for groups with their own learning
        rates. Checkpoints save its state: tensors of a parameter's shape, and numbers.
        """
        raise TaskError(f"{type(self).__name__} must define optimizer(groups, **params)")

    def prepare(self, say: Say) -> None:
        """Downloads, unpacks, tokenizes: once, in one process of each node, before any process reads data. By default
        does nothing.

        Nodes that share :attr:`data_dir` take turns. The other ranks wait without a limit. ``say("3 of 10 files")``
        prints a line. If it raises, or its process ends, all ranks end with that message. It may be killed at any time:
        write to a temporary name, and rename what is complete. Called at every start: check for existing results.
        """

    @property
    def prepares(self) -> bool:
        """True if :meth:`prepare` is defined; ranks then synchronize before they read."""
        return gives(self, "prepare")

    def train_data(self) -> Source | Dataset[Any]:
        """Returns training data: a :class:`dsframe.data.Source`, a map-style torch ``Dataset`` of ``(input, target)``
        pairs or of dicts with ``labels``, as in the package ``datasets``, or of any rows with :attr:`collate`; or an
        ``IterableDataset``.

        Called on every rank at once: it may read files but must not write what other ranks read; :meth:`prepare` may.
        The generators of torch, NumPy and ``random`` are seeded from the file's seed before, and again before
        :meth:`eval_data`.
        """
        raise TaskError(f"{type(self).__name__} must define train_data()")

    def pretrained(self) -> Mapping[str, Any] | None:
        """Returns transformers' description of the model, for ``dsframe export --to huggingface``; None if it is not a
        transformers model.

        ``config``: its configuration as JSON text, with ``model_type`` and ``architectures``; ``tokenizer``: a local
        folder or None; ``tokenizer_sha256``: a digest of the tokenizer's files or "". Every checkpoint's manifest keeps
        it.
        """
        return None

    def eval_data(self) -> Source | Dataset[Any] | Mapping[str, Any] | None:
        """Returns validation data of the same type, or None: no evaluation. A dict has several sets by name; their
        metrics are called ``val/loss``, ``clean/accuracy``."""
        return None

    def predict_data(self) -> Source | Dataset[Any] | Mapping[str, Any] | None:
        """Returns data for ``dsframe predict``, of the same type; by default :meth:`eval_data`. Targets may be
        anything, one for each sample, or absent: a row is then a tensor, a tuple of one or a dict without labels, and
        :meth:`predictions` gets zeros."""
        return self.eval_data()

    def predictions(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        """Returns the output of ``dsframe predict`` for a batch, by name: a tensor with a row for each sample, a list
        with an entry for each, or any nesting of these in dicts, tuples and objects.

        By default the outputs: under ``output``, or by their own names if they are a mapping.
        """
        return outputs if isinstance(outputs, Mapping) else {"output": outputs}


class _OfParts(Task):
    """The task of :meth:`Task.from_module`."""

    def __init__(
        self, model: Callable[[], nn.Module], loss: Callable[[Any, Any], Any], train: Any, held_out: Any
    ) -> None:
        self._made_by, self._loss, self._train, self._held_out = model, loss, train, held_out

    def model(self) -> nn.Module:
        return self._made_by()

    def loss(self, outputs: Any, targets: Any) -> Any:
        return self._loss(outputs, targets)

    def train_data(self) -> Any:
        return self._train

    def eval_data(self) -> Any:
        return self._held_out


def gives(task: Task, name: str) -> bool:
    """Returns True if the task defines this method, in its class or in an attribute."""
    return name in vars(task) or getattr(type(task), name) is not getattr(Task, name)


def _items(outputs: Any, targets: Any, samples: int) -> int:
    """Returns the number of items in a loss's mean: the rows of all targets and an output, if a ``collate`` makes
    another number of rows than it gets; else ``samples``."""
    rows, given = ({len(leaf) for leaf in tensors_of(part) if leaf.ndim} for part in (targets, outputs))
    by_sample = isinstance(outputs, list) and len(outputs) == samples
    return samples if samples and (by_sample or len(rows) != 1 or not rows <= given) else next(iter(rows), 1)


def loss_and_terms(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the two parts of a task's loss: the loss, and other values to log."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned
    return returned, {}


def tensor_of(loss: Any, whose: str) -> Tensor:
    """Returns a task's loss if it is a tensor with one element. Raises TaskError if not."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    if isinstance(loss, Tensor):
        raise TaskError(f"{whose}: returned a tensor of shape {list(loss.shape)}, not a scalar; return its mean")
    text = f"{whose}: returned {type(loss).__name__}, not a tensor"
    if loss is None:
        raise TaskError(
            f"{text}; return the mean loss of the micro-batch. A model of transformers has no loss in its outputs here, because "
            "its labels are the targets of loss(outputs, targets): compute the loss of outputs.logits and targets"
        )
    raise TaskError(f"{text}; return the mean loss of the micro-batch")


_SUMMED = (torch.float32, torch.float64, torch.int64)
"""Dtypes that are summed unchanged: others are too narrow, and bools add as "or"."""


def sums(metrics: Any, whose: str) -> Sums:
    """Returns the ``metrics`` of a task with scalar tensors as totals. Raises TaskError."""

    def refuse(what: str) -> NoReturn:
        raise TaskError(
            f"{whose}: {what}; give a mapping from names to dsframe.Sum(total, count); dsframe computes the mean over all samples"
        )

    def scalar(number: Any, what: str) -> Tensor:
        try:
            value = number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            refuse(f"{what} that is {type(number).__name__}")
        if value.numel() != 1:
            refuse(f"{what} of shape {list(value.shape)}")
        return value.reshape(()) if value.dtype in _SUMMED else value.reshape(()).double()

    if not isinstance(metrics, Mapping):
        refuse(f"{type(metrics).__name__} is not a mapping")
    scalars: dict[str, Sum] = {}
    for name, value in metrics.items():
        if not isinstance(value, Sum):
            refuse(f"{name!r} is {type(value).__name__}")
        count = scalar(value.count, f"{name!r} has a count")
        scalars[str(name)] = Sum(
            scalar(value.total, f"{name!r} has a total"), count if isinstance(value.count, Tensor) else value.count
        )
    return scalars


def accuracy(logits: Tensor, targets: Tensor) -> Sum:
    """Counts ``targets`` (int64, any shape) with the largest of ``logits`` (targets' shape, then classes)."""
    right = (logits.argmax(-1) == targets).sum(dtype=torch.float32)
    return Sum(right, targets.numel())
