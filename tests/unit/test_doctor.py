"""``dsframe doctor``: what it says of libraries that are absent or broken, and what it finds and removes of old runs."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsframe.errors import DataError
from dsframe.host.leftovers import host, stale_locks, unused_buffers
from dsframe.tools import doctor
from dsframe.tools.launch import devices


def lock_in(cache: Path) -> Path:
    lock = cache / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def test_a_lock_is_stale_when_nobody_has_it_open(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    with lock.open():
        assert stale_locks(tmp_path) == []
    assert stale_locks(tmp_path) == [lock]


@pytest.mark.parametrize("name", ["deepspeed_allreduce_buffer_0_127.0.0.1_29500_0", "vader_segment.host.0.262c0001.1"])
def test_a_buffer_is_unused_when_nobody_has_it_mapped(tmp_path: Path, name: str) -> None:
    buffer = tmp_path / name
    buffer.write_bytes(bytes(4096))
    (tmp_path / "another").touch()
    with buffer.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    assert unused_buffers(tmp_path) == []
    mapped.close()
    assert unused_buffers(tmp_path) == [buffer]


def test_finds_and_cleans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))  # not where other runs of this machine leave things
    buffer = tmp_path / "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0"
    buffer.write_bytes(bytes(2**20))
    monkeypatch.setattr(doctor, "unused_buffers", lambda: unused_buffers(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero3.json").write_text('{"offload_param": {"device": "nvme", "nvme_path": "swap"}}')
    dead, alive = (tmp_path / "swap" / f"dsframe-{host()}-{pid}-0123abcd" for pid in (2**22 + 1, os.getpid()))
    dead.mkdir(parents=True)
    alive.mkdir()
    lock = lock_in(tmp_path)
    what = f"the lock of a killed build, for which every run would wait: {lock}"
    assert [str(line) for line in doctor.leftovers(clean=False)] == [
        f"  !!  found {what}; dsframe doctor --clean",
        "  !!  found 1 buffers of killed runs in /dev/shm, 0.0 GiB of memory; dsframe doctor --clean",
        f"  !!  found offloaded state of a killed run: {Path('swap', dead.name)}; dsframe doctor --clean",
    ]
    assert lock.exists()
    cleaned = [str(line) for line in doctor.leftovers(clean=True)]
    assert cleaned[0] == f"  ok  removed {what}"
    assert not lock.exists()
    assert not buffer.exists()
    assert (dead.exists(), alive.exists()) == (False, True)
    assert [line.state for line in doctor.leftovers(clean=False)] == ["ok"]


def test_a_buffer_that_goes_away_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "unused_buffers", lambda: [tmp_path / "gone"])
    monkeypatch.setattr(doctor, "swap_places", list)
    assert any("found 1 buffers" in str(line) for line in doctor.leftovers(clean=False))


def test_what_is_absent_comes_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda name, code: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: None)
    torch = doctor.Library("torch", "2.13.0", {"gloo": True, "nccl": False, "cuda": None, "gpus": []})
    lines = [str(line) for line in (*doctor.engines(torch, None), *doctor.launchers(), *doctor.operators())]
    assert "  --  deepspeed: not installed; pip install 'dsframe[deepspeed]'" in lines
    assert "  --  horovod: not installed; rm -r .setup && make setup" in lines
    assert "  --  mpirun: not found; apt-get install openmpi-bin" in lines
    assert "  --  CPU optimizers (offload without torch_adam): no g++ (apt-get install g++)" in lines


def test_a_user_of_the_wheel_is_told_what_a_wheel_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They have no Makefile and no launch/activate."""
    monkeypatch.setattr(doctor, "probe", lambda name, code: None)
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "site-packages" / "dsframe" / "tools" / "doctor.py"))
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: f"/elsewhere/{name}")
    torch = doctor.Library("torch", "2.13.0", {"gloo": True, "nccl": False, "cuda": None, "gpus": []})
    lines = [str(line) for line in (*doctor.engines(torch, None), *doctor.launchers())]
    assert "  --  horovod: not installed; compile it as docs/coming_from/horovod.md says" in lines
    assert '  ok  deepspeed: /elsewhere/deepspeed; DeepSpeed\'s own, without -m: eval "$(dsframe activate)"' in lines
    assert not any("make " in line or "launch/activate" in line for line in lines)


def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = doctor.Library("torch", "2.13.0+cpu", {"gloo": True, "nccl": False, "cuda": None, "gpus": []})
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    lines = [str(line) for line in doctor.machine(torch)]
    assert "  !!  no GPU: this torch is a build for CPUs, but there is one" in lines


def test_a_containers_little_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"total": 64 * 2**20, "used": 0, "free": 64 * 2**20}
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(**sizes))
    (line,) = (str(line) for line in doctor.machine(None) if line.state == "absent")
    assert "/dev/shm has only 64 MiB" in line
    assert line.endswith("docker run --shm-size=2g")
    sizes["total"] = 2**31
    assert [line for line in doctor.machine(None) if line.state == "absent"] == []


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda name, code: None)
    facts = {"gloo": True, "nccl": True, "cuda": "13.0", "gpus": [["NVIDIA H200", 150 * 2**30]]}
    torch = doctor.Library("torch", "2.13.0", facts)
    assert "  ok  GPU NVIDIA H200, 150.0 GiB" in [str(line) for line in doctor.machine(torch)]
    horovod = doctor.Library("horovod", "0.28.1", {"gloo": True, "mpi": True, "nccl": False})
    lines = [str(line) for line in doctor.engines(torch, horovod)]
    assert "  --  horovod on GPUs: needs NCCL; install CUDA's nvcc, then rm -r .setup && make setup" in lines


def test_what_is_near_to_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\nprintf "\\t\\033[4mGPU0\\tGPU1\\033[0m\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n\\nLegend:\\n X = Self\\n"\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    lines = [str(line).split() for line in doctor.topology()]
    assert any(line[0] == "network:" for line in lines)
    assert lines[-3:] == [["GPU0", "GPU1"], ["GPU0", "X", "NV18"], ["GPU1", "NV18", "X"]]
    smi.write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert [str(line).split() for line in doctor.topology()] == lines[:-3]


def test_rates_of_collectives_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsframe.tools import collectives
    from dsframe.tools.collectives import BARRIER, LATENCY_BYTES, SIZES_BYTES, Timing

    sizes = dict.fromkeys((LATENCY_BYTES, *SIZES_BYTES), 0.001)
    timings = [Timing("all_reduce", sizes), Timing(BARRIER, {LATENCY_BYTES: 0.001})]
    monkeypatch.setattr(collectives, "measure", lambda transport: timings)
    torch = doctor.Library("torch", "2.13.0", {"gloo": True, "nccl": False, "cuda": None, "gpus": []})
    doctor.communication(torch, None, tmp_path / "rates.svg")
    drawn = (tmp_path / "rates.svg").read_text()
    assert "gloo: collectives" in drawn
    assert BARRIER not in drawn
    with pytest.raises(DataError, match=r"rates\.words"):
        doctor.communication(torch, None, tmp_path / "rates.words")
