"""torch.distributed for the engines that use it: opened from any launcher, closed in every case."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dsframe.errors import WorldError
from dsframe.rendezvous import interface_to, meeting_point
from dsframe.world import World


def device_of(world: World) -> torch.device:
    """This process's device: the GPU of its local rank among those that are visible, else the CPU.

    Raises WorldError where this host has GPUs, but fewer than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and world.launcher in ("srun", "mpirun"):
        return torch.device("cuda", 0)  # they can show each process a GPU of its own
    if world.local_size > torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        raise WorldError(
            f"{world.local_size} processes on this host, but {torch.cuda.device_count()} GPUs (CUDA_VISIBLE_DEVICES: {visible}); "
            "start as many processes as GPUs, or hide all of them (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def open_process_group(world: World, device: torch.device) -> None:
    """**Collective.** Initialises torch.distributed (NCCL on GPUs, Gloo on CPUs) and the variables libraries read.

    Raises WorldError where the port is taken or rank 0 cannot be reached.
    """
    address, port = meeting_point(world)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_SIZE=str(world.local_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    # torch asks for the interface of the host's name, which on many machines does not resolve to an address of its own.
    one_host = world.size == world.local_size
    if device.type == "cpu" and (interface := "lo" if one_host else interface_to(address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    with explained(world, address, port):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=world.rank,
            world_size=world.size,
            device_id=device if device.type == "cuda" else None,
        )


@contextmanager
def explained(world: World, address: str, port: int) -> Iterator[None]:
    """Around a meeting of the processes at ``address``: raises WorldError, with the remedy, where torch's store fails."""
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise WorldError(
                f"port {port} on {address} is in use, perhaps by another job; choose another: "
                "deepspeed --master_port=..., torchrun --master_port=..., or MASTER_PORT"
            ) from None
        raise WorldError(f"rank {world.rank} cannot reach rank 0 at {address}:{port}: {error}") from None
    except dist.DistStoreError as error:
        raise WorldError(
            f"rank {world.rank}: not all {world.size} processes met at {address}:{port}: {error}"
        ) from None


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """**Collective.** Element-wise sum over all ranks; ``values`` itself is left as it is."""
    total = values.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def close_process_group() -> None:
    """**Collective.** Waits for the others and leaves; without this some runs end in SIGABRT (facts, section 10)."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
