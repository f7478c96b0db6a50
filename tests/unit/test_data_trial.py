"""Readings before a training: data and orders that follow from more than the file and the sample."""

import gzip
import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, default_collate

import dsframe
from dsframe.errors import DataError
from dsframe.training.data_trial import _files_of, examined
from tests.files import ds_config
from tests.lines import Line

OUTSIDE = np.random.default_rng(0)
ROWS = torch.arange(32.0).view(8, 4)


class Rows(Dataset):
    """Pure rows, and generators that are used only when it is made, or seeded for each row."""

    def __init__(self):
        self.rng, self.seeded = np.random.default_rng(0), torch.Generator()
        self.kept = self.rng.random(8)
        self.me = self

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return ROWS[index] + torch.rand(4, generator=self.seeded.manual_seed(index)) + torch.rand(4), index


class OfOwn(Rows):
    """Draws always and changes little: the sample is the same in most readings."""

    def __getitem__(self, index):
        return ROWS[index] * (-1 if self.rng.random() < 1e-9 else 1), index


class OfOutside(Rows):
    def __getitem__(self, index):
        return ROWS[index] * (-1 if OUTSIDE.random() < 1e-9 else 1), index


class Flip:
    def __init__(self):
        self.draw = random.Random(0)

    def __call__(self, row):
        return -row if self.draw.random() < 1e-9 else row


class Transformed(Rows):
    def __init__(self):
        super().__init__()
        self.transforms = {"train": [Flip()]}

    def __getitem__(self, index):
        return self.transforms["train"][0](ROWS[index]), index


class Cached(Rows):
    """Keeps rows with their noise."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class Counted(Rows):
    def __getitem__(self, index):
        self.kept += 1
        return ROWS[index] + float(self.kept[0]), index


class Given(dsframe.Task):
    def __init__(self, workers=0):
        self.workers = workers


def lines(data, held_out=None, workers=0, task=None):
    said = []
    assert examined(task or Given(workers), 0, (data, held_out), said.append) == (data, held_out)
    return said


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (OfOwn, "draw from a random generator of their own (rng), so"),
        (OfOutside, "draw from a random generator of their own (OUTSIDE), so"),
        (Transformed, "draw from a random generator of their own (transforms.train.0.draw), so"),
        (lambda: ConcatDataset([OfOwn(), Rows()]), "draw from a random generator of their own (datasets.0.rng), so"),
        (
            Cached,
            "draw for sample 0 when it is first read, and not so when it is read again: they keep what they drew",
        ),
        (Counted, "give another sample 0 when it is read again: they have a state, so"),
    ],
)
def test_data_that_depend_on_what_was_read_before_are_named(make, what, workers):
    (line,) = lines(make(), workers=workers)
    assert line.startswith(f"the training data {what}")


def test_held_out_data_are_read_too_and_pure_ones_say_nothing():
    (line,) = lines(Rows(), {"pure": Rows(), "own": OfOwn()})
    assert line.startswith("the evaluation data draw from a random generator of their own (rng)")
    assert lines(Rows(), Rows(), workers=2) == []


def test_held_out_data_have_a_collate_of_their_own():
    task, sizes = Given(), []
    task.eval_collate = lambda rows: sizes.append(len(rows)) or default_collate(rows)
    assert lines(Rows(), Rows(), task=task) == []
    assert set(sizes) == {1}


class Buffered(Rows):
    """Writes each row into the same memory, as what reads into a buffer does."""

    def __init__(self, kind):
        self.row = {"tensor": torch.zeros(4), "array": np.zeros(4), "list": [0.0] * 4}[kind]

    def __getitem__(self, index):
        self.row[:] = ROWS[index] if isinstance(self.row, torch.Tensor) else ROWS[index].tolist()
        return {"x": self.row, "labels": index}


class BufferedStream(IterableDataset):
    def __init__(self, rows, copied=False):
        self.rows, self.copied = rows, copied

    def __iter__(self):
        rows = (self.rows[index] for index in range(8))
        return ((row["x"].clone() if self.copied else row["x"], row["labels"]) for row in rows)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_rows_in_one_memory_are_refused(kind, workers):
    """A micro-batch would have its last row several times, and one of another size another row."""
    with pytest.raises(DataError, match=r"the training data give each row in the same memory, .*return a copy"):
        lines(Buffered(kind), workers=workers)
    with pytest.raises(DataError, match="the evaluation data give each row in the same memory"):
        lines(Rows(), Buffered(kind), workers=workers)
    with pytest.raises(DataError, match="the training data give each row in the same memory"):
        lines(BufferedStream(Buffered(kind)))
    assert lines(BufferedStream(Buffered("tensor"), copied=True)) == []


class Ordered(Given):
    """Gives the order of ``make(epoch, samples)``."""

    def __init__(self, make):
        super().__init__()
        self.make, self.rng, self.rows = make, np.random.default_rng(0), list(range(8))

    def order(self, epoch, samples):
        return self.make(self, epoch, samples)


def shuffled(task, epoch, samples):
    random.Random(epoch).shuffle(task.rows)
    return torch.tensor(task.rows)


ORDER = torch.arange(8)
IMPURE = [
    lambda task, epoch, samples: torch.randperm(samples),
    lambda task, epoch, samples: torch.from_numpy(task.rng.permutation(samples)),
    lambda task, epoch, samples: torch.tensor(random.sample(range(samples), samples)),
    lambda task, epoch, samples: ORDER.copy_(torch.randperm(samples)),
    shuffled,
]
PURE = [
    lambda task, epoch, samples: torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)),
    lambda task, epoch, samples: torch.arange(samples),
    lambda task, epoch, samples: None,
]


@pytest.mark.parametrize("make", IMPURE)
def test_an_order_that_is_another_when_it_is_asked_again_is_refused(make):
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    with pytest.raises(DataError, match=r"Ordered\.order gives epoch 0 another order when it is asked again, so it"):
        lines(Rows(), task=Ordered(make))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (str(np.random.get_state()), random.getstate()) == before[1:]


@pytest.mark.parametrize("make", PURE)
def test_an_order_of_seed_and_epoch_is_taken(make):
    assert lines(Rows(), task=Ordered(make)) == []


class Lines(IterableDataset):
    """A file that is open before any process reads it."""

    def __init__(self, file):
        self.file = file

    def __iter__(self):
        return ((torch.zeros(1), int(line)) for line in self.file)


class FromTheStart(Lines):
    def __iter__(self):
        self.file.seek(0)
        return super().__iter__()


class AnotherEachTime(IterableDataset):
    def __iter__(self):
        return iter([(torch.tensor(np.random.default_rng().random(4)), 0)] * 3)


@pytest.mark.parametrize(("name", "rows", "what"), [("rows", 9999, "another"), ("rows.gz", 99, "no")])
def test_a_stream_whose_file_the_start_would_read_is_refused(tmp_path, name, rows, what):
    path, text = tmp_path / name, "".join(f"{row}\n" for row in range(rows)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix else text)
    file = gzip.open if path.suffix else open
    with (
        file(path, "rt") as opened,
        pytest.raises(DataError, match=f"Lines has {what} first row when a second process .*{path}.*in __iter__$"),
    ):
        lines(Lines(opened))


def test_a_stream_that_begins_at_its_start_is_taken(tmp_path):
    (tmp_path / "rows").write_text("1\n2\n3\n")
    with (tmp_path / "rows").open() as opened:
        assert lines(FromTheStart(opened)) == []
    assert lines(AnotherEachTime()) == []


class Sought(Rows):
    """Looks for its row in a file that was open before."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def __getitem__(self, index):
        self.file.seek(index)
        return ROWS[index], int(self.file.read(1)[0])


class Logged(Sought):
    """Writes to such a file."""

    def __getitem__(self, index):
        print(index, file=self.file, flush=True)
        return ROWS[index], index


def test_workers_that_look_in_one_file_at_once_are_named(tmp_path):
    (tmp_path / "rows").write_bytes(bytes(range(8)))
    with (tmp_path / "rows").open("rb") as opened:
        (line,) = lines(Sought(opened), workers=2)
        for workers in (1, 0):
            opened.seek(7)
            assert lines(Sought(opened), workers=workers) == []
    with (tmp_path / "log").open("w+") as log:
        assert lines(Logged(log), workers=2) == []
    assert line.startswith(f"the training data read {tmp_path / 'rows'}, which was open before the workers started")


class Files(Dataset):
    """Rows read from files that are listed in a form."""

    def __init__(self, place, form):
        paths = sorted(place.iterdir())
        self.note, self.words, self.root = "x" * 5000, ["a text"] * len(paths), place
        self.listed = [
            {
                "path": path,
                "text": str(path),
                "name of the root's": path.name,
                "with a class": (str(path), 0),
                "by name": {"label": 0, "file": path},
            }[form]
            for path in paths
        ]

    def __len__(self):
        return len(self.listed)

    def __getitem__(self, index):
        return torch.zeros(2), torch.zeros(1)


class OfFiles(Line):
    def __init__(self, place, form):
        self.place, self.form = place, form

    def train_data(self):
        files = Files(self.place, self.form)
        return Subset(ConcatDataset([files]), range(len(files))) if self.form == "text" else files


@pytest.mark.parametrize("form", ["path", "text", "name of the root's", "with a class", "by name"])
def test_a_resume_says_that_one_of_a_data_sets_files_is_another_one(form, tmp_path, capsys):
    """Five rows are read at a start; the others are known by the names and sizes of their files. A copy is the same."""
    for place in ("first", "copy"):
        (tmp_path / place).mkdir()
        for number in range(24):
            (tmp_path / place / f"{number:02}").write_bytes(b"x" * number)
    file = ds_config(1, "SGD", 0.1, engine="single", steps=1, run_dir=str(tmp_path / "run"))
    dsframe.fit(OfFiles(tmp_path / "first", form), file)
    file["dsframe"]["steps"] = 2
    dsframe.fit(OfFiles(tmp_path / "copy", form), file, resume="auto")
    assert "the training data" not in capsys.readouterr().err
    (tmp_path / "copy" / "07").write_bytes(b"")
    file["dsframe"]["steps"] = 3
    dsframe.fit(OfFiles(tmp_path / "copy", form), file, resume="auto")
    assert "the training data: sample (which one is unknown) was another one" in capsys.readouterr().err


def test_a_list_of_texts_or_of_other_length_is_no_list_of_files(tmp_path):
    (tmp_path / "a").touch()
    made = Files(tmp_path, "path")
    assert _files_of(made) == [tmp_path / "a"]
    made.more, made.listed = [tmp_path / "a"] * 2, ["b"]
    assert _files_of(made) == _files_of([tmp_path / "a"]) == []
