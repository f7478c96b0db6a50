"""Horovod: ring all-reduce of full replicas' gradients (Sergeev and Del Balso 2018, arXiv 1802.05799).

Horovod's settings come from the "horovod" part of the "dsframe" section. How gradients are combined comes from
DeepSpeed's keys (``gradient_allreduce_op``, ``gradient_predivide_factor``), so that they mean the same on every engine.

``hvd.DistributedOptimizer`` is slow on CPUs, measured with 0.28.1 over Gloo, 2 ranks on 2 cores. Its background thread
asks all ranks every millisecond what is ready, which takes 0.12 ms of processor time each. A waiting main thread loops
over ``sched_yield`` (``mpi_ops_v2.cc``: WaitAndClear) and takes a core from the threads that it waits for. Every
gradient is a separate request, copied into a fusion buffer and out of it. So here gradients are in a few buckets,
rounds are rarer, and a waiting thread sleeps.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from http.server import HTTPServer
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from dsframe.cluster import process_group
from dsframe.cluster.rendezvous import bound_to, free_port, interface_to
from dsframe.cluster.world import World
from dsframe.engines.buckets import Buckets
from dsframe.engines.horovod.environment import note_start, pace, settle_environment
from dsframe.engines.replica import ReplicaEngine
from dsframe.engines.torch_patches import can_be_sent
from dsframe.errors import EngineError, WorldError
from dsframe.host import phases
from dsframe.model.micro_batch import MicroBatch
from dsframe.model.plan import Plan
from dsframe.values import Tensors

try:
    import horovod.torch as hvd
except ImportError as error:  # pip's wheel without torch support, or built against another torch
    raise EngineError(
        f"horovod is installed but cannot be loaded ({error}); compile it against this torch: docs/coming_from/horovod.md"
    ) from error


_living: WeakSet[Buckets] = WeakSet()
"""Buckets of engines that a failed training left open. Their hooks go if the task passes the same module again."""
_starts = itertools.count()
"""Counts Horovod's starts under horovodrun in this process."""
_NAP_SECONDS = 2e-4
_NAPPING_SECONDS = 1.0
"""Time after which Horovod's own wait is called, which the report of a hanging run recognizes."""


class HorovodEngine(ReplicaEngine):
    """Full replicas; Horovod reduces gradients in the background during the backward pass."""

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises EngineError if this build of Horovod does not support what the file asks for."""
        _refuse_gpus_without_nccl(plan.device)
        self._bucket_bytes = settle_environment(plan.device)
        self._buckets: Buckets | None = None
        # Collectives of the model itself use torch.distributed.
        world = _with_address(plan.world)
        self._joins = not process_group.open_process_group(world, plan.device, plan.collective_limit)
        self._server = None if self._joins else _initialise(plan.world)
        self._op = plan.config.deepspeed.gradient_allreduce_op
        super().__init__(plan)

    def _gradients(self, micro_batches: Iterable[MicroBatch], scale: float) -> Tensor:
        if self._buckets:
            self._buckets.begin()
        return super()._gradients(micro_batches, scale)

    @property
    def description(self) -> str:
        transport = "MPI" if hvd.mpi_enabled() else "Gloo"
        if self.plan.device.type == "cuda" and hvd.nccl_built():
            transport = "NCCL"
        return f"Horovod ({transport}, {self._op}{pace()})"

    def _distribute(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        _broadcast(_broadcastable(self.model.state_dict()))
        if self._masters:
            _broadcast(dict(self._named_parameters()))
            self._masters.give_weights()
        # An optimizer without state has nothing to send, and hvd.broadcast_optimizer_state would create state with a
        # step of zero gradients: Adam's bias correction advances and weight decay shrinks the weights (measured,
        # 0.28.1).
        if optimizer.state:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        if self.plan.world.size > 1:
            for earlier in () if self._joins else _living:
                earlier.remove()
            self._buckets = Buckets(
                self._parameters,
                self._reduce,
                bytes_each=None if self._bucket_bytes is None else int(self._bucket_bytes),
                overlaps=self._masters is None,  # masters get their gradients all at once
            )
            _living.add(self._buckets)
        return optimizer

    def _reduce(self, name: str, flat: Tensor) -> Callable[[], None]:
        """Starts the reduction of a bucket; returns a function that waits for it."""
        sent = flat.half() if self.plan.config.settings.horovod.compression == "fp16" else flat
        predivided = self.plan.config.deepspeed.gradient_predivide_factor if self._op == "mean" else 1.0
        handle = hvd.allreduce_async_(
            sent,
            name=f"dsframe.{name}" if not self.plan.part else f"dsframe.{self.plan.part}.{name}",
            op=hvd.Average if self._op == "mean" else hvd.Sum,
            prescale_factor=1.0 / predivided,
            postscale_factor=predivided,
        )

        def wait() -> None:
            until = time.monotonic() + (_NAPPING_SECONDS if sent.device.type == "cpu" else 0.0)
            while time.monotonic() < until and not hvd.poll(handle):
                time.sleep(_NAP_SECONDS)
            hvd.synchronize(handle)
            if sent is not flat:
                flat.copy_(sent)

        return wait

    def _accumulating(self) -> AbstractContextManager[Any]:
        return self._buckets.held() if self._buckets else nullcontext()

    def _synchronize(self) -> None:
        if self._buckets:
            self._buckets.finish()

    def close(self) -> None:
        """**Collective.** Leaves Horovod's ring when all ranks have arrived."""
        if self._buckets:
            self._buckets.remove()
        if process_group.stays_open():
            return
        hvd.barrier()
        _leave()
        process_group.close_process_group()
        if self._server:  # when all ranks have left
            self._server.shutdown()
            self._server.server_close()


def _refuse_gpus_without_nccl(device: torch.device) -> None:
    """Raises EngineError: a build for CPUs accepts GPU tensors, and ends or waits forever in its background thread."""
    if device.type == "cuda" and not hvd.nccl_built():
        raise EngineError(
            "this Horovod was built without NCCL, so it cannot reduce on GPUs; rebuild it where there is a CUDA toolkit "
            '(HOROVOD_GPU_OPERATIONS=NCCL, docs/gpu.md), choose engine "ddp", or hide the GPUs (CUDA_VISIBLE_DEVICES=)'
        )


@torch.no_grad()
def _broadcast(tensors: Tensors) -> None:
    """**Collective.** Gives each rank rank 0's ``tensors``, also if they are not contiguous."""
    pieces = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    hvd.broadcast_parameters(pieces, root_rank=0)
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            tensor.copy_(pieces[name])


def _broadcastable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors that Horovod can send; complex ones as pairs.

    Excluded are bfloat16, which Gloo cannot send (the fp32 masters are sent instead), and dtypes unknown to Horovod.
    """
    return {
        name: torch.view_as_real(value) if value.is_complex() else value
        for name, value in state.items()
        if isinstance(value, Tensor) and can_be_sent(value) and value.dtype not in (torch.bfloat16, torch.bool)
    }


def _with_address(world: World) -> World:
    """**Collective.** Returns ``world`` with a rendezvous address. Over MPI on several nodes no launcher gives one, so
    Horovod, which needs none there, sends rank 0's."""
    try:
        process_group.rendezvous_address(world)
    except WorldError:
        if not hvd.mpi_built() or world.launcher not in ("mpirun", "horovodrun"):
            raise
        note_start(running=hvd.is_initialized())
        hvd.init()
        address, port = hvd.broadcast_object((socket.gethostname(), free_port()), root_rank=0)
        return replace(world, master_address=address, master_port=port)
    return world


def _initialise(world: World) -> HTTPServer | None:
    """**Collective.** Calls ``hvd.init()``. If this build does not know the launcher, starts a rendezvous server on
    rank 0 and returns it. Measured with horovod 0.28.1: it needs only these variables and a server that speaks its
    key-value protocol."""
    note_start(running=hvd.is_initialized())
    # horovodrun's server keeps the addresses of the previous training: it deletes them only if all ranks leave every
    # ring in the same order (``runner/http/http_server.py``: do_DELETE clears the lists of all scopes, 0.28.1).
    # Otherwise peers are unreachable.
    by_horovodrun = world.launcher == "horovodrun" and not next(_starts)
    known = by_horovodrun or (world.launcher == "mpirun" and hvd.mpi_built())
    server = _serve(world) if world.size > 1 and not known else None
    hvd.init()
    phases.done("process group")
    if hvd.size() != world.size:
        size = hvd.size()
        _leave()
        raise EngineError(f"Horovod sees {size} processes, but the launcher {world.launcher} started {world.size}")
    return server


def _leave() -> None:
    """Shuts Horovod down. Not over MPI, which starts once in a process: another training may follow."""
    if not hvd.mpi_enabled():
        hvd.shutdown()


def _serve(world: World) -> HTTPServer | None:
    """**Collective.** Starts Horovod's rendezvous server on rank 0, which returns it; sets its address on all ranks."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    address, _ = process_group.rendezvous_address(world)
    host = "localhost" if world.size == world.local_size else socket.gethostname()
    names: list[str] = [""] * world.size
    dist.all_gather_object(names, host)
    port, server = [0], None
    if world.is_main:
        hosts = ",".join(f"{name}:{slots}" for name, slots in Counter(names).items())
        # The same as its RendezvousServer, but that one listens on every interface.
        server = RendezvousHTTPServer((bound_to(address), 0), RendezvousHandler, 0)
        server.init(get_host_assignments(parse_hosts(hosts), world.size))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = [server.server_address[1]]
    dist.broadcast_object_list(port)
    nodes = -(-world.size // world.local_size)
    os.environ.update(
        HOROVOD_HOSTNAME=host,
        HOROVOD_RANK=str(world.rank),
        HOROVOD_SIZE=str(world.size),
        HOROVOD_LOCAL_RANK=str(world.local_rank),
        HOROVOD_LOCAL_SIZE=str(world.local_size),
        HOROVOD_CROSS_RANK=str(world.node),
        HOROVOD_CROSS_SIZE=str(nodes),
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_RENDEZVOUS_ADDR=address,
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port[0]),
    )
    if interface := "lo" if world.size == world.local_size else interface_to(address):
        os.environ.setdefault("HOROVOD_GLOO_IFACE", interface)
    return server
