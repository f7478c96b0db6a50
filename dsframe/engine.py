"""The contract that every engine meets: one optimizer step.

Forward, backward and step as separate calls would be too small a seam: DeepSpeed's pipeline owns all three and takes its own
micro-batches. At the seam of one optimizer update every engine does the same thing, and the trainer knows none of them.

Two rules make engines interchangeable. Every method is collective: all ranks call it, in the same order, the same number of
times. And nothing waits for the device unless it says so: a loss stays a tensor until somebody reads it.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from dsframe.cluster.exchange import all_gather_text, by_value, failures, first_difference
from dsframe.cluster.process_group import collective_limit
from dsframe.errors import DsframeError, EngineError, TaskError, WorldError
from dsframe.host.memory import give_back, keep_freed
from dsframe.model import adapter as adapters
from dsframe.model import formats, groups, loss_head, output_classes, switches, sync_batch_norm
from dsframe.model.adapter import Adapter
from dsframe.model.followers import EarlyStop, Plateau
from dsframe.model.groups import ParameterGroups
from dsframe.model.sample_draws import DrawTrial, SampleDraws
from dsframe.model.spill import Spill
from dsframe.model.state import EngineState, SavedState, aliases
from dsframe.model.weight_watch import WeightWatch, refuse_unusual
from dsframe.tasks.layers import seed_generators
from dsframe.tasks.task import Sum, Task, loss_and_terms, sums, tensor_of

if TYPE_CHECKING:
    from dsframe.cluster.world import World
    from dsframe.config import Batch, Config
    from dsframe.model.optimizers import OptimizerSpec
    from dsframe.model.schedules import Schedule

ON_RANKS = "so the training depends on the number of processes"
LARGE = 1 << 24
"""Elements. Of a larger model that is sharded, freed memory goes back to the system, which smaller ones keep for their speed."""

Inputs = Any
"""Inputs of the model: a tensor, a tuple (positional arguments) or a dict (keyword arguments)."""
Measure = Callable[[Any, Any], Mapping[str, Sum]]
"""Makes sums of the outputs and the targets of an evaluation batch."""


@dataclass(frozen=True)
class Plan:
    """Everything an engine needs to set itself up, decided before it exists."""

    config: Config
    world: World
    task: Task
    optimizer: OptimizerSpec
    schedule: Schedule
    batch: Batch
    device: torch.device
    verbose: bool = False
    """Let the library say all it wants to say."""
    directory: Path = Path()
    """Directory of the run's results."""
    stop: EarlyStop | None = None
    """Ends the training early, where the file asks for it."""
    part: str = ""
    """Name of the model that this engine holds, where a task has several and each has an engine."""
    frozen: bool = False
    """Nothing trains it."""

    @property
    def followers(self) -> Mapping[str, Plateau | EarlyStop]:
        """Returns what evaluations decide, by the key under which a checkpoint's manifest has the state."""
        found = {"schedule": self.schedule if isinstance(self.schedule, Plateau) else None, "stop": self.stop}
        return {key: follower for key, follower in found.items() if follower is not None}

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.settings.seed

    @property
    def collective_limit(self) -> timedelta:
        """Returns how long a collective may wait for other ranks."""
        return collective_limit(self.config.settings.hang_timeout_seconds)

    @property
    def data_rank(self) -> int:
        """Which share of each global batch is this rank's: 0 to data_parallel_size - 1. Ranks that split one model share it."""
        return self.batch.data_rank(self.world.rank)


@dataclass(frozen=True)
class StepResult:
    """One optimizer update, as this rank saw it."""

    loss: Tensor
    """0-d float32 on the device, float64 where the model is: mean over this rank's micro-batches. Reading it waits for the
    device."""
    learning_rate: float
    """The rate this update was made with."""
    gradient_norm: Tensor | float | None = None
    """Global L2 norm before clipping; None where the engine does not compute one."""
    skipped: bool = False
    """True if the update was left out because gradients were not finite: under fp16 loss scaling, on engines that always look
    (DeepSpeed from stage 1 on), and where the file says "on_nonfinite": "skip". The same on every rank."""


class Engine(ABC):
    """How one process takes part in training. The constructor sets everything up and is collective too."""

    plan: Plan
    keeps_float64: ClassVar[bool] = False
    """True if a model in float64 trains in float64; else it is refused."""
    dtype: torch.dtype = torch.float32
    """What the parameters' masters are in: float32, or float64 where the model is."""
    sample_draws: SampleDraws | None = None
    """Gives the model's random numbers to samples where the file asks for it; the loop tells it which ones come next."""
    draws: DrawTrial | None = None
    """Knows after the first step whether the model draws random numbers in training."""
    groups = ParameterGroups()
    """Which parameters are trained otherwise than the optimizer says."""
    adapter: Adapter | None = None
    """What trains beside a frozen base, where the file asks for it."""
    sizes: tuple[int, int] | None = None
    """Numbers of trained parameters and of all; None where no rank has seen the whole model."""
    scores: bool = False
    """True if the model computes its loss itself, a slice of tokens at a time: then it is given targets beside the inputs."""
    built: str = ""
    """Where a large model was made before it was sharded; printed at start."""
    watch: WeightWatch | None = None
    """Sees weights that are read or written elsewhere; None for parts of a model."""
    trains_in_place: bool = True
    """True if what the optimizer updates are the model's own parameters; False where it has masters or shards."""
    calls: Any = None
    """Knows which modules this rank has called, where all ranks have to call the same (``engines.call_order``)."""
    record: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """What a checkpoint's manifest has to tell beside the file: by its sections (``checkpoint.changes.about``)."""
    depends: tuple[str, ...] = ()
    """Dependencies of the result that the file does not show, such as the micro-batch size; printed at start."""

    @property
    def data_rank(self) -> int:
        """Which share of each global batch is this rank's: 0 to data_size - 1."""
        return self.plan.data_rank

    @property
    def data_size(self) -> int:
        """Number of shares."""
        return self.plan.batch.data_parallel_size

    @abstractmethod
    def __init__(self, plan: Plan) -> None:
        """**Collective.** Sets everything up. Raises EngineError where the engine cannot do what the file asks for."""

    @abstractmethod
    def train_step(self, micro_batches: Iterator[tuple[Inputs, Any]]) -> StepResult:
        """**Collective.** One optimizer update from ``batch.accumulation_steps`` micro-batches of (inputs, targets)."""

    @abstractmethod
    def eval_step(self, batch: tuple[Inputs, Any], measure: Measure | None) -> Mapping[str, Sum]:
        """**Collective.** Returns ``measure(outputs, targets)`` of ``batch``, with the model in evaluation mode.

        ``measure`` is None on a rank that ran out of samples: the model still runs where others wait for its shards, and the
        mapping is empty. Of the ranks that split one model, one measures and the others return an empty mapping; of those that
        share sequences, each measures its slice: sums over all ranks count every sample once.
        """

    def evaluating(self, batches: int) -> AbstractContextManager[None]:
        """**Collective.** Encloses so many calls of :meth:`eval_step`: what ranks gather may stay from one batch to the next."""
        return nullcontext()

    @abstractmethod
    def buffers(self) -> Mapping[str, Tensor]:
        """The persistent buffers that this rank holds, by name, BatchNorm's statistics among them: the tensors themselves."""

    def own_targets(self, targets: Any) -> Any:
        """Returns the part of a micro-batch's ``targets`` whose loss this rank computes: all of them, or its slice of sequences."""
        return targets

    def joined(self, inputs: Inputs, targets: Any) -> Inputs:
        """Returns what the model is called with: the ``inputs``, and the ``targets`` where it computes its loss itself."""
        if not self.scores:
            return inputs
        return Targeted(inputs, targets.targets if isinstance(targets, Weighted) else targets)

    def outputs(self, inputs: Inputs, module: nn.Module | None = None) -> Any:
        """**Collective.** In the middle of a step: the outputs of ``module``, which is a part of the running model, or those of the
        model while another engine trains, with gradients to the inputs. For engines with ``Entry.several``."""
        raise EngineError(f"{self.description} trains one model; choose another engine for several")

    def rest(self) -> None:  # noqa: B027 - most leave nothing
        """**Collective.** After a step of another engine that has asked for :meth:`outputs`: gives up what they have left."""

    def average(self, decay: float) -> None:
        """Moves the average of the weights towards them (:func:`dsframe.model.ema.update`); for engines with feature "ema"."""
        raise EngineError(f'{self.description} keeps no average of the weights; remove "ema"')

    def averaged(self) -> AbstractContextManager[None]:
        """**Collective.** The model has the averages instead of its weights inside, where there are any."""
        raise EngineError(f'{self.description} keeps no average of the weights; remove "ema"')

    @abstractmethod
    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """**Collective.** Element-wise sum of ``values`` (float64, any one shape) over the ranks of the world."""

    @abstractmethod
    def state(self) -> EngineState:
        """**Collective** to read to its end: where training stands, each parameter by name, in full shape and fp32.

        Nothing is copied that is whole on this rank already; what is not is gathered one parameter at a time, so beyond
        the engine's own memory it takes one parameter and its moments. Where ranks hold flat ranges of parameters, ``parameters``
        is a ``ShardedParameters``, which is saved without gathering. Take no training step while reading.
        """

    @abstractmethod
    def load_state(self, saved: SavedState) -> None:
        """**Collective.** Goes on from ``saved``, which is the same on every rank and may come from any engine.

        Replaces weights, the optimizer's state, buffers, the number of updates and the loss scale. Each rank reads what it
        holds, one parameter at a time: ``saved.part`` reads a range alone. Raises CheckpointError where the models differ.
        """

    @property
    @abstractmethod
    def description(self) -> str:
        """Returns the name of what runs, in a few words for the first line of a run: ``DeepSpeed ZeRO-3 + CPU offload``."""

    @abstractmethod
    def close(self) -> None:
        """**Collective.** Leaves the process group. Nothing else may be called afterwards."""


class Targeted(NamedTuple):
    """Inputs of a model that computes its loss itself (``Engine.scores``), and the targets for it."""

    inputs: Inputs
    targets: Any


def outputs_of(model: nn.Module, inputs: Inputs, watch: WeightWatch | None) -> Any:
    """``call``, under the watch over weights; objects of the model's own classes can be cut and cast from then on."""
    with nullcontext() if watch is None else watch.inside():
        outputs = call(model, inputs)
    output_classes.register(outputs)
    return outputs


def call(model: nn.Module, inputs: Inputs) -> Any:
    """``model`` applied to ``inputs``: a dict as keyword arguments, a tuple or list as positional ones, else one argument."""
    if isinstance(inputs, Targeted):
        told, inputs = {loss_head.TARGETS: inputs.targets}, inputs.inputs
        if isinstance(inputs, Mapping):
            return model(**inputs, **told)
        return model(*inputs, **told) if isinstance(inputs, (tuple, list)) else model(inputs, **told)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


@dataclass(frozen=True)
class Weighted:
    """Targets with a weight for this micro-batch's loss."""

    targets: Any
    factor: Tensor | float
    """How often it counts: one number for all, or a 0-d float32 on the device, which may be 0 and is 1 on average."""
    look: Callable[[Any, Any], None] | None = None
    """Is given the outputs and the targets before the backward pass."""


def loss_of(task: Task, outputs: Any, targets: Any, watch: WeightWatch | None = None) -> Tensor:
    """The task's loss of a micro-batch, times its weight where ``targets`` are :class:`Weighted`; 0 where that is 0."""
    with nullcontext() if watch is None else watch.inside():
        loss = _loss_of(task, outputs, targets)
    if watch is not None:
        watch.computed(loss)
    return loss


def _loss_of(task: Task, outputs: Any, targets: Any) -> Tensor:
    if not isinstance(targets, Weighted):
        return _checked(task, task.loss(outputs, targets))
    if targets.look:
        targets.look(outputs, targets.targets)
    if not isinstance(targets.factor, Tensor):
        loss = _checked(task, task.loss(outputs, targets.targets))
        return loss if targets.factor == 1.0 else loss * targets.factor
    counts = targets.factor > 0

    def kept(value: Tensor) -> Tensor:
        return torch.where(counts, value, torch.zeros_like(value))

    for leaf in tree_leaves(outputs):  # a mean over nothing is NaN, and so are its gradients
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(kept)  # type: ignore[no-untyped-call]
    return kept(_checked(task, task.loss(outputs, targets.targets)) * targets.factor)


def _checked(task: Task, found: Any) -> Tensor:
    """The loss alone; what a task returned beside it is added to ``task.terms``. Raises TaskError for what is no loss."""
    whose = f"{type(task).__name__}.loss"
    loss, more = loss_and_terms(found)
    if more and torch.is_grad_enabled():
        new = {name: Sum(one.total.detach(), one.count) for name, one in sums(more, whose).items()}
        if "loss" in new:
            raise TaskError(f'{whose}: "loss" is the loss itself; give what is returned beside it another name')
        task.terms = {
            **task.terms,
            **{name: task.terms[name] + one if name in task.terms else one for name, one in new.items()},
        }
    loss = tensor_of(loss, whose)
    if loss.numel() != 1:
        raise TaskError(f"{whose}: returned a tensor of shape {list(loss.shape)}, not a scalar; return its mean")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise TaskError(
            f"{whose}: returned a tensor without a gradient, so nothing would be trained; compute it from the outputs, "
            "without .item(), .detach() or torch.no_grad()"
        )
    return loss


def without_dimensions(model: nn.Module) -> str:
    """The names of the parameters without dimensions, which not every engine can hold; empty where all have some."""
    return ", ".join(name for name, parameter in model.named_parameters() if parameter.ndim == 0)


def without_elements(model: nn.Module) -> str:
    """The names of the parameters without elements, which no library shards; empty where all have some."""
    return ", ".join(name for name, parameter in model.named_parameters() if not parameter.numel())


def dependences(task: Task, model: nn.Module, *, per_sample: bool = False, synced: bool = False) -> tuple[str, ...]:
    """Returns what the result depends on beside the file, as far as the task and ``model`` (in training mode) show it.

    ``per_sample``: whether random numbers belong to samples. ``synced``: whether BatchNorm uses the samples of all ranks.
    """
    training = [module for module in model.modules() if module.training]
    found = []
    if not synced and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in training):
        found.append("BatchNorm sees one micro-batch at a time, so the training depends on the micro batch size")
    elif not synced and task.batch_dependent:
        found.append("outputs depend on the rest of a micro-batch, so the training depends on the micro batch size")
    drops = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in training)
    if drops and not per_sample:
        found.append(f"dropout draws other masks on each rank, {ON_RANKS}")
    sparse = ", ".join(name for name, buffer in model.named_buffers() if buffer.layout != torch.strided)
    if sparse:
        found.append(f"sparse buffer {sparse} is not kept in checkpoints: model() makes it anew at each start")
    return tuple(found)


def assert_same_model(engine: Engine, *models: nn.Module) -> None:
    """**Collective.** Raises TaskError, on every rank, where ``models`` are not made alike: names, order, shapes, dtypes, what is
    trained. Before a library sees them: engines match parameters by their place, and fail inside or mix them up.
    """
    told = first_difference(engine, [entry for model in models for entry in _entries(model)])
    if told:
        first = by_value([text or "nothing more" for text in told])
        raise TaskError(
            f"{type(engine.plan.task).__name__}: the model differs between ranks. The first difference: {first}. Every rank must "
            "build the same model: if your code iterates over a set, sort it first (a set has another order in each process), and "
            "let nothing depend on the rank or the host"
        )


def _entries(model: nn.Module) -> Iterator[str]:
    further = aliases(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in further:
            yield f"parameter {name}, which is {further[name]}"
        else:
            yield f"parameter {name} {_form(parameter)}{'' if parameter.requires_grad else ' frozen'}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name} {_form(buffer)}"


def _form(tensor: Tensor) -> str:
    return f"{'' if is_lazy(tensor) else f'{list(tensor.shape)} '}{str(tensor.dtype).removeprefix('torch.')}"


def build_model(engine: Engine, spill: Spill | None = None) -> nn.Module:
    """**Collective.** The task's model, the same on every rank and engine; ``engine.depends`` and ``engine.groups`` are set.

    Raises TaskError where it is not the same on every rank, and on every rank what one of them could not build it for; the
    engine can sum over ranks already.

    Built on the CPU and then moved to the plan's device, so that initial weights depend on neither the engine nor the kind of
    device: CUDA's generator gives other numbers on other GPUs. (A task's layers have a seed each.)

    Args:
        engine: Whose plan says what to build.
        spill: Where large parameters lie instead of in memory. The model stays on the CPU then: the engine shards it from there.
    """
    plan = engine.plan
    model, peft = _build_on_cpu(engine, spill)
    refuse_unusual(model, type(plan.task).__name__)
    formats.integers_as_buffers(model)
    engine.sizes = _sizes(model)
    plan.task.ranks = weakref.proxy(engine)
    engine.dtype = formats.own_dtype(plan.config, plan.task, model, keeps_float64=engine.keeps_float64)
    engine.groups = groups.settle(plan.config, plan.task, model)
    if peft:
        share, touched = (plan.world.rank, plan.world.size), (lambda size: None) if spill is None else spill.touched
        engine.adapter = adapters.settle(
            plan.config, model, peft, share, lambda text: all_gather_text(engine, text), touched
        )
        adapters.quantise(plan.config, model, formats.parameter_dtype(plan.config))
    _settle(engine, model, spill)
    # As every training loop begins, and as evaluation leaves it: a model that was loaded comes in evaluation mode.
    model.train()
    per_sample = plan.config.settings.per_sample_randomness
    synced = plan.config.settings.model.sync_batch_norm
    if synced:
        sync_batch_norm.share_statistics(model, weakref.proxy(engine))
    engine.depends = dependences(plan.task, model, per_sample=per_sample, synced=synced)
    if plan.task.over_micro_batches and plan.batch.accumulation_steps > 1:
        what = plan.task.over_micro_batches
        engine.depends += (f"{what} is over a micro-batch, so the training depends on gradient_accumulation_steps",)
    # A task may give the same module again, with gradients of a training before or of a step that lost a process.
    for parameter in model.parameters():
        parameter.grad = None
    switches.apply(model, plan.config, plan.device)
    engine.scores = loss_head.settle(plan.config, plan.task, model)
    engine.draws = DrawTrial(model, plan.device)
    engine.watch = None if plan.part else WeightWatch(engine, model)
    if per_sample:
        engine.sample_draws = SampleDraws(model, plan.seed, plan.batch.micro_batch_size, plan.device)
    # Dropout differs between ranks that see different samples, as it must.
    torch.manual_seed(plan.seed + 1 + plan.data_rank)
    return model


def _build_on_cpu(engine: Engine, spill: Spill | None) -> tuple[nn.Module, str]:
    """**Collective.** Builds the task's model on the CPU, with the file's adapter in it; returns also peft's settings, or ""."""
    plan = engine.plan
    seed_generators(plan.seed)
    if spill is not None and plan.device.type == "cpu":
        give_back()
    model, peft, failed = None, "", None
    try:
        with torch.device("cpu"), nullcontext() if spill is None else spill.building():
            model = plan.task.model()
            peft = adapters.add(plan.config, model)
    except DsframeError as error:
        failed = error
    told = failures(engine, str(failed or ""))
    if failed is not None:
        raise failed
    if model is None or told:
        raise WorldError(f"the model could not be built: {'; '.join(told)}")
    assert_same_model(engine, model)
    return model, peft


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Returns the numbers of trained parameters and of all."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)


def _settle(engine: Engine, model: nn.Module, spill: Spill | None) -> None:
    """Moves the model to the device; where there is ``spill``, what did not pass through it into files."""
    plan = engine.plan
    if spill is None:
        dtype = formats.parameter_dtype(plan.config)
        for parameter in model.parameters():  # rounded first: the device never holds all of it in fp32
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype if dtype.itemsize < 4 else parameter.dtype)
                parameter.data = parameter.data.to(plan.device)
        model.to(plan.device)  # its buffers, and weights in 4 bits with their scales
    else:
        large = sum(parameter.numel() for parameter in model.parameters()) > LARGE
        engine.built = spill.description if large else ""
        if plan.device.type == "cpu" and not large:
            keep_freed()
        for parameter in model.parameters():  # what a constructor put there without registering it, such as deep copies
            spill.add(parameter)
        spill.evict()
