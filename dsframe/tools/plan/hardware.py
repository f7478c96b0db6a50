"""What processes run on: data-sheet figures of a device and of what connects it to others, or a machine's own, measured.

Peaks are the vendors' for dense matrix products. What programs attain of them is one assumption for all devices and all
models, ``COMPUTE_SHARE`` and ``TRANSFER_SHARE``; a measurement (``--calibrate``) replaces it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from dsframe.errors import ConfigError, Problem

COMPUTE_SHARE = 0.5
"""Of the peak, in matrix products. Megatron-LM reports 44 to 52 % on A100 (Narayanan et al. 2021, arXiv 2104.04473, table 1)."""
TRANSFER_SHARE = 0.8
"""Of the bandwidth of memory, links and networks."""


@dataclass(frozen=True)
class Hardware:
    """One kind of machine. Bandwidths are in bytes a second and in one direction, as the data sheet has them."""

    name: str
    memory_bytes: float
    """Of one device."""
    flops_short: float
    """Peak of bf16 and fp16 matrix products, a second."""
    flops_full: float
    """Peak of fp32 ones (TF32 is not used by torch unless asked for)."""
    memory_bandwidth: float
    devices: int
    """In a host."""
    link_bandwidth: float
    """Between devices of a host, of one device."""
    network_bandwidth: float
    """Between hosts, of a whole host."""
    link_latency: float = 3e-6
    """Seconds of one hop inside a host."""
    network_latency: float = 1e-5
    """Seconds of one hop between hosts."""
    host_bandwidth: float = 20e9
    """Between a device and its host's memory (PCIe)."""
    host_memory_bandwidth: float = 25e9
    """Of the host's own memory, of one device's share."""
    host_memory_bytes: float = 128e9
    """Of the host's memory, one device's share."""
    reserved_bytes: float = 0.0
    """What a process takes on its device before it has made a tensor."""
    lazy_memory: bool = False
    """Whether memory that is asked for and never written to costs nothing: true of a CPU's, not of a GPU's."""
    known: Mapping[str, float] = field(default_factory=dict)
    """Measured seconds of one sample's forward and backward pass, by the model's key."""
    alone_share: float = 1.0
    """Seconds that a device computes for while the others of its host are idle, of those while they are busy: cores of one
    processor share its memory, its caches and its clock."""
    fresh_bandwidth: float = math.inf
    """Bytes a second at which large new tensors are first written: a CPU's system hands out their memory page by page each time.
    A GPU's allocator keeps it."""
    compute_share: float = COMPUTE_SHARE
    transfer_share: float = TRANSFER_SHARE

    @property
    def on_cpu(self) -> bool:
        """Whether processes compute, and exchange tensors by Gloo, on the same cores."""
        return self.lazy_memory

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.memory_bytes / 1e9:.3g} GB a device; {self.flops_short / 1e12:.4g} TFLOP/s in 16 bits, "
            f"{self.flops_full / 1e12:.4g} in fp32, {self.compute_share:.0%} of them attained; {self.devices} devices a host with "
            f"{self.link_bandwidth / 1e9:.4g} GB/s between them, hosts with {self.network_bandwidth / 1e9:.4g} GB/s, "
            f"{self.transfer_share:.0%} of it attained"
        )


_H100 = Hardware("h100", 80e9, 989e12, 67e12, 3350e9, 8, 450e9, 400e9, 2e-6, 5e-6, 55e9, 60e9, 250e9, 0.6e9)
_A100 = Hardware("a100", 80e9, 312e12, 19.5e12, 2039e9, 8, 300e9, 200e9, 2e-6, 5e-6, 25e9, 50e9, 250e9, 0.6e9)
_P100 = Hardware("p100", 16e9, 21.2e12, 10.6e12, 732e9, 4, 12e9, 3.125e9, 5e-6, 1e-5, 12e9, 15e9, 64e9, 0.4e9)
TABLE: Mapping[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        # DGX H100 and HGX H200: NVLink 4, eight 400 Gb/s adapters; DGX A100: NVLink 3, eight 200 Gb/s adapters.
        _H100,
        replace(_H100, name="h200", memory_bytes=141e9, memory_bandwidth=4800e9),
        _A100,
        replace(_A100, name="a100-40gb", memory_bytes=40e9, memory_bandwidth=1555e9),
        # DGX-1 and DGX-2: NVLink 2, four 100 Gb/s adapters.
        Hardware("v100", 32e9, 125e12, 15.7e12, 900e9, 8, 150e9, 50e9, 3e-6, 5e-6, 12e9, 20e9, 64e9, 0.5e9),
        # The cluster of the Horovod paper (Sergeev and Del Balso 2018, arXiv 1802.05799): 4 P100 a server, 25 Gb/s RoCE.
        _P100,
        # Two cores and Gloo over the loopback interface: an order of magnitude only; --calibrate measures.
        Hardware("cpu", 8e9, 5e10, 1e11, 10e9, 2, 1e9, 1e9, 1e-4, 2e-4, 10e9, 10e9, 8e9, 0.4e9, True),
    )
}
UNKNOWN = "unknown"
"""Name of a machine of which only the kind of memory is known."""


def unknown(*, on_gpu: bool) -> Hardware:
    """For memory alone: its times mean nothing."""
    return replace(TABLE["a100" if on_gpu else "cpu"], name=UNKNOWN, reserved_bytes=0.0, memory_bytes=float("inf"))


def find(name: str) -> Hardware:
    """A name of TABLE, or a JSON file with the fields of :class:`Hardware`. Raises ConfigError."""
    if name in TABLE:
        return TABLE[name]
    path = Path(name)
    if path.suffix != ".json":
        message, remedy = f'no hardware "{name}"', f"there are {', '.join(TABLE)}, or a .json file"
        raise ConfigError([Problem("error", "", message, remedy, "--hardware", code="hardware")])
    try:
        return Hardware(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        problem = Problem("error", "", f"cannot be read as hardware: {error}", "", str(path), code="hardware")
        raise ConfigError([problem]) from None


def of_gpu(name: str) -> Hardware | None:
    """The entry of TABLE for a GPU by the name that its driver gives it ("NVIDIA A100-SXM4-40GB"); None where there is none.

    A share of a GPU (MIG) is none of them: its name ends with its size ("NVIDIA A100-SXM4-80GB MIG 1g.10gb").
    """
    words = re.split(r"[^a-z0-9.]+", name.lower())
    if "mig" in words:
        return None
    for machine in sorted(TABLE.values(), key=lambda one: -len(one.name)):  # "a100-40gb" before "a100"
        if all(part in words for part in machine.name.split("-")):
            return machine
    return None


def write(hardware: Hardware, path: Path) -> None:
    """As :func:`find` reads it."""
    path.write_text(json.dumps(asdict(hardware), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Group:
    """Ranks that exchange tensors, in rings (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002)."""

    size: int
    latency: float
    """Seconds of the slowest hop."""
    bandwidth: float
    """Bytes a second that each hop attains."""

    def all_reduce(self, size: float, calls: float = 1) -> float:
        """Seconds for ``size`` bytes in ``calls`` pieces."""
        return 2 * self.pass_round(size, calls)

    def pass_round(self, size: float, calls: float = 1) -> float:
        """An all-gather or a reduce-scatter."""
        hops = self.size - 1
        return 0.0 if hops == 0 else calls * hops * self.latency + size * hops / self.size / self.bandwidth


def group(hardware: Hardware, size: int, stride: int, world_size: int) -> Group:
    """``size`` ranks that lie ``stride`` apart, in a job of ``world_size``, whose hosts are full.

    A ring over several hosts passes each host once for each of its ranks; groups with other ranks share the network.
    """
    here = min(hardware.devices, world_size)
    inside = max(1, here // stride)
    if size <= inside:
        return Group(size, hardware.link_latency, hardware.link_bandwidth * hardware.transfer_share)
    network = hardware.network_bandwidth * inside / hardware.devices
    slowest = min(network, hardware.link_bandwidth) if inside > 1 else network
    return Group(size, hardware.network_latency, slowest * hardware.transfer_share)
