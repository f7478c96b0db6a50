"""PyTorch's fully sharded data parallelism, the current ``fully_shard`` (Zhao et al. 2023, arXiv 2304.11277).

Every rank has a shard of each parameter, its gradient and its optimizer state. A unit, such as a transformer block, is
gathered before its computation and freed afterwards: ZeRO stage 3, implemented by torch. The step is that of the
replica engines; only where tensors are stored differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial

from dsframe.cluster import process_group
from dsframe.cluster.exchange import all_gather_json
from dsframe.engines import fsdp_outputs, fsdp_scalars, fsdp_units, precision, torch_patches
from dsframe.engines.base import COPIED, INFERENCE, JVP, stays_gathered
from dsframe.engines.call_order import CallOrder, NoCalls
from dsframe.engines.escapes import Escapes
from dsframe.engines.masters import MasterWeights
from dsframe.engines.precision import gradients_of, total_norm
from dsframe.engines.replica import ReplicaEngine
from dsframe.engines.state_replica import ParameterView
from dsframe.errors import EngineError
from dsframe.model import formats, output_classes
from dsframe.model.build import LARGE, without_elements
from dsframe.model.digests import flat_copy
from dsframe.model.gathered import LIBRARIES, Shards, whole
from dsframe.model.micro_batch import Measure, Pair
from dsframe.model.plan import Plan
from dsframe.model.spill import Spill, on_disk
from dsframe.model.state import EngineState, ParameterState, SavedState, full_precision
from dsframe.tasks.task import Sums
from dsframe.values import elements

_COMPUTED_IN = "_dsframe_computed_in"
"""Attribute of a shard with the dtype of the gathered weight."""


class FsdpEngine(ReplicaEngine):
    """Shards of parameters, gradients and optimizer state; 16-bit numbers only in the model's computation."""

    unit_classes = (FSDPModule,)
    forward_is_collective = True
    reduces_repeatedly = False
    cannot_sum = True
    reaches_model = True
    explains: ClassVar[Mapping[str, str]] = {
        **JVP,
        "Inplace update to inference tensor": INFERENCE,
        "FSDP does not support deepcopy": COPIED,
        "'Parameter' object has no attribute": "the model asks a parameter for an attribute, and {} puts parameters of its own in "
        "their place: keep it in the module",
        "mixed torch.Tensor and DTensor": "a part of a block is called while the block itself does not run, so that {} has not "
        "gathered its weights: write whole_weights = True in the task",
        "Output 0 of AsStrided is a view and is being modified inplace": "a block writes to its input, and {}, compiled, gives "
        "it a view: write x = x * 2 in the place of x.mul_(2)",
        "storage of size 0": "the loss depends on a tensor that has left its block by another way than outputs and attributes (in "
        "a global, the task, another object), so that {} does not gather the block's weights for it: return it, or keep it in an "
        "attribute of the block",
    }
    _stays_gathered = False
    """True while an evaluation keeps gathered weights for its next batch."""

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises EngineError if the model cannot be sharded as the file says, WorldError as DDP does."""
        torch_patches.allow_views()
        self._settings = plan.config.settings.fsdp
        self._calls: NoCalls = NoCalls()
        process_group.open_process_group(plan.world, plan.device, plan.collective_limit)
        self._mesh = _mesh(plan)
        self._shards = self._mesh["shard"]
        super().__init__(plan)

    @property
    def description(self) -> str:
        parts = ["PyTorch FSDP"]
        if self._settings.sharding == "hybrid":
            parts.append(f"{self._mesh.size() // self._shards.size()} replicas in {self._shards.size()} shards each")
        if self._units:
            parts.append(" + ".join(f"{count} x {name}" for name, count in self._units.items()) + " gathered in turn")
        if self.gathers_steps:
            parts.append("gathered for each step")
        if self._settings.offload == "cpu":
            parts.append("everything on CPU")
        return ", ".join(parts)

    @torch.no_grad()
    def _place(self, model: nn.Module) -> MasterWeights | None:
        """**Collective.** Shards the parameters, innermost units first: a unit excludes what a unit inside it holds."""
        _refuse_empty(model)
        self._scalars = fsdp_scalars.add_dimension(model)
        large = elements(model.parameters()) > LARGE
        self._settle_gathering(model)
        units = self._find_units(model)
        self._units = Counter(type(unit).__name__ for unit in units)
        dense = [buffer for buffer in model.buffers() if buffer.layout == torch.strided]
        self._take_from_rank_0([*model.parameters(), *dense])
        for parameter in model.parameters():
            self._round(parameter)
        bits = self._dtype if precision.is_short(self._dtype) else None
        offload = CPUOffloadPolicy(pin_memory=self.plan.device.type == "cuda")
        in_fp32 = {module for unit in formats.kept_modules(model) for module in unit.modules()}
        kept = {name for name, parameter in model.named_parameters() if formats.is_kept(parameter)}
        policies = [
            MixedPrecisionPolicy(dtype, self.built.dtype, cast_forward_inputs=False)
            for dtype in (bits, self.built.dtype)
        ]
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "offload_policy": offload if self._settings.offload == "cpu" else OffloadPolicy(),
        }
        self._ran: set[nn.Module] = set()
        fsdp_outputs.add_hooks({*units, model}, sharded=not self.gathers_steps)
        take = output_classes.show([*units, model])
        keep = fsdp_units.keep_arguments(units)
        for unit in units:
            policy = policies[unit in in_fp32]
            fully_shard(unit, **options, mp_policy=policy, reshard_after_forward=self._settings.reshard_after_forward)
            unit.register_forward_hook(lambda module, *_: self._ran.add(module))
            if large and self.plan.device.type == "cpu":
                # Prefetching the next unit is the default, but gloo does not overlap, so it would only cost memory. The
                # unit itself is already gathered.
                cast(FSDPModule, unit).set_modules_to_backward_prefetch([cast(FSDPModule, unit)])
            if self._spill is not None:
                self._spill.evict()
        if model not in units:
            fully_shard(model, **options, mp_policy=policies[0])
        self._escapes = self._watch_escapes(model, units)
        take()
        keep()
        for name, parameter in model.named_parameters():
            setattr(parameter, _COMPUTED_IN, self.built.dtype if name in kept else bits or self.built.dtype)
        # Otherwise ranks that use different parameters wait forever.
        cast(FSDPModule, model).set_reduce_scatter_unused_params(True)
        if self.gathers_steps:
            runtime = cast(Any, model)._get_fsdp_state()  # keeps shards and their updates, without gathering by module
            runtime._pre_forward_hook_handle.remove()
            runtime._post_forward_hook_handle.remove()
        elif self._shards.size() > 1 and self.plan.config.settings.model.compile is not True:
            names = {module: name for name, module in model.named_modules()}
            self._calls = CallOrder(self, model, {names[unit]: unit for unit in units})
            self.built = replace(self.built, calls=self._calls)
        if self.plan.part:
            # torch initializes lazily, which could happen while another model trains; it would then treat this one as
            # frozen.
            cast(Any, model)._get_fsdp_state()._lazy_init()
        return None

    def _watch_escapes(self, model: nn.Module, units: Sequence[nn.Module]) -> Escapes:
        compiles = self.plan.config.settings.model.compile  # torch would trace hooks
        named = {name: module for name, module in model.named_modules() if module in units and not compiles}
        return Escapes(
            self, named, fsdp_outputs.gathered_weights, fsdp_outputs.gather, later=True
        )  # torch crashes there

    def _find_units(self, model: nn.Module) -> list[nn.Module]:
        """**Collective.** Returns the modules that are gathered as one unit, innermost first."""
        wrap, kept = self._settings.wrap, formats.kept_modules(model)
        _refuse_kept(model, kept)
        if self.gathers_steps:
            return []
        units = fsdp_units.named(model, wrap)
        chosen = {*units, *kept}
        return [module for module in reversed(list(model.modules())) if module in chosen] if kept else units

    def _whole_weights(self) -> AbstractContextManager[None]:
        if not self.gathers_steps:
            return nullcontext()
        if self.built.watch is not None:
            self.built.watch.note_parameters()  # before copies replace them
        return whole(self.model)

    def copy_shard(self, parameter: Any, source: Any) -> None:
        """Copies this rank's rows."""
        parameter._local_tensor.copy_(source._local_tensor)

    def _spilled(self) -> Spill | None:
        shards = self.plan.world.size > 1 or self._settings.offload == "cpu"
        return on_disk(self.plan.directory, self.plan.world.size) if shards else None

    def _take_from_rank_0(self, tensors: list[Tensor]) -> None:
        """**Collective.** Gives every rank rank 0's model. Sends only tensors that differ between ranks."""
        local_digests = []
        for tensor in tensors:
            local_digests.append(xxhash.xxh3_128_hexdigest(flat_copy(tensor).view(torch.uint8).numpy().data))
            if self._spill is not None:
                self._spill.touched(tensor.nbytes)
        of_ranks = all_gather_json(self, local_digests)
        for tensor, *digests in zip(tensors, *of_ranks, strict=True):
            if len(set(digests)) > 1:
                sent = tensor.data.to(self.plan.device)
                dist.broadcast(sent, src=0)
                tensor.data.copy_(sent)

    def _round(self, parameter: nn.Parameter) -> None:
        """Rounds weights for 16-bit training, which starts from rounded weights on every engine; shards are fp32."""
        if formats.is_kept(parameter):
            parameter.data = parameter.data.to(self.built.dtype)
            return
        if precision.is_short(self._dtype):
            parameter.data.copy_(parameter.data.to(self._dtype))
        # A frozen model, and an adapter's base model, need no masters.
        base = self.plan.frozen or (self.built.adapter is not None and not parameter.requires_grad)
        wanted = self._dtype if base and precision.is_short(self._dtype) else self.built.dtype
        if self._spill is not None and wanted != parameter.dtype:
            self._spill.move(parameter, wanted)
        else:
            parameter.data = parameter.data.to(wanted)

    @contextmanager
    def _whole_gradients(self) -> Iterator[None]:
        # torch 2.13 fails if a unit that has never run keeps its gradients unreduced, so those are reduced in their
        # first pass.
        units = [cast(FSDPModule, module) for module in (self.model, *self._ran)]
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)
        yield
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
            _add_missing_sums(unit)

    def _accumulating(self) -> AbstractContextManager[Any]:
        return self._whole_gradients()

    def _touch_unused(self, loss: Tensor) -> Tensor:
        self._calls.backward(loss)
        self._escapes.gather(loss)
        return loss

    def _synchronize(self) -> None:
        self._calls.compare()

    def _apply(self) -> None:
        self._calls.check(waits=self.plan.device.type == "cpu")  # on a GPU later, so that no rank waits for the device
        try:
            super()._apply()
        except RuntimeError as error:
            if not self.plan.optimizer.is_custom:
                raise
            raise EngineError(
                f"{self.plan.optimizer.name}: its step fails with the shards of {self.description} ({error}); choose another engine"
            ) from error

    def _pieces(self) -> list[Tensor]:
        return [tensor._local_tensor for tensor in cast(list[DTensor], gradients_of(self._parameters))]

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        square = total_norm(gradients).square().to(self.plan.device)
        dist.all_reduce(square, group=self._shards.get_group())
        return square.sqrt().to(gradients[0].device)

    def _slot(self, name: str, parameter: Tensor) -> ParameterView:
        return _ShardSlot(name, () if name in self._scalars else tuple(parameter.shape), parameter)

    def eval_step(self, batch: Pair, measure: Measure | None) -> Sums:
        """**Collective.** Every rank's forward pass gathers the others' shards. If the weights stay gathered,
        ``measure`` may call modules any number of times."""

        def measured(outputs: Any, targets: Any) -> Sums:
            assert measure is not None
            with self._unwatched():
                return measure(outputs, targets)

        metrics = super().eval_step(batch, measure and measured)
        self._calls.compare()
        self._calls.check(waits=not self._stays_gathered)
        if not self._stays_gathered:
            self._reshard()
        return metrics

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        self._calls.watches = not self._stays_gathered
        try:
            yield
        finally:
            self._calls.watches = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """**Collective.** Inside, weights stay gathered if memory allows."""
        count = elements(self.model.parameters())
        width = self._dtype.itemsize if precision.is_short(self._dtype) else self.built.dtype.itemsize
        if not stays_gathered(self, count * width):
            yield
            return
        self._keep_gathered(True)
        try:
            yield
        finally:
            self._keep_gathered(False)
            self._reshard()
        self._calls.check()

    def _keep_gathered(self, keeps: bool) -> None:
        self._stays_gathered = keeps
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and module is not self.model:
                gives_up = self._settings.reshard_after_forward and not keeps
                module.set_reshard_after_forward(gives_up, recurse=False)

    def release_outputs(self) -> None:
        """**Collective.** Frees gathered weights and compares the calls."""
        self._calls.compare()
        self._calls.check(waits=self.plan.device.type == "cpu")
        self._reshard()

    def state(self) -> EngineState:
        """**Collective** to read to its end: parameters are gathered one at a time. This rank's shards are views.

        Raises TaskError if ranks have called different units.
        """
        self._calls.check()
        return super().state()

    def load_state(self, saved: SavedState) -> None:
        """**Collective.** Each rank reads only its shards."""
        super().load_state(saved)
        self._reshard()

    def _publish(self) -> None:
        super()._publish()
        self._reshard()

    def _reshard(self) -> None:
        """Frees gathered weights: after a forward pass only, the outermost unit keeps them, and training would use
        them."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def close(self) -> None:
        """**Collective.** Leaves the process group."""
        self._calls.close()
        super().close()


class _ShardSlot(ParameterView):
    """A parameter of which this rank has a shard."""

    def whole(self, piece: Tensor) -> Tensor:
        """**Collective.** Gathers the tensor from all ranks, on their device."""
        assert isinstance(piece, DTensor)
        full = _full(piece).to(full_precision(piece.dtype))
        return full if self.shape else full.view(())

    def span(self, tensor: Tensor) -> tuple[int, int]:
        """Returns start and length of this rank's rows in the flattened parameter, split as by torch.chunk."""
        mesh, shape = cast(DTensor, tensor).device_mesh, tensor.shape
        rows = -(-shape[0] // mesh.size(mesh.ndim - 1))
        first = min(mesh.get_local_rank(mesh.ndim - 1) * rows, shape[0])
        return first * shape[1:].numel(), self.flat(tensor).numel()

    def flat(self, tensor: Tensor) -> Tensor:
        return cast(DTensor, tensor).to_local().view(-1)

    def load(self, saved: SavedState) -> ParameterState:
        """Reads only this rank's rows, flat; sends nothing."""
        return saved.part(self.name, *self.span(self.master))

    def target(self, tensor: Tensor) -> Tensor:
        return self.flat(tensor)

    def moment(self, whole: Tensor) -> Tensor:
        return torch.zeros_like(self.master, requires_grad=False)


def _complete(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that FSDP puts into ``model`` while its modules run; of all its parameters if
    this torch keeps them elsewhere than torch 2.13 (``_fsdp_param.py``)."""
    states = (cast(Any, module)._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    groups = (group for state in states for group in getattr(state, "_fsdp_param_groups", ()))
    shards = (shard for group in groups for shard in getattr(group, "fsdp_params", ()))
    known = {str(shard._param_fqn): shard._unsharded_param for shard in shards if hasattr(shard, "_unsharded_param")}
    return known or dict(model.named_parameters())


class FsdpShards(Shards):
    """Parameters sharded by ``fully_shard``."""

    others = staticmethod(_complete)

    def cuts(self, weight: Any) -> bool:
        """True if FSDP has sharded the parameter."""
        return isinstance(weight, DTensor)

    def is_whole(self, weight: Any) -> bool:
        """False: FSDP replaces a gathered parameter by another object."""
        return False

    def copies(self, weights: Sequence[Any]) -> list[Tensor]:
        """**Collective.** Gathers the weights in the dtype that the model computes in."""
        whole_weights = [_full(weight).to(getattr(weight, _COMPUTED_IN, weight.dtype)) for weight in weights]
        return [copy.clone() if weights[0].device_mesh.size() == 1 else copy for copy in whole_weights]

    def gradients(self, weights: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
        """**Collective.** Averages gradients over the ranks, as FSDP does, and returns their shards."""
        reduced: list[Tensor] = []
        for weight, gradient in zip(weights, gradients, strict=True):
            mesh = weight.device_mesh
            of_rank = DTensor.from_local(
                (gradient.to(weight.dtype) / mesh.size()).contiguous(), mesh, [Partial()] * mesh.ndim
            )
            reduced.append(of_rank.redistribute(placements=weight.placements).to(weight.device))
        return reduced


LIBRARIES.append(FsdpShards())


def _add_missing_sums(unit: FSDPModule) -> None:
    """Gives weights of ``unit`` whose gradients have not arrived yet a sum of zeros. Else torch 2.13 reduces the sums of the
    others, which are fp32, beside a 16-bit gradient, and raises (``_fsdp_collectives.py``, foreach_reduce)."""
    for group in cast(Any, unit)._get_fsdp_state()._fsdp_param_groups:
        for one in group.fsdp_params:
            trained = (
                getattr(one, "reduce_dtype", None)
                and hasattr(one, "_unsharded_param")
                and one._unsharded_param.requires_grad
            )
            if trained and one.unsharded_accumulated_grad is None and one._unsharded_param.grad is None:
                one.unsharded_accumulated_grad = torch.zeros_like(one._unsharded_param, dtype=one.reduce_dtype)


def _full(piece: DTensor) -> Tensor:
    """**Collective.** Gathers the tensor from all ranks, on their device."""
    mesh, local = piece.device_mesh, piece.to_local()
    moved = local.to(mesh.device_type)  # offloaded shards: only device memory can be sent
    return DTensor.from_local(moved, mesh, piece.placements, shape=piece.shape, stride=piece.stride()).full_tensor()


def _mesh(plan: Plan) -> DeviceMesh:
    """Returns the mesh of replicas x shards; neighbouring ranks, which share a node, share a model."""
    settings, world = plan.config.settings.fsdp, plan.world
    if settings.sharding == "full":
        return init_device_mesh(plan.device.type, (world.size,), mesh_dim_names=("shard",))
    size = settings.shard_size or world.local_size
    if world.size % size:
        raise EngineError(f"fsdp: {world.size} processes are not divisible by shards of {size}; set fsdp.shard_size")
    return init_device_mesh(plan.device.type, (world.size // size, size), mesh_dim_names=("replicate", "shard"))


def _refuse_kept(model: nn.Module, kept: list[nn.Module]) -> None:
    """Raises EngineError if only some parameters of a unit are kept in fp32; FSDP gathers a unit in one dtype."""
    inside = {id(parameter) for module in kept for parameter in module.parameters()}
    if names := [name for name, p in model.named_parameters() if formats.is_kept(p) and id(p) not in inside]:
        raise EngineError(
            f"keep_in_fp32: FSDP keeps whole modules, and {', '.join(names)} is a part of one; name all parameters of its module, "
            'or choose engine "ddp" or "horovod"'
        )


def _refuse_empty(model: nn.Module) -> None:
    if names := without_elements(model):
        raise EngineError(
            f'FSDP cannot shard {names}, which has no elements; leave it out of the model, or choose engine "ddp"'
        )
