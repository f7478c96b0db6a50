"""The power goes between any two operations on the disk: what had not been forced to it may be there, in part, or not. Where all
of it is there, it is the process that has ended."""

from __future__ import annotations

import os
import random
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dsframe.checkpoint import layout, store
from dsframe.checkpoint.reader import Checkpoint
from dsframe.checkpoint.store import Store
from tests.threads import Room
from tests.unit.test_checkpoint_background import Training, save_step, saver


@dataclass
class Node:
    """A file's bytes or a folder's names, as they are on the disk for sure, and what may still come to it, in order."""

    folder: bool
    content: bytearray = field(default_factory=bytearray)
    names: dict[str, Node] = field(default_factory=dict)
    pending: list[Any] = field(default_factory=list)

    def apply(self, change):
        if self.folder:
            for name, node in change:
                if node is None:
                    self.names.pop(name, None)
                else:
                    self.names[name] = node
        else:
            begin, data = change
            self.content.extend(bytes(max(0, begin + len(data) - len(self.content))))
            self.content[begin : begin + len(data)] = data


class Recorder:
    """Notes every change below a folder, and does it."""

    def __init__(self, root, patch):
        self.root, self.log = (
            root,
            [],
        )  # number of a node, and its change; None: it is forced to the disk
        self.folders = [True]
        self._numbers = {root: 0}
        self.opened = {}
        self._lock = threading.RLock()
        for name in ("open", "pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, self._noting(name, getattr(os, name)))
        patch.setattr(shutil, "rmtree", remove_tree)

    def _noting(self, name, action):
        note = getattr(self, f"_{name}")

        def call(*arguments, **keywords):
            with self._lock:
                result = action(*arguments, **keywords)
                note(result, *arguments)
                return result

        return call

    def _made(self, path, folder):
        if path.parent in self._numbers:
            self._numbers[path] = len(self.folders)
            self.folders.append(folder)
            self.log.append((self._numbers[path.parent], [(path.name, self._numbers[path])]))

    def _open(self, descriptor, path, flags=0, *_):
        self.opened.pop(descriptor, None)  # of a file that was closed
        path = Path(path)
        if path not in self._numbers and flags & os.O_CREAT:
            self._made(path, False)
        if path in self._numbers:
            self.opened[descriptor] = self._numbers[path]

    def _mkdir(self, _, path, *more):
        self._made(Path(path), True)

    def _pwrite(self, count, descriptor, content, begin):
        if descriptor in self.opened:
            self.log.append((self.opened[descriptor], (begin, bytes(content[:count]))))

    def _fsync(self, _, descriptor):
        if descriptor in self.opened:
            self.log.append((self.opened[descriptor], None))

    def _rename(self, _, path, target):
        path, target = Path(path), Path(target)
        if path not in self._numbers:
            return
        moved = {old: number for old, number in self._numbers.items() if old == path or path in old.parents}
        for old, number in moved.items():
            del self._numbers[old]
            self._numbers[target / old.relative_to(path)] = number
        assert path.parent == target.parent
        self.log.append((self._numbers[path.parent], [(path.name, None), (target.name, self._numbers[target])]))

    _replace = _rename

    def _unlink(self, _, path, *more):
        if self._numbers.pop(Path(path), None) is not None:
            self.log.append((self._numbers[Path(path).parent], [(Path(path).name, None)]))

    _rmdir = _unlink


def remove_tree(path, ignore_errors=False):
    for each in sorted(Path(path).rglob("*"), reverse=True):
        each.rmdir() if each.is_dir() else each.unlink()
    if not ignore_errors or Path(path).exists():
        Path(path).rmdir()


def after_cut(recorder, operations, chance, everything):
    """The disk after so many operations: with all that was not forced to it, nothing of it, or what ``chance`` says."""
    nodes = [Node(folder) for folder in recorder.folders]
    for number, change in recorder.log[:operations]:
        node = nodes[number]
        if change is None:
            for each in node.pending:
                node.apply(each)
            node.pending = []
        elif node.folder:
            node.pending.append([(name, None if of is None else nodes[of]) for name, of in change])
        else:
            node.pending.append(change)
    for node in nodes:
        kept = node.pending if everything else []
        if chance is not None and node.folder:
            kept = node.pending[: chance.randint(0, len(node.pending))]
        elif chance is not None:
            kept = [(begin, data[: chance.choice((0, len(data) // 2, len(data)))]) for begin, data in node.pending]
        for each in kept:
            node.apply(each)
    return nodes[0]


def put(node, path):
    path.mkdir()
    for name, each in node.names.items():
        put(each, path / name) if each.folder else (path / name).write_bytes(each.content)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_cut_leaves_whole_checkpoints_alone(asynchronous, tmp_path, monkeypatch):
    """Three saves of two ranks, with one that is removed and a rating; what was whole once stays, until a newer one is."""
    monkeypatch.setattr(layout, "PIECE_BYTES", 500)  # both ranks write
    run, whole_after = tmp_path / "run", {}
    run.mkdir()
    with monkeypatch.context() as patch:
        recorder = Recorder(run, patch)

        def train(ranks):
            training = Training(ranks)
            saving = saver(training, run / "checkpoints", asynchronous)
            for step in (1, 2, 3):
                save_step(training, saving)
                saving.settle()
                whole_after.setdefault(step, len(recorder.log))
            saving.rate(3, {"loss": 1.0})

        Room(2).run(train)
    chance, seen = random.Random(5), set()
    for operations in range(len(recorder.log) + 1):
        for number in range(4):
            there = tmp_path / "there"
            put(after_cut(recorder, operations, chance if number > 1 else None, number == 1), there)
            folder = Store(there / "checkpoints")
            steps = [store.step_of(path) for path in folder.newest_first()]
            assert max(steps, default=0) >= max((s for s, log in whole_after.items() if log <= operations), default=0)
            for path in folder.newest_first():
                assert store.verify(path) == [], f"operation {operations}"
                checkpoint = Checkpoint(path)
                assert torch.equal(checkpoint.parameter("b").weight, torch.full((200, 2), float(checkpoint.step)))
            if steps and (folder.directory / "latest").exists():
                assert store.locate(folder.directory / "latest")
            folder.remove_unfinished()
            left = {path.name for path in folder.directory.glob("*")}
            assert left <= {"latest", *(folder.path(step or 0).name for step in steps)}
            seen.add(tuple(steps))
            shutil.rmtree(there)
    assert seen >= {(), (1,), (2, 1), (3, 2)}
