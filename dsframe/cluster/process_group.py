"""Opens torch.distributed under any launcher, and closes it in every case."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from dsframe.cluster.exchange import numbered
from dsframe.cluster.rendezvous import interface_to, listener, meeting_point
from dsframe.cluster.world import World
from dsframe.errors import WorldError
from dsframe.host import phases

MEETING_SECONDS = 300.0
"""Timeout of the rendezvous at the start: nodes differ in the time to import torch or compile an operator."""
LIMIT_VARIABLE = "DSFRAME_MEETING_SECONDS"

_OPEN_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"

_closed: list[object] = []
"""The groups that this process has left, until it opens others.

A group's destructor waits for its worker threads, one of which may need the GIL to free a tensor. Python's own
reference releases the GIL meanwhile; DDP's, in C++, does not, so that a complete run sometimes never ended (torch 2.13
and Gloo). Therefore the last reference is kept here.
"""
_opened: object = None
"""The group that this process has opened."""
_sharing: int | None = None
"""Number of engines created inside of :func:`shared` so far; None outside."""
_meetings = itertools.count()
"""Counts the rendezvous of this process; the same on every rank, because a rendezvous is collective."""


@contextmanager
def shared() -> Iterator[None]:
    """Inside, engines share the process group that the first of them opens; those that are closed inside leave it open."""
    global _sharing
    _sharing = 0
    try:
        yield
    finally:
        _sharing = None


def joins() -> bool:
    """Returns whether an engine that starts now is not the first inside of :func:`shared`, so that all is open."""
    global _sharing
    if _sharing is None:
        return False
    _sharing += 1
    return _sharing > 1


def stays_open() -> bool:
    """Returns whether an engine that is closed now must leave the process group open for others."""
    return _sharing is not None


def device_of(world: World) -> torch.device:
    """Returns this process's device: the visible GPU of its local rank, else the CPU.

    Raises WorldError if this node has GPUs, but fewer than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and world.launcher in ("srun", "mpirun"):
        return torch.device("cuda", 0)  # these can show each process only its own GPU
    if world.local_size > torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        raise WorldError(
            f"{world.local_size} processes on this host, but {torch.cuda.device_count()} GPUs (CUDA_VISIBLE_DEVICES: {visible}); "
            "start as many processes as GPUs, or hide all GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def open_process_group(world: World, device: torch.device, limit: timedelta | None = None) -> bool:
    """**Collective.** Initializes torch.distributed (NCCL on GPUs, Gloo on CPUs) and the variables that libraries read.

    Returns False if an earlier engine has done so (:func:`shared`). ``limit``: timeout of a collective
    (``Plan.collective_limit``); None: the backend's default. Raises WorldError if the port is in use, if rank 0 cannot
    be reached, and if the program has its own process group.
    """
    global _opened
    if joins():
        return False
    _closed.clear()
    if dist.is_initialized():
        if dist.group.WORLD is not _opened:
            raise WorldError(
                "this program has initialized torch.distributed itself, and dsframe opens its own process group; leave "
                "init_process_group out, or call torch.distributed.destroy_process_group() before"
            )
        _leave()  # in a notebook, after a run that ended with an error
    address, port = rendezvous_address(world)
    # DeepSpeed uses LOCAL_RANK as the index of the GPU. That is 0 for every task of a node if each sees only one GPU
    # (srun --gpus-per-task=1). Under mpirun it asserts that Open MPI's variable is equal.
    on_gpu = device.type == "cuda" and device.index is not None
    local_rank = str(device.index if on_gpu else world.local_rank)
    variables = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": local_rank,
        **({_OPEN_MPI_LOCAL_RANK: local_rank} if _OPEN_MPI_LOCAL_RANK in os.environ else {}),
        "LOCAL_SIZE": str(world.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    os.environ.update(variables)
    # By default torch uses the interface of the hostname, which on many machines does not resolve to their address.
    one_host = world.size == world.local_size
    if interface := "lo" if one_host else interface_to(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = meet(world, address, port)
    with explained(world, address, port):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("dsframe/group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=limit,
            # A single process connects to nobody, and NCCL's initialization has failed there (DeepSpeed's issue 8248).
            device_id=device if on_gpu and world.size > 1 else None,
        )
    _opened = dist.group.WORLD
    phases.done("process group")
    return True


@functools.cache
def rendezvous_address(world: World) -> tuple[str, int]:
    """Returns ``meeting_point``, computed once: in a second run a rank could read rank 0's answer to the first.

    On one node the address is the loopback, whatever the launcher gives, unless the launcher itself listens there.
    """
    address, port = meeting_point(world)
    return ("127.0.0.1" if world.size == world.local_size and not _agent_serves() else address), port


def _agent_serves() -> bool:
    """True if torchrun serves a store itself, which it keeps when it restarts the workers."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@functools.cache
def _store(address: str, port: int, size: int, serves: bool, limit: timedelta) -> TCPStore:
    """Returns one store for all rendezvous: otherwise early ranks would find rank 0's server of an earlier one.

    If ``address`` is not an address of this node (``::1``, or a name that it resolves to 127.0.1.1), torch's own server
    is used, which listens on every interface, including IPv6.
    """
    listening = listener(address, port) if serves else None
    descriptor = listening.detach() if listening else None
    return TCPStore(address, port, size, serves, timeout=limit, wait_for_workers=False, master_listen_fd=descriptor)


def meet(world: World, address: str, port: int, line: timedelta | None = None) -> Store:
    """**Collective.** Returns an unused store shared by all ranks, when all have arrived.

    ``line``: use a separate connection with this timeout, for a thread that must not wait for others. Raises WorldError
    on every rank if one does not arrive in time, naming it; also if the port is in use or rank 0 cannot be reached.
    """
    limit = _limit()
    serves = world.is_main and not _agent_serves()
    # If torchrun keeps no store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), each start has a different port, and the
    # restart count must not be used: a node that joins later counts from 0 (torch 2.13, measured).
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _agent_serves() else "0"
    with explained(world, address, port):
        tcp = _store(address, port, world.size, serves, limit)
        prefix = f"dsframe/{attempt}/{next(_meetings)}"
        store = PrefixStore(prefix, tcp)
        store.set(f"here/{world.rank}", socket.gethostname())
        store.add("arrived", 1)
        if world.is_main:
            store.set("absent", _absent(store, world, limit))
        store.wait(["absent"], 2 * limit)
        absent = store.get("absent").decode()
        if line is not None:
            store = PrefixStore(
                prefix, TCPStore(address, port, world.size, False, timeout=line, wait_for_workers=False)
            )
    if absent:
        time.sleep(2.0 * serves)  # the others must read it from this process first
        raise WorldError(
            f"{absent} of {world.size} did not arrive within {limit.total_seconds():.0f} s; did the launcher start it, and can "
            f"its host reach {address}:{port}? {LIMIT_VARIABLE} sets another limit, in seconds"
        )
    return store


def _limit() -> timedelta:
    text = os.environ.get(LIMIT_VARIABLE, str(MEETING_SECONDS))
    try:
        limit = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        limit = timedelta(0)
    if limit <= timedelta(0):
        raise WorldError(f"{LIMIT_VARIABLE}={text!r} is not a number of seconds; write for example 300")
    return limit


def _absent(store: Store, world: World, limit: timedelta) -> str:
    """Returns the ranks that have not arrived in time: ``rank 1`` or ``ranks 1, 3``; empty if all have."""
    end = time.monotonic() + limit.total_seconds()
    while store.add("arrived", 0) < world.size:  # one request, for any number of ranks
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    else:
        return ""
    missing = [rank for rank in range(world.size) if not store.check([f"here/{rank}"])]
    return numbered(missing) if missing else ""


@contextmanager
def explained(world: World, address: str, port: int) -> Iterator[None]:
    """Encloses a rendezvous at ``address``: raises WorldError, with the remedy, if torch's store fails."""
    taken = (
        f"port {port} on {address} is in use, perhaps by another job; choose another: "
        "deepspeed --master_port=..., torchrun --master_port=..., or MASTER_PORT"
    )
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise WorldError(taken) from None
        raise WorldError(f"rank {world.rank} cannot reach rank 0 at {address}:{port}: {error}") from None
    except dist.DistStoreError as error:
        raise WorldError(
            f"rank {world.rank}: not all {world.size} processes met at {address}:{port}: {error}"
        ) from None
    except OSError as error:  # of this process's own listener
        why = (
            taken if error.errno == errno.EADDRINUSE else f"rank 0 cannot listen at {address}:{port}: {error.strerror}"
        )
        raise WorldError(why) from None


def extend_limits(limit: timedelta) -> None:
    """Sets the timeout of all groups of this process; those created by libraries have the backend's default."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            # torch 2.15 has the public name.
            (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(limit, group)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """**Collective.** Returns the element-wise sum over all ranks; does not change ``values``."""
    total = values.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """**Collective.** Returns the tensors of all ranks of ``group``, which must be contiguous and of one shape."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, tensor, group)
    return tensors


def close_process_group() -> None:
    """**Collective.** Waits for the others and leaves; without this some runs end in SIGABRT (facts, section 10)."""
    if stays_open():
        return
    if dist.is_initialized():
        dist.barrier()
        _leave()


def _leave() -> None:
    _closed.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
