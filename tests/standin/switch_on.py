"""Gives ``torch.cuda`` the stand-in's devices: imported right after torch (``site/``), before anybody asks for GPUs."""

from __future__ import annotations

import os
import sys
import threading
import types
from pathlib import Path
from typing import NamedTuple

import torch
import torch.cuda
import torch.distributed as dist

_path = os.environ["DSFRAME_STANDIN"]
NAME = Path(_path).stem


def _load():
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(NAME, _path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device = _load()


class Event(NamedTuple):
    """One wait of the host ("wait"), or one copy ("to device", "to host")."""

    what: str
    detail: str
    where: str
    """File and line of the innermost frame that is not torch's own."""
    phase: str
    """What the process was doing: ``phase`` at that time."""
    thread: str
    """The name of the thread."""


events = []
phase = ""
_OWN = (f"{os.sep}torch{os.sep}", f"{os.sep}contextlib.py", __file__)


def _where():
    frame = sys._getframe(3)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _OWN):
            return f"{'/'.join(Path(name).parts[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "(a thread of torch)"


def _event_of(what, detail):
    return Event(what, detail, _where(), phase, threading.current_thread().name)


device.observe(lambda what, detail: events.append(_event_of(what, detail)))


def usage(index=None):
    """Bytes that are live on a device, and the most that were at once since the last reset."""
    live, peak, _ = device.usage(_index(index))
    return live, peak


def _index(given=None):
    if isinstance(given, int):
        return given
    index = None if given is None else torch.device(given).index
    return device.current_device() if index is None else index


class _Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **of_stream):
        if of_stream:
            return torch.Stream.__new__(cls, **of_stream)
        return torch.Stream.__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)


def _event(enable_timing=False, blocking=False, interprocess=False, **_):
    return torch.Event(device="cuda", enable_timing=enable_timing)


class _OfCurrentDevice:
    def __init__(self, given):
        self._wanted, self._before = _index(given), -1

    def __enter__(self):
        self._before = device.current_device()
        if self._wanted >= 0:
            device.set_device(self._wanted)

    def __exit__(self, *_):
        device.set_device(self._before)


class _OfCurrentStream:
    def __init__(self, stream):
        self._wanted, self._before = stream, None

    def __enter__(self):
        self._before = torch.cuda.current_stream()
        if self._wanted is not None:
            torch.accelerator.set_stream(self._wanted)

    def __exit__(self, *_):
        torch.accelerator.set_stream(self._before)


MEMORY_BYTES = 80 << 30


def _stream_of(given=None):
    return torch.accelerator.current_stream(torch.device("cuda", _index(given)))


def _properties(given=None):
    return types.SimpleNamespace(
        name="Stand-in", total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=132, uuid="0", is_integrated=False,
        warp_size=32, gcnArchName="", L2_cache_size=1 << 25, max_threads_per_multi_processor=2048,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536,
    )  # fmt: skip


def _statistics(given=None):
    live, peak, allocations = device.usage(_index(given))
    return {
        "num_alloc_retries": 0,
        "allocated_bytes.all.current": live,
        "allocated_bytes.all.peak": peak,
        "allocation.all.allocated": allocations,
    }


def _generator(given=None):
    return device.default_generator(_index(given))


def _functions():
    def live(given=None):
        return int(device.usage(_index(given))[0])

    def peak(given=None):
        return int(device.usage(_index(given))[1])

    def reset(given=None):
        device.reset_peak(_index(given))

    def every():
        return range(device.device_count())

    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": device.device_count,
        "current_device": device.current_device,
        "set_device": lambda given: device.set_device(_index(given)),
        "device": _OfCurrentDevice,
        "_DeviceGuard": _OfCurrentDevice,
        "synchronize": lambda device_=None: device.synchronize(),
        "Stream": _Stream,
        "Event": _event,
        "stream": _OfCurrentStream,
        "StreamContext": _OfCurrentStream,
        "current_stream": _stream_of,
        "default_stream": lambda given=None: torch.Stream(
            stream_id=0, device_index=_index(given), device_type=int(torch._C._autograd.DeviceType.CUDA)
        ),
        "set_stream": lambda stream: torch.accelerator.set_stream(stream),
        "memory_allocated": live,
        "memory_reserved": live,
        "memory_cached": live,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "max_memory_cached": peak,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "reset_max_memory_cached": lambda given=None: None,
        "reset_accumulated_memory_stats": lambda given=None: None,
        "memory_stats": _statistics,
        "mem_get_info": lambda given=None: (MEMORY_BYTES - live(given), MEMORY_BYTES),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "get_rng_state": lambda given="cuda": _generator(given).get_state(),
        "set_rng_state": lambda state, given="cuda": _generator(given).set_state(state),
        "get_rng_state_all": lambda: [_generator(index).get_state() for index in every()],
        "set_rng_state_all": lambda states: [_generator(index).set_state(one) for index, one in enumerate(states)],
        "manual_seed": lambda seed: _generator().manual_seed(seed),
        "manual_seed_all": lambda seed: [_generator(index).manual_seed(seed) for index in every()],
        "seed": lambda: _generator().seed(),
        "initial_seed": lambda: _generator().initial_seed(),
        "get_device_name": lambda given=None: "Stand-in",
        "get_device_capability": lambda given=None: (9, 0),
        "get_device_properties": _properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_arch_list": lambda: ["sm_90"],
        "is_current_stream_capturing": lambda: False,
    }


def _patch_cuda():
    for name, function in _functions().items():
        setattr(torch.cuda, name, function)
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, function)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, function)
    torch.cuda.default_generators = tuple(device.default_generator(index) for index in range(device.device_count()))
    core = torch._C
    core._cuda_isCurrentStreamCapturing = lambda: False
    core._cuda_getDeviceCount = device.device_count
    core._cuda_getCurrentRawStream = lambda index: 0
    torch.cuda.nccl.version = lambda: (2, 27, 5)
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, lambda *_, **__: 0)
    torch.version.cuda = "12.8"  # hooks of DistributedDataParallel for bfloat16 ask for it


def _patch_storages():
    """Python's storages are made and resized without the dispatcher."""
    storage = torch.UntypedStorage
    make, resize = storage.__new__, storage.resize_

    def made(cls, *size, device=None, **more):
        if device is not None and torch.device(device).type == "cuda":
            return torch.empty(size[0] if size else 0, dtype=torch.uint8, device=device).untyped_storage()
        return make(cls, *size, **({} if device is None else {"device": device}), **more)

    def resized(self, size):
        if self.device.type != "cuda":
            return resize(self, size)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    storage.__new__, storage.resize_ = made, resized


class _IsNccl(type):
    def __call__(cls, store, rank, size, options):
        return device.over_gloo(dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout), "nccl")

    def __instancecheck__(cls, instance):
        return getattr(instance, "name", lambda: "")() == "nccl"


class ProcessGroupNCCL(metaclass=_IsNccl):
    """A process group that calls itself "nccl"."""

    class Options(types.SimpleNamespace):
        """What torch sets of the true one's."""

        def __init__(self, **given):
            super().__init__(is_high_priority_stream=False, config=types.SimpleNamespace(), **given)


def _patch_distributed():
    ours = dist
    ours.ProcessGroupNCCL = ours.distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    ours.distributed_c10d._NCCL_AVAILABLE = True
    ours.distributed_c10d.is_nccl_available = ours.is_nccl_available = lambda: True
    backend = torch._C._distributed_c10d.Backend
    backend._set_sequence_number_for_group = lambda self: None
    backend._set_default_timeout = lambda self, limit: device.set_timeout(self, limit.total_seconds())
    core = torch._C
    core._nccl_version = lambda: (2 << 32) | (27 << 16) | 5
    core._nccl_version_suffix = lambda: b""


_patch_cuda()
_patch_storages()
_patch_distributed()
