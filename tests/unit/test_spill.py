"""A model that is built in files is the model that is built in memory, to the bit, and leaves nothing behind."""

import copy
import os
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from dsframe.model import spill
from dsframe.model.spill import Spill, is_disk


class Tied(nn.Module):
    """What constructors do: apply, ties, buffers, a frozen parameter, a child's weight filled again by its parent, deep copies."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
        self.copies = nn.ModuleList(copy.deepcopy(self.body) for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        self.register_buffer("positions", torch.randn(8, 32))
        self.apply(self._init)
        nn.init.orthogonal_(self.body[0].weight)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(32, 32), requires_grad=False)

    def _init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)


def test_the_model_is_the_same_to_the_bit(tmp_path):
    torch.manual_seed(3)
    whole = Tied()
    after = torch.rand(1)
    torch.manual_seed(3)
    files = Spill(tmp_path, least_bytes=1, window_bytes=1 << 12)
    with files.building():
        built = Tied()
    assert torch.equal(torch.rand(1), after), "the generator stands elsewhere"
    for parameter in built.parameters():
        files.move(parameter)
    files.evict()
    expected, found = dict(whole.named_parameters()), dict(built.named_parameters())
    assert list(expected) == list(found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [p.requires_grad for p in found.values()] == [p.requires_grad for p in expected.values()]
    assert len(files._mapped) >= len(found)  # every one lies in a file
    assert list(tmp_path.iterdir()) == []  # without a name
    files.close()
    assert not any(files._holds(parameter.data) for parameter in built.parameters())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("window", "share", "kept"), [(1 << 10, 0.0, 1), (4 << 10, 0.0, 4), (1 << 10, 0.5, 4)])
def test_the_newest_stay_in_memory(window, share, kept, tmp_path):
    files = Spill(tmp_path, least_bytes=1, window_bytes=window, share=share)
    with files.building():
        model = nn.ParameterList(torch.randn(16, 16) for _ in range(8))  # 1 KiB each
    for parameter in model:  # the engine adds what it finds in the model: nothing that is known moves
        files.add(parameter)
    assert [files._holds(parameter.data) for parameter in model] == [True] * (8 - kept) + [False] * kept


def test_what_is_gone_counts_no_more(tmp_path):
    """Python gives ids of freed parameters to new ones."""
    files = Spill(tmp_path, least_bytes=1 << 10, window_bytes=1 << 10)
    gone, again, last = (nn.Parameter(torch.ones(16, 16)) for _ in range(3))
    files.add(gone)
    files._newest[id(again)] = files._newest.pop(id(gone))
    files.add(again)
    assert not files._holds(again.data), "the newest"
    files.add(last)
    assert files._holds(again.data)


def test_what_another_tensor_looks_at_stays_in_memory(tmp_path):
    """A constructor may keep a view of a weight, and fill that one later."""

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.ones(16, 16))
            half = self.first.data[:8]
            self.others = nn.ParameterList(torch.ones(16, 16) for _ in range(4))
            half.zero_()

    files = Spill(tmp_path, least_bytes=1, window_bytes=1 << 10)
    with files.building():
        model = Viewed()
    assert float(model.first.detach().sum()) == 128
    assert files._holds(model.others[0].data)


def test_what_is_freed_is_never_zeroed(tmp_path):
    """An address that was unmapped is soon another tensor's: madvise on it would fill that with zeros."""
    files = Spill(tmp_path, least_bytes=1)
    others = []
    for _ in range(20):
        parameter = nn.Parameter(torch.ones(1 << 18))
        files.move(parameter)
        parameter.data = torch.empty(0)
        others.append(torch.full((1 << 18,), 7.0))
        files.evict()
    assert all(bool((other == 7).all()) for other in others)


def test_a_folder_of_an_unknown_file_system_is_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "major", lambda device: -1)
    assert not is_disk(tmp_path)


def test_a_model_is_built_where_a_disk_is(tmp_path, monkeypatch):
    assert is_disk(tmp_path / "a" / "b") == is_disk(tmp_path)
    places = (Path(tempfile.gettempdir()), tmp_path)
    for disks, chosen in ((places, places[0]), (places[1:], tmp_path), ((), None)):
        monkeypatch.setattr(spill, "is_disk", disks.__contains__)
        assert [spill.on_disk(tmp_path, ranks).folder for ranks in (1, 4)] == [chosen] * 2
    monkeypatch.setattr(spill, "is_disk", bool)
    assert [spill.on_disk(tmp_path, ranks)._share for ranks in (1, 4)] == [0.0, 0.25]


def test_pages_are_given_back(tmp_path):
    if not is_disk(tmp_path):
        pytest.skip("the temporary folder lies in memory")
    files = Spill(tmp_path)
    parameters = [nn.Parameter(torch.ones(1 << 22)) for _ in range(4)]  # 16 MiB each
    for parameter in parameters:
        files.move(parameter)
    files.evict()
    before = resident_file_bytes()
    assert all(float(parameter.detach().sum()) == 1 << 22 for parameter in parameters)
    read = resident_file_bytes()
    files.evict()
    assert read - before > 60 << 20
    assert resident_file_bytes() - before < 8 << 20


def test_pages_are_given_back_when_they_are_more_than_the_window(tmp_path):
    files = Spill(tmp_path, window_bytes=100)
    counted = []
    for size in (60, 60):
        files.touched(size)
        counted.append(files._fresh)
    assert counted == [60, 0]


def resident_file_bytes():
    status = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(("RssFile", "RssShmem")))


def test_a_part_of_a_larger_tensor_stays_one(tmp_path):
    both = torch.zeros(2, 64)
    first = nn.Parameter(both[0])
    Spill(tmp_path, least_bytes=1).move(first)
    both += 1
    assert bool((first == 1).all())


def test_what_lies_on_a_device_stays_there(tmp_path):
    parameter = nn.Parameter(torch.empty(64, device="meta"))
    Spill(tmp_path, least_bytes=1).move(parameter, torch.bfloat16)
    assert (parameter.device.type, parameter.dtype) == ("meta", torch.float32)


def test_a_cast_weight_lies_in_a_file_whatever_its_layout(tmp_path):
    files, opened = Spill(tmp_path, least_bytes=1), psutil.Process().num_fds()
    parameter = nn.Parameter(torch.randn(8, 16).T)
    expected = parameter.detach().bfloat16()
    files.move(parameter, torch.bfloat16)
    assert files._holds(parameter.data)
    assert torch.equal(parameter.data, expected)
    assert psutil.Process().num_fds() == opened
    assert files.converted(expected, torch.bfloat16) is expected


def test_what_is_fetched_lies_in_memory(tmp_path):
    """Else training would write each update into the file."""
    files = Spill(tmp_path, least_bytes=1)
    parameter = nn.Parameter(torch.randn(64, 64))
    expected = parameter.detach().bfloat16()
    files.move(parameter, torch.bfloat16)
    mapped = parameter.data
    files.fetch(parameter)
    parameter.data += 1
    assert torch.equal(mapped, expected)
    files.fetch(parameter, torch.float32)
    assert torch.equal(parameter.data, (expected + 1).float())
