"""Which checkpoint a run goes on from: what one rank alone cannot read is no damage, and nothing but damage is renamed."""

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsframe.checkpoint import byte_files, resume
from dsframe.checkpoint.store import Store
from dsframe.errors import CheckpointError
from dsframe.host import generators
from dsframe.tasks.task import Task
from tests.threads import Room
from tests.unit.test_checkpoint_background import Training, save_step, saver

PARTS = ("model.safetensors", "optimizer.safetensors")


class Resuming(Training):
    """An engine that goes on."""

    def __init__(self, ranks, buffers, **checkpoints):
        super().__init__(ranks)
        kept = SimpleNamespace(**{"every_steps": None, "at_end": True, **checkpoints})
        self.plan.config = SimpleNamespace(settings=SimpleNamespace(checkpoints=kept, ema=None))
        self.plan.batch = SimpleNamespace(sharing=1)
        self.plan.task = Task()
        self.kept = buffers

    def buffers(self):
        return self.kept

    def load_state(self, saved):
        self.step = saved.updates


ABOUT = {
    "training": {},
    "course": {},
    "run": {"engine": "single", "world_size": 2, "micro_batch_size": 1},
}


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints, of steps 1 and 2, written by two ranks."""
    found = Store(tmp_path / "run" / "checkpoints")

    def train(ranks):
        training = Training(ranks)
        saving = saver(training, found.directory, asynchronous=False)
        saving._about = ABOUT
        for _ in range(2):
            save_step(training, saving)
            saving.settle()

    Room(2).run(train)
    return found


def begin(*folders, wanted="auto", buffers=None, **checkpoints):
    """What two ranks begin with, or the error of each. ``folders``: as each rank sees the run's."""

    def one(ranks):
        engine = Resuming(ranks, buffers or {}, **checkpoints)
        folder = (folders * 2)[ranks.plan.world.rank]
        try:
            return resume.begin(engine, wanted, folder, ABOUT, 9, lambda line: None)
        except CheckpointError as error:
            return str(error)

    return Room(2).run(one)


def assert_refused(found, *words):
    for line in found:
        assert not [word for word in words if word not in str(line)], line


def names(folder):
    return sorted(path.name for path in folder.directory.iterdir() if path.name != "latest")


def of_rank(rank, action, instead):
    """``instead`` in the threads of one rank: Room starts them in the order of ranks."""

    def choose(*arguments, **keywords):
        mine = threading.current_thread().name == f"rank {rank}"
        return (instead if mine else action)(*arguments, **keywords)

    return choose


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_read_is_not_renamed(folder, rank, number, monkeypatch):
    """A host without the folder, or with trouble of its own: the checkpoint is whole, and stays."""

    read = Path.read_bytes

    def fails(path):
        if path.parent.suffix == ".partial":  # the trial before training
            return read(path)
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "read_bytes", of_rank(rank, read, fails))
    monkeypatch.setattr(byte_files, "checksum_of", of_rank(rank, byte_files.checksum_of, fails))
    assert_refused(begin(folder), f"rank {rank} on ", f"manifest.json: {os.strerror(number)}", "nothing was renamed")
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_damage_that_one_rank_alone_sees_is_not_renamed(folder, monkeypatch):
    monkeypatch.setattr(byte_files, "checksum_of", of_rank(1, byte_files.checksum_of, lambda *_: "0" * 32))
    assert_refused(begin(folder), "rank 1 on ", "was altered: its checksum differs; nothing was renamed")
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_what_no_rank_may_read_is_not_renamed(folder, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(byte_files, "checksum_of", fails)
    assert_refused(begin(folder), "Input/output error", "nothing was renamed")
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_damage_is_set_aside_once_there_is_a_whole_one(folder):
    hurt = folder.path(2) / PARTS[1]
    content = hurt.read_bytes()
    hurt.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    folder.partial(9).mkdir()
    for start in begin(folder):
        assert isinstance(start, resume.Start)
        assert (start.step, start.in_place, start.loss) == (1, True, 0.5)
    assert names(folder) == ["step-00000001", "step-00000002.damaged"]


@pytest.mark.parametrize("hurt", ["manifest.json", PARTS[0], PARTS[1]])
def test_where_every_one_is_damaged_all_stay(folder, hurt):
    for step in (1, 2):
        (folder.path(step) / hurt).write_bytes(b"{}")
    for _ in range(2):
        assert_refused(begin(folder), f"all checkpoints in {folder.directory} are damaged", hurt)
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_a_folder_of_damaged_ones_alone_is_no_fresh_start(folder):
    for step in (1, 2):
        folder.set_aside(folder.path(step))
    assert_refused(begin(folder), " are damaged (step-00000001.damaged, step-00000002.damaged)", "--resume never")
    assert begin(folder, wanted="never") == [resume.Start()] * 2
    assert names(Store(folder.directory.with_name("checkpoints.1"))) == [
        "step-00000001.damaged",
        "step-00000002.damaged",
    ]
    assert begin(folder) == [resume.Start()] * 2, "and then it is one"


def test_a_checkpoint_that_is_a_link_is_the_runs_own(folder, tmp_path):
    """Moved to a larger disk: its record goes on. So it does where a link elsewhere leads to one of the run's own."""
    elsewhere = tmp_path / "large disk" / "step-00000002"
    elsewhere.parent.mkdir()
    folder.path(2).rename(elsewhere)
    folder.path(2).symlink_to(elsewhere)
    assert [start.in_place for start in begin(folder)] == [True, True]
    link = tmp_path / "best"
    link.symlink_to(folder.path(1))
    assert [start.in_place for start in begin(folder, wanted=str(link))] == [True, True]
    assert names(folder) == ["step-00000001"], "the later one made way"
    assert [start.in_place for start in begin(folder, wanted=str(elsewhere))] == [False, False]
    assert folder.newest_first() == [], "they are of another training"


# Before training: could this run be saved?


@pytest.fixture
def fresh(tmp_path):
    return Store(tmp_path / "run" / "checkpoints")


def test_a_run_that_can_be_saved_leaves_nothing_of_the_trial(fresh):
    assert begin(fresh) == [resume.Start()] * 2
    assert list(fresh.directory.parent.iterdir()) == []


def test_the_trial_is_where_a_link_leads(fresh, tmp_path, monkeypatch):
    """The link may be writable and the disk behind it not."""
    tried = []
    (tmp_path / "large disk").mkdir()
    fresh.directory.parent.mkdir()
    fresh.directory.symlink_to(tmp_path / "large disk")
    mkdir = Path.mkdir
    monkeypatch.setattr(
        Path, "mkdir", lambda path, *more, **options: (tried.append(path), mkdir(path, *more, **options))[1]
    )
    assert begin(fresh) == [resume.Start()] * 2
    assert any(path.resolve().parent == tmp_path / "large disk" for path in tried if path.suffix == ".partial")


def test_hosts_without_a_shared_folder_are_named_before_training(fresh, tmp_path):
    """The second has a folder of this name, and not the first one's."""
    other = Store(tmp_path / "other" / "checkpoints")
    other.directory.mkdir(parents=True)
    said = "No such file or directory; every host needs this folder"
    assert_refused(begin(fresh, other), "this run cannot be saved: rank 1 on ", said, "--run-dir")
    assert list(fresh.directory.parent.iterdir()) == []
    nothing = begin(fresh, other, at_end=False)
    assert nothing == [resume.Start()] * 2, "where nothing will be saved, nothing is needed"
    assert_refused(begin(fresh, other, at_end=False, every_steps=5), "cannot be saved")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_is_named_before_training(fresh, rank, monkeypatch):
    def fails(path, content):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_bytes", of_rank(rank, Path.write_bytes, fails))
    assert_refused(begin(fresh), f"this run cannot be saved: rank {rank} on ", "Read-only file system")
    assert list(fresh.directory.parent.iterdir()) == []


def test_a_buffer_that_no_checkpoint_holds_is_named_before_training(fresh):
    buffers = {
        "mean": torch.ones(2),
        "freqs_cis": torch.ones(2, dtype=torch.complex64),
        "odd": torch.ones(2, dtype=torch.complex128),
    }
    said = "this run cannot be saved: checkpoints do not support the buffer odd (torch.complex128); register it with "
    assert_refused(begin(fresh, buffers=buffers), said)
    assert begin(fresh, buffers=buffers, at_end=False) == [resume.Start()] * 2


def test_ranks_go_on_with_the_numbers_of_their_group(monkeypatch):
    """Two share their samples. Ranks that the saved run did not have draw others, and others after each resume."""
    said = []
    monkeypatch.setattr(resume.generators, "restore", lambda kept, device: said.append(kept))
    monkeypatch.setattr(generators, "seed", said.append)
    for step in (7, 8):
        saved = SimpleNamespace(generators=lambda: ["a", "b", "c", "d"], step=step)
        for rank in range(8):
            world, batch = SimpleNamespace(rank=rank), SimpleNamespace(sharing=2)
            plan = SimpleNamespace(world=world, batch=batch, seed=0, data_rank=rank // 2, device=None)
            resume._restore_generators(SimpleNamespace(plan=plan), saved)
    assert said[:4] == said[8:12] == ["a", "a", "c", "c"]
    assert len({*said[4:8], *said[12:]}) == 4
