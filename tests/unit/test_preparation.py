"""Task.prepare() in one process, and what a rank sees of a process on another host."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import dsframe
from dsframe import Task
from dsframe.cluster.world import World
from dsframe.errors import ConfigError, DataError, TaskError
from dsframe.tasks import preparation
from dsframe.tasks.preparation import _SharedPreparation, alone
from tests.files import ds_config


class Slow(Task):
    """Notes when it begins and ends."""

    def __init__(self, folder):
        self.data_dir = str(folder)

    def prepare(self, say):
        with Path(str(self.data_dir), "notes").open("a") as notes:
            notes.write(f"begin {os.getpid()}\n")
            notes.flush()
            time.sleep(1.0)
            notes.write(f"end {os.getpid()}\n")


def test_two_jobs_do_not_prepare_the_same_at_once(tmp_path):
    child = os.fork()
    if child == 0:
        alone(Slow(tmp_path), lambda line: None)
        os._exit(0)
    while not (tmp_path / "notes").exists():
        time.sleep(0.01)
    said = []
    alone(Slow(tmp_path), said.append)
    os.waitpid(child, 0)
    own = os.getpid()
    expected = [f"begin {child}", f"end {child}", f"begin {own}", f"end {own}"]
    assert (tmp_path / "notes").read_text().split("\n")[:-1] == expected
    (line,) = said
    assert line.startswith(f"process {child} on ")
    assert line.endswith(f"prepares the same data in {tmp_path}; waiting until it is done")


def test_a_mistake_of_the_users_is_named_and_an_error_of_dsframe_stays(tmp_path):
    class Wrong(Slow):
        error = KeyError("url")

        def prepare(self, say):
            self.fail()

        def fail(self):
            raise self.error

    line = Wrong.fail.__code__.co_firstlineno + 1
    with pytest.raises(DataError, match=rf"Wrong.prepare\(\) failed: KeyError: 'url' \(.*test_preparation.py:{line}\)"):
        alone(Wrong(tmp_path), lambda line: None)
    Wrong.error = TaskError("as it is")
    with pytest.raises(TaskError, match="as it is"):
        alone(Wrong(tmp_path), lambda line: None)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"cannot write .*Slow.lock \(Not a directory\); set data_dir or \$DSFRAME_DATA"
    ):
        alone(Slow(tmp_path / "file" / "data"), lambda line: None)


class Store(dict):
    """As torch's, for what is asked here."""

    def check(self, keys):
        return all(key in self for key in keys)

    def set(self, key, value):
        self[key] = value.encode()


@pytest.mark.parametrize("world", [World(0, 2, 0, 2), World(1, 2, 1, 2), World(1, 2, 0, 1, node=1)])
def test_the_first_process_of_each_host_prepares_and_rank_0_stays_until_all_have_read(world, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_FAREWELL_SECONDS", 0.3)
    notes = []
    task = SimpleNamespace(prepares=True, prepare=notes.append, data_dir=str(tmp_path), prepared_as="")
    store = Store({f"outcome/{1 - world.rank}": b""})
    began = time.monotonic()
    _SharedPreparation(task, world, print, store).run()
    assert notes == [print] * (world.local_rank == 0)
    assert (time.monotonic() - began > 0.3) == world.is_main
    assert store[f"read/{world.rank}"]


def test_a_silent_process_on_another_host_is_given_up(monkeypatch):
    monkeypatch.setattr(preparation, "SILENT_SECONDS", 0.3)
    store = Store()
    waiting = _SharedPreparation(Task(), World(rank=1, size=2), lambda line: None, store)
    until = time.monotonic() + 0.6
    count = 0
    while time.monotonic() < until:  # as long as it gives signs of life
        count += 1
        store["sign/0"] = str(count).encode()
        assert not waiting._is_silent(0)
        time.sleep(0.05)
    began = time.monotonic()
    said = preparation._error(waiting._wait())
    assert time.monotonic() - began < 2.0
    assert "(rank 0) ended before it was done" in str(said)
    assert said.first_is_gone


def test_a_process_that_is_killed_at_once_has_given_a_sign(monkeypatch):
    """Without one it would be taken for a process that does not prepare, and waited for for ever."""
    store = Store()
    signs = []
    monkeypatch.setattr(store, "set", lambda key, value: signs.append(key))
    over = threading.Event()
    preparing = threading.Thread(
        target=_SharedPreparation(Task(), World(size=2), lambda line: None, store)._give_signs, args=(over,)
    )
    preparing.start()
    time.sleep(0.05)
    over.set()
    preparing.join()
    assert signs == ["sign/0"]


def test_a_file_without_an_optimizer_is_refused_before(tmp_path):
    with pytest.raises(ConfigError, match="optimizer: "):
        dsframe.fit(Slow(tmp_path), ds_config(8, engine="single", run_dir=str(tmp_path)))
    assert not (tmp_path / "notes").exists()
