"""What memory a process can still take: of the system, and of its control group."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from dsframe.host import memory

CPU = torch.device("cpu")


def test_the_ranks_of_a_host_share_what_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "none")
    left, total = memory.available_bytes(CPU, 1), psutil.virtual_memory().total
    assert 0 < left < total
    assert memory.available_bytes(CPU, 4) < 0.5 * left


def test_where_the_process_has_no_peak_of_its_own_the_systems_is_in_bytes_too(monkeypatch, tmp_path):
    known = memory.peak_memory_bytes(CPU)
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    assert memory.peak_memory_bytes(CPU) > known / 2


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [("max", "max", None), ("max", "5000", 4000), ("3000", "max", 500), ("max", "900", 0)],
)
def test_a_control_group_may_have_less(outer, inner, expected, monkeypatch, tmp_path):
    own = tmp_path / "job" / "task"
    own.mkdir(parents=True)
    for folder, limit, used in ((own, inner, 1000), (own.parent, outer, 2500)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    (tmp_path / "cgroup").write_text("1:name=systemd:/other\n0::/job/task\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    found = memory.available_bytes(CPU, 1)
    assert found > 1 << 20 if expected is None else found == expected


def test_freed_memory_is_kept_unless_the_user_has_set_malloc(monkeypatch):
    given = []
    libc = SimpleNamespace(mallopt=lambda *values: given.append(values) or True)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: libc)
    assert memory.keep_freed()
    assert given == [(-3, memory.LARGEST), (-1, 2**31 - 1)]
    monkeypatch.setenv("MALLOC_TOP_PAD_", "0")
    assert not memory.give_back()
