"""``dsframe doctor``: what it says of libraries that are absent or broken; and what killed runs leave."""

import mmap
import os
from types import SimpleNamespace

import pytest

from dsframe.host.leftovers import host, is_shared, stale_locks, unused_buffers, unused_swap
from dsframe.tools import doctor
from dsframe.tools.launch import devices


def lock_in(cache):
    lock = cache / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def test_a_lock_is_stale_when_nobody_has_it_open(tmp_path):
    lock = lock_in(tmp_path)
    with lock.open():
        assert stale_locks(tmp_path) == []
    assert stale_locks(tmp_path) == [lock]


@pytest.mark.parametrize("name", ["deepspeed_allreduce_buffer_0_127.0.0.1_29500_0", "vader_segment.host.0.262c0001.1"])
def test_a_buffer_is_unused_when_nobody_has_it_mapped(tmp_path, name):
    buffer = tmp_path / name
    buffer.write_bytes(bytes(4096))
    (tmp_path / "another").touch()
    with buffer.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    assert unused_buffers(tmp_path) == []
    mapped.close()
    assert unused_buffers(tmp_path) == [buffer]


FACTS = {"Gloo": True, "NCCL": False, "cuda": None, "gpus": []}


def test_what_may_be_anothers_is_left_alone(tmp_path, monkeypatch):
    mine, ended = (tmp_path / f"dsframe-{host()}-{process}-00000000" for process in (os.getpid(), 99999999))
    mine.mkdir()
    ended.mkdir()
    assert unused_swap(tmp_path) == [ended]
    (tmp_path / "vader_segment.a").touch()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert unused_buffers(tmp_path) == []
    mount = SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4")
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [mount])
    assert [is_shared(tmp_path / name) for name in ("another", host())] == [True, False]


@pytest.mark.parametrize("nccl", [False, True])
def test_a_horovod_without_nccl_is_named_where_there_are_gpus(nccl):
    torch = doctor.Library("torch", "2.13.0", {"cuda": "12.9", "gpus": [["G1", 3 << 30]]})
    libraries = {"torch": torch, "horovod": doctor.Library("horovod", "0.28.1", {"NCCL": nccl})}
    assert "  ok  GPU G1, 3.0 GiB" in map(str, doctor.machine(torch))
    said = "".join(map(str, doctor.engines(libraries)))
    assert ("horovod on GPUs: needs Horovod compiled with NCCL" in said) == (not nccl)


def test_a_library_is_asked_in_another_process(monkeypatch):
    assert doctor.probe("no_such_library") is None
    monkeypatch.setitem(doctor.PROBES, "torch", "raise SystemExit('first\\nlast')")
    assert doctor.probe("torch").broken == "last"
    monkeypatch.setitem(doctor.PROBES, "torch", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0.01)
    assert doctor.probe("torch").broken == "no answer within 0 s"


def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch, tmp_path):
    torch = doctor.Library("torch", "2.13.0+cpu", FACTS)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    monkeypatch.setattr(doctor, "ENOUGH_SHARED_MEMORY", 1 << 60)
    lines = [str(line) for line in doctor.machine(torch)]
    assert "/dev/shm is small" in "".join(lines)
    assert "  !!  no GPU: this torch is a build for CPUs, but there is one" in lines
