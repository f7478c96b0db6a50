"""``dsframe doctor``: what it says of libraries that are absent or broken; and what killed runs leave."""

import mmap
from types import SimpleNamespace

import pytest

from dsframe.host.leftovers import stale_locks, unused_buffers
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
LACKING = {"deepspeed": None, "horovod": None, "torchvision": None}


def test_what_is_absent_comes_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: None)
    torch = doctor.Library("torch", "2.13.0", FACTS)
    found = (*doctor.engines({"torch": torch, **LACKING}), *doctor.launchers())
    lines = [str(line) for line in found]
    assert "  ok  torch 2.13.0 (Gloo, no NCCL)" in lines
    assert "  --  deepspeed: not installed; pip install 'dsframe[deepspeed]'" in lines
    assert "  --  horovod: not installed; compile it as docs/coming_from/horovod.md says" in lines
    assert "  --  mpirun: not found; apt-get install openmpi-bin" in lines


def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch, tmp_path):
    torch = doctor.Library("torch", "2.13.0+cpu", FACTS)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    lines = [str(line) for line in doctor.machine(torch)]
    assert "  !!  no GPU: this torch is a build for CPUs, but there is one" in lines


def test_a_containers_little_shared_memory_is_named(monkeypatch):
    sizes = {"total": 64 * 2**20, "used": 0, "free": 64 * 2**20}
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(**sizes))
    (line,) = (str(line) for line in doctor.machine(None) if line.state == "absent")
    assert line.endswith("docker run --shm-size=2g")
    sizes["total"] = 2**31
    assert [line for line in doctor.machine(None) if line.state == "absent"] == []
