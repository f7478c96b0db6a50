"""What a user supplies: a model, a loss and data. Subclass :class:`Task`; everything else has a default.

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

It is named in the file as ``"task": {"name": "my_package.my_module:Digits"}``.
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
"""Attention of queries, keys and values, ``[rows, time, heads, head size]`` each; the result has the shape of the queries."""


@dataclass(frozen=True)
class Sum:
    """A total and the number of things it was summed over.

    Means over ranks and batches are exact because totals and counts are added up first and divided last.
    """

    total: Tensor
    """Floating-point scalar, on the model's device. Of metrics, a plain number will do."""
    count: int | Tensor
    """Number of samples, tokens, ... in the total."""

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """``total / count``. Waits for the device. Not a number when nothing was counted."""
        count = float(self.count)
        return float(self.total.detach()) / count if count else float("nan")


Sums = Mapping[str, Sum]
"""Sums by the name of a metric."""


@dataclass
class TaskContext:
    """What a task can ask of the run that trains it."""

    dtype: torch.dtype = torch.float32
    """Number format of the weights in training: those read from files need not be wider."""
    rank: int = 0
    world_size: int = 1
    step: int = 0
    """The optimizer step that is being made, counted from 1; 0 before the first."""
    evaluating: bool = False
    """True during an evaluation, and while the first loss is looked at: each rank judges its own rows then."""
    local_rows: bool = False
    """True where :meth:`Task.all_rows` has given an evaluation the rows of one batch of this rank."""
    eval_set: str = ""
    """The set of ``eval_data`` that is evaluated, if that names several."""
    eval_samples: int = 0
    """Samples in the batch that ``metrics`` is given: as many as ``collate`` was given."""
    ranks: Ranks | None = None
    """Sums over ranks, from when the model is built."""

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Encloses an evaluation."""
        before, self.evaluating = self.evaluating, True
        try:
            yield
        finally:
            self.evaluating = before


class Task:
    """A model, how it is judged, and data. A batch is ``(inputs, targets)``; both may be any nesting of tensors.

    Everything must be the same on every rank: the same model, the same data sets in the same order. dsframe seeds the
    random generators before it asks for the model and shares the samples among the ranks itself.
    """

    seed: int = 0
    """The run's seed, set before anything else is asked of the task."""
    context = TaskContext()
    """The run, set before :meth:`model` is called."""
    unit: str = "samples"
    """Unit of rates: ``samples``, ``tokens``, ..."""
    units_per_sample: int = 1
    """Number of units in one sample: the context length for a language model."""
    workers: int = 0
    """Processes that read a torch ``Dataset``. A ``Source`` in memory is read in place, whatever this says."""
    collate: Any = None
    """Makes a batch of a list of rows of a torch ``Dataset``: ``(inputs, targets)``, or a dict with ``labels``. A method
    ``collate(self, rows)``, :class:`dsframe.data.Pad`, or a collator of transformers; it runs where the rows are read. None: rows
    are pairs, or dicts with ``labels``, of one size. Numbers that it draws belong to the micro-batch, not to a sample."""
    eval_collate: Any = None
    """The same for evaluations and predictions, where :attr:`collate` is for training alone, as mixup is. None: :attr:`collate`."""
    eval_gradients: bool = False
    """True if :meth:`metrics` or :meth:`loss` takes derivatives of the outputs, as for a differential equation: evaluations then
    keep the graph of a batch. Refused in a pipeline."""
    whole_weights: bool | None = None
    """True: where ranks hold shards (ZeRO-3, FSDP), all weights are gathered for each whole step, and may be used anywhere. None:
    they are for models and losses whose code takes derivatives (``torch.autograd.grad``, ``torch.func``). False: they never are,
    for such code that is there and does not run."""
    data_dir: str | None = None
    """Folder that :meth:`prepare` writes to. None: $DSFRAME_DATA, else ~/.cache/dsframe/data."""
    class_names: Sequence[str] = ()
    """Names of the classes by number, where the data have names. A checkpoint of others is refused."""
    prepared_as: str = ""
    """Name of what :meth:`prepare` makes, where tasks of one class prepare different things: those do not wait for each other."""
    batch_dependent: bool = False
    """True when a sample's output depends on the rest of its micro-batch. (BatchNorm in training is found without it.)

    Then the result depends on the micro-batch size and so on the number of ranks: dsframe says so before training."""
    over_micro_batches: str = ""
    """What of the loss is over one micro-batch of all ranks, such as a mixture's balance: the result depends on
    ``gradient_accumulation_steps`` then, and dsframe says so where there are several."""
    loss_is: str = "mean"
    """What :meth:`loss` gives: the ``"mean"`` over the samples of a micro-batch, or their ``"sum"``.

    Of a sum, a step takes the sum over the global batch, on any number of ranks. The first step looks whether it is so."""
    metric_objects: Mapping[str, Any] = MappingProxyType({})
    """torchmetrics objects by name, such as ``{"auroc": AUROC(task="binary")}``, in evaluations beside :meth:`metrics`.

    They see each sample once, on any number of ranks: their states are gathered. Set them in ``__init__``."""
    after_step_elementwise: bool = False
    """True if :meth:`after_step` treats each number of a weight by itself, as ``clamp_`` does: where
    ranks hold shards, nothing is gathered, and each call gets a rank's part of the weight, flat."""
    gathers_rows: bool = False
    """True when :meth:`all_rows` has been called."""
    hooks: Sequence[Hooks] = ()
    """Called beside those that the file names: objects of :class:`dsframe.Hooks`."""
    hidden_size: int | None = None
    """Width of the model, from which the ``"auto"`` sizes of ``zero_optimization`` follow."""

    partition_config: Mapping[str, Any] | None = None
    """Which layers tensor parallelism cuts and how, in the form of DeepSpeed's ``tensor_parallel.partition_config``.

    Taken where the file gives none. A model that is cut must not ask a weight for the number of its heads or for its width:
    each rank has a share (``view(batch, time, -1, head_size)``)."""

    @staticmethod
    def from_module(
        model: Callable[[], nn.Module], loss: Callable[[Any, Any], Any], train_data: Any, eval_data: Any = None
    ) -> Task:
        """A task of parts: ``dsframe.fit(dsframe.Task.from_module(Net, nn.CrossEntropyLoss(), data), "zero3.json")``.

        ``model``: a class or function without arguments that makes the model, so that its weights come from the file's seed.
        ``loss(outputs, targets)``: the mean over the samples. Raises TaskError for a module that is made already.
        """
        if isinstance(model, nn.Module):
            raise TaskError(
                f"from_module: {type(model).__name__} is made already, from other random numbers on each run; give what makes it: "
                f"{type(model).__name__}, or lambda: {type(model).__name__}(...)"
            )
        return _OfParts(model, loss, train_data, eval_data)

    def model(self) -> nn.Module:
        """A new model, initialised from torch's global random generator, such that ``outputs = model(inputs)``.

        Inputs that are a dict reach it as ``model(**inputs)``, a tuple or list as ``model(*inputs)``.

        Training begins with ``model.train()``, and each evaluation ends with it. A part that is to stay as in evaluation, such as a
        frozen BatchNorm, overrides ``train()``.
        """
        layers = self.layers()
        if layers is not None:
            return assemble(layers, self.seed)
        if not self.models():
            raise TaskError(f"{type(self).__name__} must define model() or layers()")
        return nn.ModuleDict({name: self.model_of(name) for name in self.models() if name in self.losses()})

    def models(self) -> Mapping[str, Callable[[], nn.Module] | AverageOf]:
        """Returns several models in the place of :meth:`model`: for each name a function that makes it; by default none.

        Each is trained by an optimizer of its own, with the loss that :meth:`losses` has for it; one without a loss is frozen, as a
        teacher is, stays in evaluation mode, and is in no checkpoint: its function loads its weights at each start. Parameters are
        named ``NAME.rest``. What is evaluated, and asked for predictions, is the first one that is trained.

        A model may be the moving average of a trained one (:class:`dsframe.average_of`): in evaluation mode, with that one's
        buffers.
        """
        return {}

    def losses(self) -> Mapping[str, Callable[[Mapping[str, Callable[..., Any]], Any, Any], Any]]:
        """Returns the losses of a step, in their order, by the name of the model that each trains; needed with :meth:`models`.

        ``loss(models, inputs, targets)`` returns what :meth:`loss` may return, and calls the models by their names:
        ``models["generator"](inputs)``, with positional arguments or keywords. Gradients go through all of them, to the parameters
        of the trained one alone. Each loss sees all micro-batches of a step before the next one does, and the models before it in
        the order are updated by then.
        """
        return {}

    def model_of(self, name: str) -> nn.Module:
        """One of :meth:`models`, made anew. Its random numbers depend on :attr:`seed` and its place alone. Raises TaskError."""
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
            raise TaskError(f"{type(self).__name__}.models: {name!r} made {type(model).__name__}, which is no module")
        return model

    def layers(self) -> Sequence[Layer] | None:
        """The model as a list of layers, each of which takes what the one before gives; None where it is not one.

        Best as functions that make them, such as ``functools.partial(Block, width)``: each is then drawn from a seed of its
        own, and a pipeline stage builds only its own layers. With layers, :meth:`model` need not be written: it is an
        ``nn.Sequential`` of them. A weight that two layers share is a :class:`dsframe.Tied`.
        """
        return None

    def cut(self, model: nn.Module) -> Sequence[Layer] | None:
        """The modules that, one after the other, are ``model``, which comes from :meth:`model`; None where it is one piece.

        For models that are made whole: a pipeline stage then builds all of it and keeps its own part. Names stay the model's. A
        layer that computes with an earlier one's weight is a :class:`dsframe.Tied`.
        """
        plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        return list(cast(nn.Sequential, model)) if plain else None  # not children(): one may be there twice

    def share_sequences(
        self, model: nn.Module, part: int, parts: int, exchange: Callable[[Attention], Attention]
    ) -> None:
        """Makes ``model``, of :meth:`model`, compute slice ``part`` (from 0) of ``parts`` equal ones along time.

        Every tensor of a batch then has its slice in dimension 1, the loss has to be the mean over positions, or over as many as
        :meth:`loss_weight` says of a slice's targets, and metrics sums over them. Where positions look at each other the model
        takes ``exchange(attention)`` for an attention over all positions; ``parts`` has to divide the heads. Raises TaskError
        where it cannot be done, as for any model that does not say how.
        """
        raise TaskError(f"sequence_parallel_size: {type(self).__name__} has no share_sequences(), which it needs")

    def before_slicing(self, inputs: Any) -> Any:
        """Called with the whole inputs of each micro-batch before a rank takes its slice of them (:meth:`share_sequences`); returns
        them, with what a slice has to know of its place. By default they stay as they are."""
        return inputs

    def example(self) -> tuple[Any, Any] | None:
        """A batch of one sample, on any device, for ``dsframe plan``, which looks at nothing but shapes and dtypes.

        None: the first sample of :meth:`train_data` is looked at, which has to be there then.
        """
        return None

    def loss(self, outputs: Any, targets: Any) -> Any:
        """A scalar to minimise: the mean over the samples of the batch, or with :attr:`loss_is` ``"sum"`` their sum.

        To log more than it, such as its parts, return ``(loss, {"name": dsframe.Sum(total, count)})``: a log line has the mean of
        each over the global batch, and an evaluation over all its samples.

        A step takes the mean of the losses of all micro-batches of all ranks, each of the same number of samples. Where a loss is a
        mean over something whose number differs between micro-batches, such as tokens without padding
        (``cross_entropy(..., ignore_index=-100)``), :meth:`loss_weight` says over how much. Without it the gradients depend on
        the number of ranks and on accumulation.
        """
        raise TaskError(f"{type(self).__name__} must define loss(outputs, targets)")

    def all_rows(self, rows: Tensor) -> Tensor:
        """**Collective.** For a loss over the global batch: returns ``rows`` (outputs or targets) of all ranks, in rank order, with
        gradients such that the training is that of one process. In an evaluation (which says so) and on one process, ``rows``
        themselves.

        Call it in :meth:`loss`, the same times on every rank. The loss is then that of the step, a mean or a sum. Raises TaskError
        where a step has several micro-batches, with :attr:`loss_is` ``"sum"``, which is for the rows of one rank, and with a
        pipeline, tensor or sequence parallelism.
        """
        self.gathers_rows = True
        if self.loss_is == "sum":
            raise TaskError(f'{type(self).__name__}: all_rows() has the rows of all ranks; leave out loss_is = "sum"')
        self.context.local_rows |= self.context.evaluating
        if self.context.ranks is None or self.context.evaluating:
            return rows
        return all_rows(self.context.ranks, rows)

    def after_step(self, name: str, weight: Tensor) -> None:
        """Called after each update for each trained weight, without gradients; what it writes to
        ``weight`` is kept, on every engine: ``weight.clamp_(-0.01, 0.01)``.

        ``name``: as in ``model.named_parameters()``. ``weight``: whole, in float32 where the model is
        in 16 bits. It must write the same on every rank. Where ranks hold shards (ZeRO 1 to 3, FSDP)
        each weight is gathered in turn, unless :attr:`after_step_elementwise`.
        """

    def loss_weight(self, targets: Any) -> Tensor | float:
        """Returns how many items the loss of a micro-batch is a mean over: ``(targets != -100).sum()`` for tokens without padding.

        A step's loss is then the mean over all items of all its micro-batches on all ranks. By default every micro-batch counts the
        same, as their samples are equally many; an override costs one small collective a step, and a step's micro-batches are
        read at once.
        """
        return len(tree_leaves(targets)[0])

    def metrics(self, outputs: Any, targets: Any) -> Sums:
        """Returns what evaluation reports of a batch, by name, as sums and counts; by default :meth:`validation_loss`, which an
        evaluation reports also where an override leaves it out.

        Outputs and targets are those of a whole batch as ``collate`` made it; the last batches have fewer samples. Gradients are
        off: a model that takes derivatives does so inside of ``torch.enable_grad()``.
        """
        return self.validation_loss(outputs, targets)

    def validation_loss(self, outputs: Any, targets: Any) -> Sums:
        """The loss, a mean over samples also where it is a sum, and what :meth:`loss` returns beside it. Without an own
        :meth:`loss_weight` it is over as many items as outputs and targets have rows, where these are as many, else samples."""
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
        """**Collective.** For tasks with several :meth:`models`: more metrics of a batch, from outputs of any of them, such as how
        often a policy prefers another answer than its reference. ``models`` are called as in :meth:`losses`, here in evaluation
        mode and without gradients, on every rank the same times. By default there are none."""
        return {}

    def update_metric(self, metric: Any, outputs: Any, targets: Any) -> None:
        """Gives one of :attr:`metric_objects` a batch, as :meth:`metrics` gets it: ``metric.update(outputs, targets)``."""
        metric.update(outputs, targets)

    def keep(self, outputs: Any, targets: Any) -> Any:
        """Returns what :meth:`metrics_of_all` is given of a batch: any nesting of tensors, numbers and texts."""
        return outputs, targets

    def metrics_of_all(self, batches: list[Any]) -> Mapping[str, float]:
        """Returns metrics that are no means, such as mAP, BLEU or an area under a curve, by a function of all ``batches``: what
        :meth:`keep` returned of each, in the order of the samples, on the CPU.

        Called on rank 0, on any number of ranks; how many samples a batch has depends on that number. Rank 0 has all of it in
        memory, and every other rank its own part until the end of the evaluation: keep little. By default there are none.
        """
        return {}

    def finalize(self, sums: Sums) -> Mapping[str, float]:
        """Returns what an evaluation reports, of the ``sums`` of :meth:`metrics` over all samples. By default each one's mean.

        For what is no mean itself but follows from some: perplexity is ``exp(sums["loss"].mean)``, F1 comes of three counts. Each
        sample is in the sums once, so the result does not depend on the number of ranks. Called on every rank, with the same sums:
        float64, on the CPU.
        """
        return {name: value.mean for name, value in sums.items()}

    def order(self, epoch: int, samples: int) -> Tensor | None:
        """Returns the order of the training samples in ``epoch`` (from 0): int64 ``[samples]``; None: as the file says.

        A function of :attr:`seed` and its arguments alone: the same on every rank and after a restart. An index may come more than
        once.
        """
        return None

    def schedule(self, updates: int) -> float | None:
        """Returns the factor of the optimizer's rate for the next update, after ``updates`` have been applied; None: none.

        A function of its argument alone, so that a run that goes on has the same rates. In place of the file's ``scheduler``.
        """
        return None

    def weight_decay(self, updates: int) -> float | None:
        """Returns the weight decay of the next update, after ``updates`` have been applied; None: the file's.

        For all parameters that the file gives a weight decay: not for those of a group without one. A function of its argument
        alone, as :meth:`schedule`.
        """
        return None

    def parameter_groups(self, model: nn.Module) -> Sequence[Mapping[str, Any]]:
        """Returns groups of parameters with a weight decay or a rate of their own, or frozen; by default none.

        Dicts as in the file's ``parameter_groups``, in place of those: ``{"match": [names or patterns], "weight_decay": 0}``.
        ``model``: of :meth:`model`, for names, shapes and classes; in a pipeline it may have no numbers. A function of its argument
        alone: the same on every rank.
        """
        return ()

    def optimizer(self, groups: list[Any], **params: Any) -> torch.optim.Optimizer:
        """The optimizer, where the file says ``"optimizer": {"type": "task", "params": {"lr": 1e-3}}``.

        ``groups``: tensors, or dicts of them, as torch's optimizers take them: parameters, their fp32 masters, or at ZeRO-1 to 3
        flat shards of many, for which the update of each number must not depend on others. It has to get all. ``params``: the
        file's; ``lr`` is set before each update, in proportion where groups have rates of their own. Its state goes into
        checkpoints: tensors of a parameter's shape, and numbers.
        """
        raise TaskError(f"{type(self).__name__} must define optimizer(groups, **params)")

    def prepare(self, say: Say) -> None:
        """Downloads, unpacks, tokenises: once, by one process of each host, before any process asks for data. By default nothing.

        Hosts that share :attr:`data_dir` take turns. The other ranks wait, however long it takes.
        ``say("3 of 10 files")`` prints a line. When it raises, or its process ends, all ranks end with that message. It may be
        killed at any time: write under another name, and rename what is complete. Called at every start: look what is there.
        """

    @property
    def prepares(self) -> bool:
        """True if :meth:`prepare` has something to do: ranks then meet before they read."""
        return gives(self, "prepare")

    def train_data(self) -> Source | Dataset[Any]:
        """Training data: a :class:`dsframe.data.Source`, or a map-style torch ``Dataset`` of ``(input, target)`` pairs or of dicts
        with ``labels``, as the package ``datasets`` has them; with :attr:`collate` of any rows. Or an
        ``IterableDataset``.

        Called on every rank at once: it may read files but must not write where another rank reads; :meth:`prepare` may. The
        generators of torch, NumPy and ``random`` are seeded from the file's seed before, and again before :meth:`eval_data`.
        """
        raise TaskError(f"{type(self).__name__} must define train_data()")

    def pretrained(self) -> Mapping[str, Any] | None:
        """Returns what transformers needs to know of the model, for ``dsframe export --to huggingface``; None if it is not theirs.

        ``config``: its configuration as JSON text, with ``model_type`` and ``architectures``; ``tokenizer``: a local folder or
        None; ``tokenizer_sha256``: a digest of the tokenizer's files or "". Every checkpoint's manifest keeps it.
        """
        return None

    def eval_data(self) -> Source | Dataset[Any] | Mapping[str, Any] | None:
        """Held-out data of the same kind, or None: no evaluation. A dict has several sets by name: their metrics are called
        ``val/loss``, ``clean/accuracy``."""
        return None

    def predict_data(self) -> Source | Dataset[Any] | Mapping[str, Any] | None:
        """Data for ``dsframe predict``, of the same kind; by default :meth:`eval_data`. Targets may be anything, one each. There
        may be none: a row is then a tensor, a tuple of one or a dict without labels, and :meth:`predictions` gets zeros."""
        return self.eval_data()

    def predictions(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        """Returns what ``dsframe predict`` writes of a batch: by name a tensor with a row for each sample, a list with an entry
        for each, or any nesting of these in dicts, tuples and objects.

        By default the outputs: under ``output``, or by their own names where they are a mapping.
        """
        return outputs if isinstance(outputs, Mapping) else {"output": outputs}


class _OfParts(Task):
    """What :meth:`Task.from_module` was given."""

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
    """True of a method that the task has of its own, in its class or in an attribute."""
    return name in vars(task) or getattr(type(task), name) is not getattr(Task, name)


def _items(outputs: Any, targets: Any, samples: int) -> int:
    """Returns over how many items a loss is a mean, by the form of a batch of ``samples``: the rows
    that all targets and an output have, where a ``collate`` makes another number of rows than it
    gets; else the samples."""
    rows, given = ({len(leaf) for leaf in tensors_of(part) if leaf.ndim} for part in (targets, outputs))
    by_sample = isinstance(outputs, list) and len(outputs) == samples
    return samples if samples and (by_sample or len(rows) != 1 or not rows <= given) else next(iter(rows), 1)


def loss_and_terms(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the two parts of what a task's loss gave: the loss, and what else is to be logged."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned
    return returned, {}


def tensor_of(loss: Any, whose: str) -> Tensor:
    """Returns what a task's loss gave, a tensor of one number. Raises TaskError where it is none."""
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
"""What is added as it is: others are too narrow, and bools add as "or"."""


def sums(metrics: Any, whose: str) -> Sums:
    """``metrics``, which a task's metrics have given, with totals that are scalar tensors. Raises TaskError."""

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
        refuse(f"{type(metrics).__name__} is no mapping")
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
    """Returns how many of ``targets`` (int64, any shape) have the largest of ``logits`` (targets' shape and classes last)."""
    right = (logits.argmax(-1) == targets).sum(dtype=torch.float32)
    return Sum(right, targets.numel())
