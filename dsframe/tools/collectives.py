"""How fast the processes of this host exchange tensors: two of them, over each transport that is there.

``dsframe doctor --comm`` prints it. Each transport is measured in processes of its own (``python -m dsframe.tools.collectives``),
so that one that hangs or dies says so and the others are measured all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.cluster.rendezvous import free_port

if TYPE_CHECKING:
    from torch import Tensor

PROCESSES = 2
LATENCY_BYTES = 8
SIZES_BYTES = (2**16, 2**20, 2**23, 2**26)
REPEATS = {LATENCY_BYTES: 100, 2**16: 20, 2**20: 20, 2**23: 7, 2**26: 5}
"""Medians of so many, after a tenth as many (at least 2) that do not count."""
LIMIT_SECONDS = 120.0
BARRIER = "barrier"
_QUIETLY = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Timing:
    """One collective over one transport."""

    collective: str
    seconds: dict[int, float]
    """Median time by size in bytes of the whole tensor: what a rank ends with (all_gather) or starts with (the others). A
    barrier has none but the smallest."""

    def __str__(self) -> str:
        rates = "".join(f"{rate:>14.2f}" for rate in self.rates.values())
        return f"{self.collective:<16}{self.seconds[LATENCY_BYTES] * 1e6:>12,.0f}{rates}"

    @property
    def rates(self) -> dict[int, float]:
        """Size in bytes -> GB/s."""
        return {size: size / self.seconds[size] / 1e9 for size in SIZES_BYTES if size in self.seconds}


def _named(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


HEADER = f"{'':<16}{'8 B, us':>12}" + "".join(f"{_named(size) + ', GB/s':>14}" for size in SIZES_BYTES)


def measure(transport: str) -> list[Timing] | str:
    """Starts two processes that measure ``transport``; their timings, or why there are none.

    ``transport``: gloo, nccl (torch.distributed), horovod-gloo, horovod-mpi or horovod-nccl.
    """
    own_part = [sys.executable, "-m", "dsframe.tools.collectives", transport]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "timings.json")
        if transport.startswith("horovod-"):
            controller = {"horovod-mpi": ["--mpi"]}.get(transport, ["--gloo"])
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
            environment = os.environ | _QUIETLY | {"PATH": path}
            commands = [["horovodrun", *controller, "-np", str(PROCESSES), *own_part, "--out", str(result)]]
            failure = _run(commands, [environment], Path(folder, "log"))
        else:
            commands = [[*own_part, "--out", str(result)]] * PROCESSES
            failure = _run(commands, _environments(PROCESSES), Path(folder, "log"))
        if failure or not result.exists():
            return failure or "it left no timings"
        return [
            Timing(name, {int(size): value for size, value in seconds.items()})
            for name, seconds in json.loads(result.read_text()).items()
        ]


def _environments(processes: int) -> list[dict[str, str]]:
    """The variables of each rank, as torch's launcher sets them."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    return [os.environ | _QUIETLY | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _run(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], log: Path) -> str | None:
    """Runs the commands side by side; None, or the last line of what went wrong."""
    with log.open("wb") as file:
        started = [
            subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
            for command, environment in zip(commands, environments, strict=True)
        ]
        limit = time.monotonic() + LIMIT_SECONDS
        try:
            codes = [process.wait(timeout=max(0.0, limit - time.monotonic())) for process in started]
        except subprocess.TimeoutExpired:
            return f"no answer within {LIMIT_SECONDS:.0f} s"
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if any(codes):
        lines = log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit codes {codes}"
    return None


Prepared = Callable[[], object]
"""One call of a collective, with its tensors ready; it returns when this rank has its result."""


@dataclass(frozen=True)
class Transport:
    """An open way of exchanging tensors."""

    rank: int
    collectives: dict[str, Callable[[Tensor], Prepared]]
    """By name: makes, from the whole flat tensor, the call to be timed."""
    close: Callable[[], None]


def open_torch(backend: str) -> Transport:
    """**Collective.** torch.distributed over ``gloo`` or ``nccl``."""
    import torch.distributed as dist

    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend)
    rank = dist.get_rank()

    return Transport(
        rank,
        {
            "all_reduce": lambda whole: lambda: dist.all_reduce(whole),
            "broadcast": lambda whole: lambda: dist.broadcast(whole, 0),
            "all_to_all": lambda whole: partial(dist.all_to_all_single, whole.clone(), whole),
            "all_gather": lambda whole: partial(dist.all_gather, list(whole.chunk(PROCESSES)), _own_part(whole)),
            "reduce_scatter": lambda whole: partial(
                dist.reduce_scatter, _own_part(whole), list(whole.chunk(PROCESSES))
            ),
            BARRIER: lambda whole: dist.barrier,
        },
        dist.destroy_process_group,
    )


def open_horovod() -> Transport:
    """**Collective.** Horovod, over what ``horovodrun`` was told to use."""
    import horovod.torch as hvd

    hvd.init()
    return Transport(
        int(hvd.rank()),
        {
            "all_reduce": lambda whole: lambda: hvd.allreduce_(whole, op=hvd.Sum, name="all_reduce"),
            "broadcast": lambda whole: lambda: hvd.broadcast_(whole, root_rank=0, name="broadcast"),
            "all_gather": lambda whole: partial(hvd.allgather, _own_part(whole), name="all_gather"),
            "reduce_scatter": lambda whole: lambda: hvd.reducescatter(whole, op=hvd.Sum, name="reduce_scatter"),
            "all_to_all": lambda whole: partial(hvd.alltoall, whole, name="all_to_all"),
            BARRIER: lambda whole: hvd.barrier,
        },
        hvd.shutdown,
    )


def _own_part(whole: Tensor) -> Tensor:
    """A rank's share of a flat tensor, with memory of its own."""
    return whole[: whole.numel() // PROCESSES].clone()


def main(argv: Sequence[str] | None = None) -> int:
    """**Collective.** Measures one transport as one of its processes; rank 0 writes the medians to ``--out``."""
    parser = argparse.ArgumentParser(prog="dsframe.tools.collectives")
    parser.add_argument("transport")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args(argv)

    import torch

    torch.set_num_threads(1)
    on_gpu = options.transport.endswith("nccl")
    transport = open_horovod() if options.transport.startswith("horovod-") else open_torch(options.transport)
    if on_gpu:
        torch.cuda.set_device(transport.rank)
    timings: dict[str, dict[int, float]] = {}
    for name, prepare in transport.collectives.items():
        timings[name] = {}
        for size, repeats in REPEATS.items():
            if name == BARRIER and size > LATENCY_BYTES:
                break
            call = prepare(torch.zeros(size // 4, device="cuda" if on_gpu else "cpu"))
            seconds = _median_seconds(call, repeats, torch.cuda.synchronize if on_gpu else lambda: None)
            timings[name][size] = seconds
    transport.close()
    if transport.rank == 0:
        options.out.write_text(json.dumps(timings))
    return 0


def _median_seconds(call: Prepared, repeats: int, wait_for_device: Callable[[], object]) -> float:
    times = []
    for _ in range(repeats + max(2, repeats // 10)):
        wait_for_device()
        began = time.perf_counter()
        call()
        wait_for_device()
        times.append(time.perf_counter() - began)
    return statistics.median(times[-repeats:])


if __name__ == "__main__":
    sys.exit(main())
