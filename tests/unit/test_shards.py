"""Shards: what their rows are, and what is said of those that are damaged, changed or gone."""

from __future__ import annotations

import gc
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsframe.data import Loader, Shards
from dsframe.data.shards import _Windows
from dsframe.errors import DataError
from tests.sources import lines, shards, tar


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSFRAME_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_parts_of_a_sample_are_decoded_by_their_suffix(tmp_path: Path) -> None:
    from PIL import Image

    picture = io.BytesIO()
    Image.new("L", (5, 4), 128).save(picture, "PNG")
    tar(tmp_path / "a.tar", range(3), **{"seg.png": picture.getvalue(), "json": b'{"a": [1]}', "bin": b"\0\1"})
    row = Shards("a.tar")[2]
    assert (row["__key__"], row["cls"], row["txt"], row["json"], row["bin"]) == (
        "some/0002",
        2,
        "é 2",
        {"a": [1]},
        b"\0\1",
    )
    assert (row["seg.png"].size, row["seg.png"].mode) == ((5, 4), "RGB")
    assert list(Shards("a.tar", columns=["cls"])[0]) == ["__key__", "cls"]
    with pytest.raises(IndexError):
        Shards("a.tar")[3]


def test_names_of_members_are_any_bytes_and_samples_may_lack_parts(tmp_path: Path) -> None:
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w", encoding="utf-8", errors="surrogateescape") as out:
        for name in ("./é.cls", "./\udcff.b.c", "./\udcff.cls", "./folder/", "nothing", f"{'long/' * 60}x.cls"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            member.size = 0 if name.endswith("/") else 1
            out.addfile(member, io.BytesIO(b"7"))
    rows = list(Shards("a.tar"))
    assert rows == [
        {"__key__": "./é", "cls": 7},
        {"__key__": "./\udcff", "b.c": b"7", "cls": 7},
        {"__key__": f"{'long/' * 60}x", "cls": 7},
    ]


def test_the_index_is_made_once_and_again_for_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsframe.data import shards as module

    calls: list[Path] = []
    scan = module._Shard.scan
    monkeypatch.setattr(module._Shard, "scan", staticmethod(lambda path: calls.append(path) or scan(path)))
    said: list[str] = []
    monkeypatch.setattr(module, "_SAY_SECONDS", -1.0)
    assert len(shards(tmp_path, say=said.append)) == 90
    assert said[0] == "indexing file 1 of 4"
    assert len(calls) == 4
    data = shards(tmp_path)
    assert len(calls) == 4
    assert len(pickle.dumps(data)) < 100_000
    tar(tmp_path / "part-2.tar", range(45, 48))
    assert len(shards(tmp_path)) == 92
    assert len(calls) == 5


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def damaged(folder: Path, what: str) -> Any:
    good = tar(folder / "good.tar", range(4)).read_bytes()
    bad = folder / "bad.tar"
    if what == "tar in a member":
        bad.write_bytes(good[:700])
    elif what == "tar in a header":
        bad.write_bytes(good[: 1024 + 100])
    elif what == "tar between members":
        bad.write_bytes(good[:1024])
    elif what == "no tar":
        bad.write_bytes(b"hello" * 1000)
    elif what == "empty tar":
        tar(bad, range(0))
    elif what == "twice":
        bad.write_bytes(good[:1024] + good[:1024] + bytes(1024))
    return Shards("bad.tar")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tar in a member", r"^bad\.tar: no tar file, truncated, or damaged \(unexpected end of data\)"),
        ("tar in a header", r"^bad\.tar: truncated or damaged: at byte 1,024 is neither a member nor the end"),
        ("tar between members", r"^bad\.tar: truncated or damaged: at byte 1,024 is neither"),
        ("no tar", r"^bad\.tar: no tar file"),
        ("empty tar", r"^bad\.tar: empty: there is no sample in it"),
        ("twice", r"^bad\.tar: sample some/0000 has txt twice"),
    ],
)
def test_a_damaged_tar_is_named_before_training(what: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        damaged(tmp_path, what)


def test_other_damage_is_named(tmp_path: Path) -> None:
    (tmp_path / "e.parquet").write_text("")
    with pytest.raises(DataError, match=r"^shards: .*\.parquet: files of \.tar are read; datasets\.load_dataset"):
        Shards("e.parquet")
    tar(tmp_path / "f.tar", range(2), json=b"{")
    with pytest.raises(DataError, match=r"^f\.tar: some/0001\.json cannot be decoded \(JSONDecodeError: "):
        Shards("f.tar")[1]


@pytest.mark.parametrize(
    ("what", "workers"),
    [
        ("gone", 0),
        ("another", 0),
        ("gone", 1),  # torch takes five seconds to end a worker that has failed
    ],
)
def test_a_shard_that_vanishes_while_it_is_needed_is_named(what: str, workers: int, tmp_path: Path) -> None:
    data = shards(tmp_path, window=1)
    stream = Loader(data, seed=0, micro_batch_size=2, workers=workers).stream()
    next(stream)
    for path in tmp_path.glob("part-*.tar"):
        if what == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes() + b"\n")
    message = (
        r"cannot be read \(No such file or directory\); shards must stay"
        if what == "gone"
        else "was changed since its index"
    )
    with pytest.raises(DataError, match=rf"part-\d\.tar: {message}"):
        list(stream)
    del stream
    gc.collect()  # else a worker of the next test would do it, and torch would complain there that it is not its own


def test_lines_of_packed_files_are_documents_too(tmp_path: Path) -> None:
    from dsframe.data import documents

    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        lines(tmp_path / name, range(300))
        (path,) = documents.find_files(name, "task.data.train")
        found = list(documents.rows(path, ["number"]))
        assert [row.value["number"] for row in found] == list(range(300))
        assert found[1].place == f"{name}:3"


def test_a_name_of_the_hub_without_a_network_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    from dsframe.data import documents

    def offline(*words: Any, **more: Any) -> Any:
        raise ConnectionError("cannot reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        DataError, match=r"^hub:some/words: cannot be downloaded \(ConnectionError: .*\); without a network, name a"
    ):
        documents.local("hub:some/words", None)
    asked: list[Any] = []

    def found(*words: Any, **more: Any) -> Any:
        asked.append((words, more))
        return datasets.Dataset.from_dict({"text": ["a", "b"]})

    monkeypatch.setattr(datasets, "load_dataset", found)
    folder = documents.local("hub:some/words:en@test", None)
    assert documents.local("hub:some/words:en@test", None) == folder
    assert asked == [(("some/words", "en"), {"split": "test"})]
    (path,) = documents.find_files(folder, "task.data.train")
    assert [row.value for row in documents.rows(path, ["text"])] == [{"text": "a"}, {"text": "b"}]
    assert documents.local("a.jsonl", None) == "a.jsonl"


def test_a_window_has_another_order_in_each_epoch() -> None:
    order = _Windows(np.array([8]), 8, seed=0)
    first, second = (order.take(epoch, 0, 8)[0][1].tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
