"""Partitions a model into pipeline stages, and names their state.

A task's ``layers()`` are built one by one, each stage only its own. A whole model (an ``nn.Sequential``, or one that
the task can cut) is built on every stage, and all layers except the stage's own are dropped.

Source: deepspeed 0.19.8, ``runtime/pipe/module.py`` (PipelineModule).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.engines.deepspeed import layer_chain, patches
from dsframe.engines.deepspeed.imports import (
    PipelineModule,
    PipeModelDataParallelTopology,
    TiedLayerSpec,
    partition_balanced,
    partition_uniform,
)
from dsframe.engines.deepspeed.missing_parts import MissingParts
from dsframe.errors import EngineError, TaskError
from dsframe.host import generators
from dsframe.model import batch_norm, formats, gradient_hooks, groups, max_norm, switches
from dsframe.model.build import attributes, dependences, described
from dsframe.model.parts import parts_of
from dsframe.model.persistent import aliases
from dsframe.model.plan import Plan
from dsframe.model.spill import on_disk
from dsframe.tasks.layers import Layer, Tied, TiedLayer, check_ties, make, ready, tied_weight
from dsframe.values import elements, tensors_of, trainable

Loss = Callable[[Any, Any], Tensor]


class Cut:
    """A model as a list of layers, and the layers at which its stages begin."""

    def __init__(self, plan: Plan) -> None:
        """Partitions the plan's model; the same on every rank, without communication.

        Raises TaskError if the model is not made of layers, EngineError if these stages are impossible or a parameter
        has no dimensions.
        """
        self._plan = plan
        self._whole: nn.Module | None = None
        self._trial: layer_chain.Trial | None = None
        # On the CPU, as every engine builds it, so that initial weights do not depend on the device. A whole model is
        # kept in files, of which this rank reads its stage's.
        self._spill = on_disk(plan.directory)
        generators.seed(plan.seed)
        with torch.device("cpu"), self._spill.building():
            self.layers = self._find()
        probes: list[nn.Module] = []
        for index, layer in enumerate(self.layers):  # a tie counts as the layer that owns its weight
            probes.append(probes[layer.layer] if isinstance(layer, Tied) else self._probe(layer, index))
        self._probes = nn.Sequential(*probes)
        self.depends = dependences(plan.task, self._probes.train())
        """``BuiltModel.depends``, of all stages' layers."""
        whole = self._named(probes) if self._whole is None else self._whole
        self.manifest: dict[str, Any] = {
            "course": {"modules": described(whole), "attributes": attributes(whole, plan.task)}
        }
        """``BuiltModel.manifest``, of all stages."""
        self.groups = groups.settle_groups(plan.config, plan.task, whole)
        """``BuiltModel.groups``, of all stages."""
        self.parts = parts_of(self.models[0])
        """``BuiltModel.parts``, of all stages."""
        self.sizes = [elements(trainable(probe)) for probe in probes]
        """Trainable parameters of each layer; a tied layer counts its weight again, because it uses it too."""
        self.names = [type(probe).__name__ for probe in probes]
        self.bounds = self._partition()
        """Stage s has the layers ``bounds[s]`` to ``bounds[s + 1] - 1``."""
        self._refuse_weights_in_two_stages()
        max_norm.refuse(self._probes)
        if names := ", ".join(gradient_hooks.find(self._probes)):
            raise EngineError(f"a pipeline calls no hooks on gradients, and {names} has one; train without a pipeline")

    @property
    def models(self) -> list[nn.Module]:
        """The layers of all stages as one module, preceded by the model if it was built whole."""
        return [self._probes] if self._whole is None else [self._whole, self._probes]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self._plan.config.deepspeed.pipeline.stages

    def _find(self) -> Sequence[Layer]:
        task = self._plan.task
        layers = task.layers()
        if layers is not None:
            check_ties(layers)
            layer_chain.refuse_own_model(task)
            return layers
        self._whole = task.model()
        modules = task.cut(self._whole)
        if modules is None:
            raise TaskError(
                f"a pipeline needs a model made of layers, and {type(self._whole).__name__} of {type(task).__name__} is one piece; "
                "give its layers: layers(), or model() that returns an nn.Sequential, or cut(model); "
                'or train it with "zero_optimization" instead of "pipeline"'
            )
        check_ties(modules)
        chain = ready(modules)
        layer_chain.refuse_more(self._whole, chain)
        if not type(task).cut.__module__.startswith("dsframe."):
            self._trial = layer_chain.Trial.of(self._whole, chain, self._plan.seed)
        return modules

    def try_out(self, inputs: Tensor) -> None:
        """The first time, raises TaskError if the layers of the task's ``cut`` do not compute what the model does."""
        trial, self._trial = self._trial, None
        if trial is not None:
            trial(inputs)

    def _named(self, probes: Sequence[nn.Module]) -> nn.Module:
        """Returns the layers with the parameter names of the state; a tied weight gets a further name."""
        return nn.Sequential(
            *(
                TiedLayer(layer, tied_weight(self.layers, index, probe)) if isinstance(layer, Tied) else probe
                for index, (layer, probe) in enumerate(zip(self.layers, probes, strict=True))
            )
        )

    def _probe(self, layer: Any, index: int) -> nn.Module:
        """Returns the layer for its size and class only: on the meta device if possible."""
        if isinstance(layer, nn.Module):
            return layer
        try:
            with torch.device("meta"):
                return make(layer, index, self._plan.seed)
        except (RuntimeError, NotImplementedError):  # its initialization reads values
            return make(layer, index, self._plan.seed)

    def _partition(self) -> list[int]:
        pipeline, count = self._plan.config.deepspeed.pipeline, len(self.layers)
        if pipeline.stages > count:
            raise EngineError(f"pipeline.stages: {pipeline.stages} stages, but the model has {count} layers; use fewer")
        method = pipeline.partition
        if method == "uniform":
            bounds = partition_uniform(count, pipeline.stages)
        elif method.lower().startswith("type:"):
            pattern = method.partition(":")[2]
            marked = [int(re.search(pattern, name, re.IGNORECASE) is not None) for name in self.names]
            if sum(marked) < pipeline.stages:
                known = ", ".join(sorted(set(self.names)))
                raise EngineError(
                    f'pipeline.partition: "{method}" matches {sum(marked)} layers, too few for {pipeline.stages} stages; '
                    f"the layers' classes are {known}"
                )
            bounds = partition_balanced(marked, pipeline.stages)
        else:
            bounds = partition_balanced(self.sizes, pipeline.stages)
        edges = [int(bound) for bound in bounds]
        for stage, (first, end) in enumerate(pairwise(edges)):
            if not sum(self.sizes[first:end]):
                what = f"layers {first} to {end - 1}" if end > first else "no layers"
                raise EngineError(
                    f"pipeline: stage {stage} of {pipeline.stages} would have {what} and nothing to train; "
                    "use fewer stages, or another partition"
                )
        return edges

    def _refuse_weights_in_two_stages(self) -> None:
        seen: dict[int, int] = {}
        for stage, (first, end) in enumerate(pairwise(self.bounds)):
            for index in range(first, end):
                # Ties are allowed; but factories can return the same module, or modules that share weights.
                probe: nn.Module = nn.Identity() if isinstance(self.layers[index], Tied) else self._probes[index]
                for parameter in probe.parameters():
                    if seen.setdefault(id(parameter), stage) != stage:
                        raise TaskError(
                            f"layer {index}, {self.names[index]}, shares a weight with a layer of another stage; "
                            "give the model as layers(), with a dsframe.Tied for the second use"
                        )
                for module in probe.modules():
                    statistics = getattr(module, "running_mean", None) if module.training else None
                    if statistics is not None and seen.setdefault(id(statistics), stage) != stage:
                        raise TaskError(
                            f"layer {index}, {self.names[index]}, shares running statistics with a layer of another stage, and "
                            f"each stage would have its own; give it a {type(module).__name__} of its own"
                        )

    def build(self, loss: Loss) -> Stage:
        """**Collective.** Builds this rank's stage. torch.distributed and deepspeed.comm must be initialized."""
        plan = self._plan
        rank, size = plan.world.rank, plan.world.size
        stage = rank // (size // self.stages)
        local_layers = range(self.bounds[stage], self.bounds[stage + 1])
        ties = {layer.layer: layer for layer in self.layers if isinstance(layer, Tied)}
        with torch.device("cpu"):
            specs = [self._spec(index, ties, index in local_layers) for index in range(len(self.layers))]
        pipeline = plan.config.deepspeed.pipeline
        module = Stage(
            specs,
            topology=PipeModelDataParallelTopology(self.stages, 1, plan.batch.data_parallel_size),
            loss_fn=loss,
            partition_method=self.bounds,
            activation_checkpoint_interval=pipeline.activation_checkpoint_interval,
        )
        batch_norm.accept(module, formats.parameter_dtype(plan.config))
        switches.apply(module, plan.config, plan.device, self._probes)
        module.name(self._whole, self.layers, local_layers, self._probes)
        self.groups.freeze(module.model)
        patches.count_for_clipping(module)
        generators.seed(plan.seed + 1 + plan.data_rank)  # dropout, as on every engine
        self.layers, self._whole, self._probes = [], None, nn.Sequential()
        self._spill.close()
        return module

    def _spec(self, index: int, ties: dict[int, Tied], local: bool) -> Any:
        """Returns DeepSpeed's specification of a layer; for a layer of another stage only if its weight is tied."""
        layer, seed = self.layers[index], self._plan.seed
        if isinstance(layer, Tied):
            owner, weight, function = layer.layer, layer.weight, layer.function
            return _Tie(
                owner, weight, self._maker(owner), lambda module, inputs: function(inputs, getattr(module, weight))
            )
        if index in ties:
            return _Tie(index, ties[index].weight, self._maker(index), None)
        return self._ready(make(layer, index, seed)) if local else None

    def _ready(self, layer: nn.Module) -> nn.Module:
        """Loads a layer of this stage into memory and moves it to its device."""
        dtype = formats.parameter_dtype(self._plan.config)
        for parameter in layer.parameters():
            self._spill.fetch(parameter, dtype if dtype.itemsize < 4 and parameter.is_floating_point() else None)
        return layer.to(self._plan.device)

    def _maker(self, index: int) -> Callable[[], nn.Module]:
        layer, seed = self.layers[index], self._plan.seed

        def built() -> nn.Module:
            with torch.device("cpu"):
                return self._ready(make(layer, index, seed))

        return built


class _Tie(TiedLayerSpec):  # type: ignore[misc]  # DeepSpeed has no types
    """A layer whose weight several stages have: each builds it from the same seed, and DeepSpeed sums its gradients."""

    def __init__(self, owner: int, weight: str, build: Callable[[], nn.Module], forward: Any) -> None:
        super().__init__(str(owner), nn.Module, forward_fn=forward, tied_weight_attr=weight)
        self._build = build

    def build(self, log: bool = False) -> nn.Module:
        return self._build()


class Stage(patches.StagePatches, PipelineModule):  # type: ignore[misc]
    """One stage, as DeepSpeed runs it, with the names of its state."""

    model: nn.Module
    """The stage's modules under their names in the whole model."""
    borrowed: frozenset[str]
    """Names of weights that an earlier stage owns and this one has a copy of."""
    elsewhere: MissingParts
    """Modules and tensors of the other stages."""
    further_names: dict[str, str]
    """Other names of the whole model's shared parameters -> the name in checkpoints."""
    _sizes: dict[tuple[torch.Size, ...], list[torch.Size]]
    """Sizes of inputs in training -> of outputs."""

    _joined: Tensor | None
    """Zero with a gradient to each input of the last forward pass in training, if there are several."""

    def forward(self, forward_input: Any) -> Any:
        """Returns the next stage's inputs. Raises TaskError if DeepSpeed cannot send them, or if inputs of the same
        size gave outputs of another size before: the next stage knows only input sizes
        (``PipelineEngine._settle_sizes``).

        In training DeepSpeed exchanges a gradient for each floating-point tensor, so all outputs require one.
        """
        outputs = super().forward(forward_input)
        differentiates = self.training and torch.is_grad_enabled()
        several = differentiates and isinstance(forward_input, tuple)
        self._joined = _zero_of(forward_input) if several else None
        if not self.is_last:
            self._refuse_unsendable(outputs)
            sent = [
                (_with_gradient(self.joined(tensor)) if differentiates else tensor).contiguous()
                for tensor in (outputs if isinstance(outputs, tuple) else (outputs,))
            ]
            outputs = tuple(sent) if isinstance(outputs, tuple) else sent[0]
        if self.training:
            given, made = ([leaf.shape for leaf in tensors_of(value)] for value in (forward_input, outputs))
            if self._sizes.setdefault(tuple(given), made) != made:
                raise TaskError(
                    f"a pipeline stage gave outputs of shapes {self._sizes[tuple(given)]} before, and now {made} for inputs of "
                    "the same size; the inputs' size must determine the outputs' size: pad, or train without a pipeline"
                )
        return outputs

    @property
    def is_last(self) -> bool:
        """True for the stage whose outputs the loss gets."""
        return self.stage_id == len(self.parts) - 2

    def joined(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor``, with a gradient also to inputs that it does not depend on."""
        return (
            tensor if self._joined is None or not tensor.is_floating_point() else tensor + self._joined.to(tensor.dtype)
        )

    def _refuse_unsendable(self, outputs: Any) -> None:
        parts = outputs if type(outputs) is tuple else (outputs,)
        wrong = [
            f"complex numbers ({part.dtype})" if isinstance(part, Tensor) else type(part).__name__
            for part in parts
            if not isinstance(part, Tensor) or part.is_complex()
        ]
        if wrong or not parts:
            where = " in a tuple" if parts is outputs else ""
            raise TaskError(
                f"layer {self.parts[self.stage_id + 1] - 1}, the last of a pipeline's stage, returns "
                f"{wrong[0] if wrong else 'nothing'}{where}, which is not sent to the next stage: pass a tensor or a tuple of "
                "tensors between layers (complex ones by torch.view_as_real), or train without a pipeline"
            )

    def name(self, whole: nn.Module | None, layers: Sequence[Layer], local_layers: range, probes: nn.Module) -> None:
        """Sets ``model`` and the name attributes. ``whole``: the model if it was built whole; other stages' weights are
        removed from it. ``probes``: the layers of all stages, which the task may hold."""
        self.borrowed, self._sizes, self.elsewhere = frozenset(), {}, MissingParts()
        ties = {index: layer for index, layer in enumerate(layers) if isinstance(layer, Tied)}
        if whole is not None:
            self.further_names = aliases(whole)
            self.elsewhere.add(whole, self, probes)
            names: nn.Module = whole
            lent = {
                id(self.tied_modules[str(tie.layer)].get_parameter(tie.weight))
                for index, tie in ties.items()
                if index in local_layers and tie.layer not in local_layers
            }
            self.borrowed = frozenset(name for name, parameter in whole.named_parameters() if id(parameter) in lent)
        else:
            self.elsewhere.add(probes, self)
            names = nn.Module()
            owners = {tie.layer for tie in ties.values()}
            for index in local_layers:
                owner = ties[index].layer if index in ties else index
                shared = owner in owners
                names.add_module(str(owner), self.tied_modules[str(owner)] if shared else self._modules[str(index)])
                if shared and owner not in local_layers:
                    self.borrowed |= {f"{owner}.{ties[index].weight}"}
            self.further_names = {f"{index}.{tie.weight}": f"{tie.layer}.{tie.weight}" for index, tie in ties.items()}
        object.__setattr__(self, "model", names)  # not a submodule: DeepSpeed would count its parameters twice


def _with_gradient(tensor: Tensor) -> Tensor:
    """Returns ``tensor``; a floating-point one requires a gradient, which DeepSpeed needs."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() and not tensor.requires_grad else tensor


def _zero_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of zero elements of each tensor, so that even NaN does not change it."""
    return sum((t.flatten()[:0].sum() for t in tensors if t.requires_grad), torch.zeros(()))
