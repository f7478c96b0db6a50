"""Checkpoints as files: whole or not there, verified byte by byte, pruned by rule, never mixed and never silently gone."""

import errno
import itertools
import mmap
import os
import random
from dataclasses import asdict
from unittest.mock import Mock

import psutil
import pytest

from dsframe.checkpoint import byte_files, store
from dsframe.checkpoint.byte_files import FileEntry, RangeWriter, combined, write
from dsframe.checkpoint.store import Retention, Store
from dsframe.errors import CheckpointError, DataError
from dsframe.run_dir.record import read_metrics


def save(folder, step, evaluation=None):
    """A small checkpoint of two files, the way the saver writes one."""
    partial = folder.begin(step)
    files = {name: write(partial / name, content) for name, content in (("a.bin", b"a" * 99), ("b.bin", b"bb"))}
    return folder.commit(step, manifest(files, step, evaluation))


def manifest(files, step=1, evaluation=None):
    entries = {name: asdict(entry) for name, entry in files.items()}
    return {"format": store.FORMAT, "step": step, "files": entries, "evaluation": evaluation or {}, "loss": 0.1 + 0.2}


@pytest.fixture
def folder(tmp_path):
    return Store(tmp_path / "run" / "checkpoints")


def test_a_saved_checkpoint_is_whole_and_the_newest(folder):
    opened = psutil.Process().num_fds()
    first, second = save(folder, 7), save(folder, 12)
    assert psutil.Process().num_fds() == opened
    assert folder.newest_first() == [second, first]
    assert second.name == "step-00000012"
    assert (folder.directory / "latest").read_text() == "step-00000012\n"
    assert store.verify(second) == []
    assert store.read_manifest(second)["loss"] == 0.1 + 0.2
    folder.rate(12, {"loss": float("inf")})
    assert store.read_manifest(second)["evaluation"] == {"loss": None}
    assert sorted(path.name for path in folder.directory.iterdir()) == ["latest", "step-00000007", "step-00000012"]


def test_every_flipped_bit_and_truncation_is_found(folder):
    path = save(folder, 1)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        flipped = (
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
            for position in range(len(content))
        )
        for damaged in (*flipped, b"", content[:1], content[:-1], content + b"\0"):
            file.write_bytes(damaged)
            assert store.verify(path), (file.name, damaged)
        file.write_bytes(content)
    assert store.verify(path) == []


def test_a_missing_file_is_named(folder):
    path = save(folder, 1)
    for name in ("a.bin", "b.bin"):
        (path / name).write_bytes(bytes((path / name).stat().st_size))
    seen = []
    shares = [store.damage(path, None, (rank, 2), lambda: seen.append(1)) for rank in range(2)]
    assert [list(share) for share in shares] == [["a.bin"], ["b.bin"]]
    assert len(seen) == 4
    (path / "a.bin").write_bytes(b"a" * 99)
    (path / "b.bin").unlink()
    assert store.verify(path) == ["b.bin: No such file or directory"]
    assert store.damage(path, ["a.bin"]) == {}
    assert [store.damage(path, None, (rank, 3)) for rank in (0, 2)] == [
        {"b.bin": "b.bin: No such file or directory"}
    ] * 2
    (path / "manifest.json").unlink()
    assert store.verify(path) == [f"{path}: manifest.json: No such file or directory"]
    (path / "manifest.json").mkdir()
    with pytest.raises(store.UnreadableError, match="Is a directory"):
        store.verify(path)


def test_a_manifest_cannot_point_outside(folder):
    for step, name in enumerate(("../a.bin", "/etc/passwd", "sub/a.bin", "..", ".hidden", "")):
        folder.begin(step)
        path = folder.commit(step, manifest({name: FileEntry(1, [[1, "0" * 32]])}, step))
        with pytest.raises(CheckpointError, match="dsframe has not written this"):
            store.read_manifest(path)


def test_another_format_says_who_wrote_it(folder):
    folder.begin(1)
    path = folder.commit(1, {**manifest({}), "format": 99, "versions": {"dsframe": "7.5"}})
    with pytest.raises(CheckpointError, match=r"has format 99, this dsframe reads 4; it was written by dsframe 7\.5"):
        store.read_manifest(path)


@pytest.mark.parametrize("content", [b"[]", b'{"manifest": {}}', b"\xff", b'{"manifest": 3}'])
def test_no_manifest_at_all_is_damage(folder, content):
    path = save(folder, 1)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        store.read_manifest(path)


def test_what_is_cut_off_is_removed_and_named(folder):
    save(folder, 1)
    (folder.begin(2) / "half.bin").write_bytes(b"x")
    (folder.directory / ".step-00000000.removed").mkdir()
    (folder.directory / "step-00000009").touch()
    assert folder.newest_first() == [folder.path(1)]
    assert folder.remove_unfinished() == [".step-00000000.removed", ".step-00000002.partial"]
    assert folder.remove_unfinished() == []


def test_the_same_step_is_not_written_twice(folder):
    save(folder, 3)
    with pytest.raises(CheckpointError, match="exists already"):
        folder.begin(3)


def test_damage_is_renamed_each_time_to_a_free_name(folder):
    assert folder.set_aside(save(folder, 4)).name == "step-00000004.damaged"
    assert folder.set_aside(save(folder, 4)).name == "step-00000004.damaged.1"
    assert folder.newest_first() == []


def test_an_earlier_run_is_moved_out_of_the_way(folder):
    assert folder.archive_earlier() is None
    save(folder, 1)
    assert folder.archive_earlier() == folder.directory.with_name("checkpoints.1")
    save(folder, 2)
    assert folder.archive_earlier() == folder.directory.with_name("checkpoints.2")
    assert folder.newest_first() == []
    for step in (5, 10, 15):
        save(folder, step)
    (folder.directory / "best").write_text("step-00000010\n")
    moved = folder.archive_earlier(after=5)
    assert not (folder.directory / "best").exists(), "it named one that is not there any more"
    assert sorted(path.name for path in moved.iterdir()) == ["step-00000010", "step-00000015"]
    assert folder.newest_first() == [folder.path(5)]


def test_a_link_to_another_disk_stays_one(folder, tmp_path):
    elsewhere = tmp_path / "other-disk"
    elsewhere.mkdir()
    folder.directory.parent.mkdir()
    folder.directory.symlink_to(elsewhere)
    save(folder, 7)
    assert folder.archive_earlier() == folder.directory / "earlier.1"
    assert [path.name for path in elsewhere.iterdir()] == ["earlier.1"]
    assert folder.newest_first() == []
    save(folder, 3)
    save(folder, 9)
    assert folder.archive_earlier(after=5) == folder.directory / "earlier.2"
    assert folder.directory.is_symlink()
    kept = {path.relative_to(elsewhere).as_posix() for path in elsewhere.rglob("step-*")}
    assert kept == {"earlier.1/step-00000007", "earlier.2/step-00000009", "step-00000003"}


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), {50, 60}),
        (Retention(last=99), {10, 20, 30, 40, 50, 60}),
        (Retention(last=1, every=20), {20, 40, 60}),
        (Retention(last=1, best="loss:min"), {30, 60}),
        (Retention(last=1, best="accuracy:max"), {20, 60}),
        (Retention(last=1, best="unknown:max"), {60}),
    ],
)
def test_retention(folder, retention, kept):
    for step, loss in {10: 3.0, 20: 2.0, 30: 1.0, 40: None, 50: 2.5, 60: 2.6}.items():
        save(folder, step, None if loss is None else {"loss": loss, "accuracy": 0.9 if step == 20 else 0.1})
    removed = folder.prune(retention)
    assert {store.step_of(path) for path in folder.newest_first()} == kept
    assert set(removed) == {10, 20, 30, 40, 50, 60} - kept
    assert not list(folder.directory.glob(".*"))


def test_pruning_leaves_damage_to_be_found(folder):
    for step in (1, 2, 3):
        save(folder, step)
    (folder.path(1) / "manifest.json").write_text("{")
    (folder.directory / ".step-00000002.removed" / "file").mkdir(parents=True)
    (folder.directory / "best").write_text("step-00000002")
    assert folder.prune(Retention(last=1)) == [2]
    assert not (folder.directory / "best").exists()
    assert folder.path(1).exists()
    (save(folder, 4) / "a.bin").unlink()
    assert store.complete(folder.directory) == folder.path(3)


def test_a_path_may_mean_a_checkpoint_its_folder_or_the_run(folder, tmp_path):
    first, second = save(folder, 1), save(folder, 2)
    assert store.locate(first) == [first]
    assert store.locate(folder.directory) == [second, first]
    (folder.directory / "best").write_text("step-00000001\n")
    assert store.locate(folder.directory / "best") == [first]
    assert store.locate(tmp_path / "run") == [second, first]
    (tmp_path / "run" / "config.json").touch()
    (tmp_path / "link").symlink_to(first)
    assert store.config_of(tmp_path / "link") == tmp_path / "run" / "config.json"
    with pytest.raises(CheckpointError, match=f"does not exist; did you mean {tmp_path}/run\\?"):
        store.locate(tmp_path / "rnu")
    with pytest.raises(DataError, match=f"/rnu holds no run .*; did you mean {tmp_path}/run\\?"):
        read_metrics(tmp_path / "rnu")
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a folder that holds one"):
        store.locate(tmp_path)


def test_links_are_taken_away_and_not_what_they_lead_to(folder, tmp_path):
    save(folder, 1)
    elsewhere = tmp_path / "elsewhere"
    folder.path(1).rename(elsewhere)
    folder.path(1).symlink_to(elsewhere)
    folder.partial(9).symlink_to(elsewhere)
    save(folder, 2)
    assert folder.prune(Retention(last=1)) == [1]
    assert folder.remove_unfinished() == [".step-00000009.partial"]
    folder.partial(3).symlink_to(elsewhere)
    assert folder.begin(3).is_dir()
    assert sorted(path.name for path in folder.directory.iterdir()) == [
        ".step-00000003.partial",
        "latest",
        "step-00000002",
    ]
    assert store.verify(elsewhere) == []


def test_ranges_of_several_processes_make_one_file(tmp_path, monkeypatch):
    """In any order, from any number of hosts; long ranges have several checksums, so that ranks verify them together."""
    edges = RangeWriter(tmp_path, several_hosts=True)
    edges.put("page", 0, bytes(mmap.PAGESIZE))
    edges.put("part", 1, b"a")
    assert set(edges._descriptors) == {("page", 0), ("part", os.O_DSYNC)}
    edges.close()
    monkeypatch.setattr(byte_files, "RUN_BYTES", 10_000)
    monkeypatch.setattr(byte_files, "_CHUNK", 3000)
    content = random.Random(3).randbytes(50_000)
    for hosts in (False, True):
        cuts = [0, 1, 4095, 4096, 4097, 12_288, 12_300, 30_000, 50_000]
        writers = [RangeWriter(tmp_path, several_hosts=hosts, ahead=hosts) for _ in range(3)]
        for number, (low, high) in enumerate(itertools.pairwise(cuts)):
            writers[number % 3].put("file", low, content[low:high])
        for writer in writers:
            writer.finish()
            writer.close()
        assert (tmp_path / "file").read_bytes() == content
        runs = [run for writer in writers for run in writer.runs["file"]]
        entry = combined("file", 50_000, runs)
        assert max(length for length, _ in entry.checksums) == 10_000
        assert len(entry.checksums) == 10
        shares = [byte_files.damage_of(tmp_path / "file", asdict(entry), slice(rank, None, 2)) for rank in range(2)]
        assert shares == ["", ""]
        moved = [(runs[0][0] + 1, *runs[0][1:]), *runs[1:]]  # as many bytes
        for wrong in (runs[1:], runs[:-1], [*runs, runs[0]], moved):
            with pytest.raises(CheckpointError, match=r"leaves a gap, or overlaps|ends at byte"):
                combined("file", 50_000, wrong)
        with pytest.raises(CheckpointError, match="ends at byte 50,000 of 49,999"):
            combined("file", 49_999, runs)
        (tmp_path / "file").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert "was altered" in byte_files.damage_of(tmp_path / "file", asdict(entry), slice(None))
        (tmp_path / "file").unlink()


def test_a_write_that_fails_names_the_file(tmp_path, monkeypatch):
    def fails(descriptor, content, begin):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match="file") as caught:
        RangeWriter(tmp_path).put("file", 0, b"abc")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "file"))
    for error, said in ((OSError(28, "full"), "full"), (CheckpointError("a gap"), "a gap")):
        assert byte_files.catch_io_error(Mock(side_effect=error)) == said


def test_a_short_write_is_continued_and_none_at_all_an_error(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, begin: pwrite(descriptor, content[:3], begin))
    (tmp_path / "file").write_bytes(bytes(20))  # of an interrupted save
    write(tmp_path / "file", b"abcdefgh")
    assert (tmp_path / "file").read_bytes() == b"abcdefgh"
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="no byte could be written"):
        write(tmp_path / "file", b"abcdefgh")
