"""Files of data sets: found, read, fetched; and what is said when they are missing, truncated or hostile."""

import gzip
import hashlib
import os
import pickle
import shutil
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dsframe.config.schema.settings import VisionTask
from dsframe.data import Loader, fetch, vision
from dsframe.data._torchvision import torchvision
from dsframe.data.files import data_root, replacing
from dsframe.data.idx import read_idx
from dsframe.errors import DataError


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(monkeypatch, tmp_path):
    """Tests see only what they make themselves."""
    monkeypatch.setenv("DSFRAME_DATA", str(tmp_path / "default"))
    monkeypatch.setattr(vision, "DEBIAN_FASHION_MNIST", tmp_path / "debian")


def idx(array):
    array = np.asarray(array, np.uint8)
    return b"\0\0\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_mnist(folder, *, compressed=False, count=6, largest_label=9):
    folder.mkdir(parents=True, exist_ok=True)
    for part, samples in (("train", count), ("t10k", 3)):
        pixels = np.arange(samples * 784).reshape(samples, 28, 28) % 251
        labels = np.arange(samples) % (largest_label + 1)
        labels[-1] = largest_label
        for name, array in ((f"{part}-images-idx3-ubyte", pixels), (f"{part}-labels-idx1-ubyte", labels)):
            content = idx(array)
            path = folder / (f"{name}.gz" if compressed else name)
            path.write_bytes(gzip.compress(content) if compressed else content)


def settings(dataset="fashion-mnist", **fields):
    return VisionTask.model_validate({"dataset": dataset, "augment": False, **fields})


def load(section, *, train=True, seed=0):
    return vision.load(section, vision.describe(section), train=train, seed=seed)


def found_in(folder):
    """Fashion-MNIST there."""
    return load(settings(data_dir=str(folder)))


def mapped_files(part):
    """Files that this process has mapped, which others share with it."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if part in line}


def test_the_ranks_of_a_host_share_one_copy(here):
    write_mnist(here)
    source = found_in(here)
    path = here / "train-images-idx3-ubyte"
    assert str(path) in mapped_files(str(here))
    assert len(source) == 6
    before = path.read_bytes()
    read_idx(path).fill_(7)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("name", "mirrored"), [("mnist", False), ("fashion-mnist", True)])
def test_what_is_trained_on_is_augmented_and_what_is_evaluated_is_not(name, mirrored, here):
    """A mirror image of a digit is none."""
    write_mnist(here)
    section = settings(name, data_dir=str(here), augment=True)
    for train, moved in ((True, True), (False, False)):
        looks = [load(section, train=train).batch(torch.tensor([1]), epoch)[0] for epoch in range(30)]
        others = [load(section, train=train, seed=1).batch(torch.tensor([1]), epoch)[0] for epoch in range(30)]
        assert any(not torch.equal(look, looks[0]) for look in looks) == moved
        assert all(map(torch.equal, looks, others)) != moved
        rising = {bool((look.diff(dim=-1) > 0).float().mean() > 0.5) for look in looks}
        assert (len(rising) == 2) == (train and mirrored)


@pytest.mark.parametrize(("layout", "compressed"), [("", False), ("FashionMNIST/raw", True), ("fashion-mnist", False)])
def test_fashion_mnist_is_read_from_every_layout(here, layout, compressed):
    write_mnist(here / "data" / layout, compressed=compressed)
    section = settings(data_dir="data")
    train, test = load(section), load(section, train=False)
    assert (len(train), len(test)) == (6, 3)
    inputs, targets = train.batch(torch.tensor([1]), 0)
    assert inputs.shape == (1, 1, 28, 28)
    assert targets.tolist() == [1]
    assert float(inputs[0, 0, 0, 0]) == pytest.approx(((784 % 251) / 255 - 0.2860) / 0.3530, abs=1e-5)
    few = settings(data_dir="data", samples=2)
    assert (len(load(few)), len(load(few, train=False))) == (2, 3)


def test_without_data_dir_the_default_folder_then_debians_are_searched(tmp_path):
    write_mnist(tmp_path / "debian", compressed=True, count=5)
    assert len(load(settings())) == 5
    write_mnist(tmp_path / "default" / "FashionMNIST" / "raw", count=7)
    assert len(load(settings())) == 7
    assert data_root("own") == Path("own")


def test_missing_data_say_where_they_were_searched_and_how_to_get_them(here):
    with pytest.raises(DataError, match=r"^fashion-mnist: not complete in nowhere, .*; run .* --to nowhere"):
        load(settings(data_dir="nowhere"))
    with pytest.raises(DataError, match=rf"not complete in {here}/default/FashionMNIST/raw, .*, {here}/debian; run"):
        load(settings())
    with pytest.raises(DataError, match=r"cifar10: not complete in .*cifar-10-batches-py"):
        load(settings("cifar10"))


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def truncate(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def test_truncated_files_are_refused(tmp_path):
    for compressed in (False, True):
        folder = tmp_path / str(compressed)
        write_mnist(folder, compressed=compressed)
        name = folder / ("train-images-idx3-ubyte.gz" if compressed else "train-images-idx3-ubyte")
        truncate(name, name.stat().st_size // 2)
        with pytest.raises(DataError, match=f"{name}: truncated or damaged"):
            found_in(folder)
    damaged = tmp_path / "a.gz"
    damaged.write_bytes(gzip.compress(b"")[:10] + b"\xff")
    with pytest.raises(DataError, match="truncated or damaged"):
        read_idx(damaged)
    path = tmp_path / "short"
    whole = idx(np.zeros((2, 3)))
    for content, size in ((whole[:-1], 17), (whole + b"0", 19)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"its header says 2 x 3, 18 bytes, but it has {size}; delete it"):
            read_idx(path)
    for content, begin in ((b"<html>", "3c 68 74 6d"), (b"\0\0\x0c\1", "00 00 0c 01")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"not an idx file of bytes \(it starts with {begin}\)"):
            read_idx(path)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    write_mnist(tmp_path, largest_label=10)
    with pytest.raises(DataError, match="labels run from 0 to 10, but there are 10 classes"):
        found_in(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(5)))
    with pytest.raises(DataError, match=r"holds 6 images, .* 5 labels"):
        found_in(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((5, 28, 20))))
    with pytest.raises(DataError, match=r"not 28 x 28 images: \[5, 28, 20\]"):
        found_in(tmp_path)


def test_cifar10_is_torchvisions_and_no_other_file_is_unpickled(tmp_path, monkeypatch):
    folder, mark = tmp_path / "cifar-10-batches-py", tmp_path / "mark"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(20, 3072), dtype=np.uint8)

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return name, hashlib.md5((folder / name).read_bytes()).hexdigest()

    parts = [write("data_batch_1", {"data": pixels, "labels": [3] * 20})]
    name, digest = write("batches.meta", {"label_names": ["a"]})
    cifar = torchvision().datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", parts)
    monkeypatch.setattr(cifar, "test_list", parts)
    monkeypatch.setattr(cifar, "meta", {"filename": name, "key": "label_names", "md5": digest})
    section = settings("cifar10", data_dir=str(tmp_path))
    images, labels = load(section).pixels(torch.arange(20), 0)
    assert torch.equal(images.flatten(1), torch.from_numpy(pixels))
    assert labels.tolist() == [3] * 20
    write("data_batch_1", Hostile(mark))
    with pytest.raises(DataError, match="cifar10: not complete in"):
        load(section, train=False)
    assert not mark.exists()


class Hostile:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def interrupted_write(path):
    with replacing(path) as out:
        out.write(b"half of the sec")
        raise KeyboardInterrupt


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path, replace, renamed = tmp_path / "folder" / "file", Path.replace, []
    monkeypatch.setattr(Path, "replace", lambda self, to: renamed.append(self.read_bytes()) or replace(self, to))
    with replacing(path) as out:
        out.write(b"first")
    assert renamed == [b"first"]
    with pytest.raises(KeyboardInterrupt):
        interrupted_write(path)
    assert path.read_bytes() == b"first"
    assert names(path.parent) == ["file"]


def test_the_umask_decides_who_may_write_to_a_file(tmp_path):
    before = os.umask(0o002)  # as on clusters where a group works in one folder
    try:
        with replacing(tmp_path / "shared") as out:
            out.write(b"for the group")
    finally:
        os.umask(before)
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o664


def test_fetch_copies_what_the_machine_has_and_then_finds_it(tmp_path):
    write_mnist(tmp_path / "debian", compressed=True)
    lines, target = [], tmp_path / "target"
    fetched = partial(fetch.fetch, "fashion-mnist", str(target), lines.append)
    assert fetched() == target
    assert lines == [f"fashion-mnist: copied from {tmp_path}/debian in {target}"]
    assert names(target / "FashionMNIST" / "raw") == sorted(vision.MNIST_FILES)
    fetched()
    assert lines[1] == f"fashion-mnist: complete in {target}"
    truncate(target / "FashionMNIST" / "raw" / "train-images-idx3-ubyte", 100)
    fetched()
    assert len(found_in(target)) == 6


def test_a_program_that_fails_has_the_last_word():
    error = subprocess.CalledProcessError(1, ["apt-get", "download", "x"], stderr="first\nlast\n")
    assert fetch._reason(error) == "apt-get download failed: last"


def test_a_folder_that_cannot_be_written_is_named(here):
    (here / "file").write_text("")
    with pytest.raises(DataError, match=r"^file/to: cannot be written to .*; choose another folder with --to"):
        fetch.fetch("fashion-mnist", "file/to")


def write_folder(root):
    from PIL import Image

    for part, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(["cat", "dog"]):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40 + number, 30), (200 * label, 50, number)).save(
                    root / part / name / f"{number}.png"
                )
    (root / "train" / "cat" / "notes.txt").write_text("not an image")


def test_images_in_folders(tmp_path):
    write_folder(tmp_path)
    shutil.copytree(tmp_path / "train", tmp_path / "test")  # not read where there is "val"
    section = settings("image-folder", data_dir=str(tmp_path), image_size=16, augment=True)
    assert vision.describe(section).classes == 2
    train, test = load(section), load(section, train=False)
    assert (len(train), len(test)) == (8, 4)
    streams = [Loader(train, seed=1, micro_batch_size=4, workers=workers).stream() for workers in (0, 1)]
    for _ in range(3):
        (inputs, targets), (others, _) = (next(stream) for stream in streams)
        assert inputs.shape == (4, 3, 16, 16)
        assert torch.equal(inputs, others)
        red = (200 * targets / 255 - 0.485) / 0.229
        torch.testing.assert_close(inputs[:, 0, 8, 8], red, atol=1e-5, rtol=0)


def test_samples_of_an_image_folder_are_of_all_its_classes(tmp_path):
    for name in "abcdefgh":
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(20):
            (tmp_path / "train" / name / f"{number}.png").touch()

    def chosen(samples, seed=0):
        return list(load(settings("image-folder", data_dir=str(tmp_path), samples=samples), seed=seed).indices)

    assert {index // 20 for index in chosen(40)} == set(range(8))
    assert chosen(40) == sorted(set(chosen(40)))
    assert set(chosen(30)) < set(chosen(40))  # more samples are these and others
    assert chosen(1000) == list(range(160))
    assert chosen(30, seed=5) == chosen(30), "trainings with other seeds have the same samples"


def test_image_folders_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match='"image-folder" needs data_dir'):
        vision.describe(settings("image-folder"))
    section = settings("image-folder", data_dir=str(tmp_path))
    with pytest.raises(DataError, match=f"{tmp_path}/train does not exist; images belong in"):
        vision.describe(section)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="holds no folder"):
        vision.describe(section)
    (tmp_path / "train" / "cat").mkdir()
    with pytest.raises(DataError, match="no images"):
        load(section)
    (tmp_path / "train" / "cat" / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"a\.png: cannot be read as an image"):
        load(section)[0]
    with pytest.raises(DataError, match="has none of val, test, eval to evaluate on"):
        load(section, train=False)
    (tmp_path / "val" / "bird").mkdir(parents=True)
    with pytest.raises(DataError, match="has classes that train/ does not have: bird"):
        load(section, train=False)


def test_synthetic_images_are_the_same_everywhere_and_can_be_told_apart():
    assert len(load(settings("synthetic", samples=5), train=False)) == 1
    section = settings("synthetic", samples=200, classes=3, image_size=16)
    train, test = load(section), load(section, train=False)
    assert (len(train), len(test)) == (200, 20)
    assert torch.equal(train._images, load(section)._images)
    assert not torch.equal(train._images[:20], test._images)
