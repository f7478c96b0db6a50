"""Rows of any kind become batches: pairs, dicts with labels, what a collator makes; and what does not fit is named by its row."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, default_collate

import dsframe
from dsframe.data import Loader, Pad, TensorSource, as_source
from dsframe.data.collate import collated
from dsframe.data.datasets import DatasetSource
from dsframe.errors import DataError
from tests.files import ds_config

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


class Texts(Dataset):
    """Rows of different lengths, as a tokenised data set has them: lists of numbers in dicts."""

    def __init__(self, rows=96):
        numbers = random.Random(0)
        self.rows = [[numbers.randrange(1, 64) for _ in range(numbers.randrange(3, 20))] for _ in range(rows)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Llama(dsframe.Task):
    """Next tokens of padded rows; a step is the mean over the tokens that are no padding."""

    def __init__(self, collate=None, workers=0):
        self.collate, self.workers = collate or Pad(), workers

    def model(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**LLAMA, use_cache=False))

    def loss(self, outputs, targets):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets[:, 1:].flatten(), ignore_index=-100)

    def loss_weight(self, targets):
        return (targets[:, 1:] != -100).sum()

    def train_data(self):
        return Texts()

    def eval_data(self):
        return Texts(21)


def words(*known, **special):
    """A tokenizer of these words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, known[0]))
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def fit(tmp_path, task):
    settings = {"engine": "single", "steps": 5, "run_dir": str(tmp_path / "run")}
    summary = dsframe.fit(task, ds_config(16, "AdamW", 0.01, {"gradient_accumulation_steps": 2}, **settings))
    return summary.loss, summary.metrics["loss"]


def test_padding_does_not_change_the_training(tmp_path):
    from transformers import DataCollatorForSeq2Seq

    tokenizer = words("a", pad_token="a")
    plain = fit(tmp_path, Llama())
    for collate in (Pad(multiple=8), DataCollatorForSeq2Seq(tokenizer)):
        assert fit(tmp_path, Llama(collate)) == pytest.approx(plain, abs=1e-6), collate
    assert fit(tmp_path, Llama(workers=2)) == plain  # collated where the rows are read


def test_what_is_padded_is_masked_and_no_target():
    rows = [{"input_ids": [1, 2, 3], "labels": [2, 3, 4]}, {"input_ids": [], "labels": []}]
    batch = Pad(multiple=2)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [0] * 4]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [0] * 4]
    assert batch["labels"].tolist() == [[2, 3, 4, -100], [-100] * 4]
    assert {tensor.dtype for tensor in Pad()(rows[::-1]).values()} == {torch.int64}, "an empty row makes no floats"
    assert Pad(fill={"labels": -1})(rows)["labels"].tolist() == [[2, 3, 4], [-1] * 3]
    masked = [{"attention_mask": [0, 1], "input_ids": [1, 2]}, {"attention_mask": [1], "input_ids": [3]}]
    assert Pad()(masked)["attention_mask"].tolist() == [[0, 1], [1, 0]], "the rows' own"
    assert Pad()([{"x": [[1, 2]]}, {"x": [[3, 4]] * 2}])["x"].tolist() == [[[1, 2], [0, 0]], [[3, 4]] * 2]


def test_the_row_that_is_first_does_not_decide_the_type():
    rows = [{"x": [1, 2, 3], "labels": 0}, {"x": [0.5, 1.5], "labels": 0.5}]
    whole, turned = Pad(fill={"x": 9})(rows), Pad(fill={"x": 9})(rows[::-1])
    assert whole["x"].tolist() == [[1, 2, 3], [0.5, 1.5, 9]]
    assert whole["labels"].tolist() == [0, 0.5]
    for name, batch in whole.items():
        assert torch.equal(batch, turned[name].flip(0))
        assert batch.dtype == turned[name].dtype == torch.float32


def broken(rows):
    raise ValueError("no such column")


@pytest.mark.parametrize(
    ("rows", "collate", "message"),
    [
        (({"x": 1}, {"x": 2}), None, "a data set gave dicts with 'x': a dict without labels has no target"),
        (
            ({"x": [1, 2], "labels": 0}, {"x": [1], "labels": 0}),
            None,
            r"row \d has \['x'\] \[\d\] int64, but row \d has .*Pad\(\)",
        ),
        (
            ({"x": 1}, {"x": 2}),
            broken,
            r"broken makes no batch of rows \d, \d: ValueError: no such column \(.*test_collate.py:\d+\)",
        ),
        (({"x": 1}, {"x": 2}), lambda rows: 3, r"returned int, not \(inputs, targets\) or a dict with labels"),
        (
            ({"x": 1, "labels": 0}, {"x": 1, "labels": 0, "y": 2}),
            None,
            r"row \d or row \d lacks 'y'; give it to every row",
        ),
        (
            ({"x": 1, "label": 0, "labels": 0},) * 2,
            None,
            "rows have both 'labels' and 'label', and one of them would be lost",
        ),
        (
            ({"x": [1], "labels": 0}, {"x": [1], "labels": 0, "y": 2}),
            Pad(),
            "row 1 of these or row 2 of these lacks 'y'",
        ),
        (({"x": [1] * 9, "labels": 0},) * 2, Pad(length=4), "x has a row of 9, longer than length=4"),
        (((1.0, 1), (1.0, 2**64)), None, r"row \d has \[1\] \[\] object \(int\)"),
        (({"x": 1.0, "labels": 0}, {"x": None, "labels": 0}), None, r"row \d has \['x'\] \[\] object \(NoneType\)"),
        (({"x": [{"a": 1}], "labels": 0}, {"x": [{"b": 1}], "labels": 0}), None, r"row \d has .*\['x'\]\[0\]\['b'\]"),
    ],
)
def test_what_does_not_fit_is_named(rows, collate, message):
    def read():
        ((batch, _),) = Loader(as_source([*rows], 0, collate), seed=0, micro_batch_size=2).micro_batches(0)
        return batch

    with pytest.raises(DataError, match=message):
        read()


def test_the_first_row_that_does_not_fit_is_named():
    with pytest.raises(DataError, match=r"row 5 has .*, but row 9 has"):
        collated([(5, (1.0, 1)), (6, (1.0, 1)), (9, ([1.0], 1))])


def test_a_source_makes_its_own_batches():
    with pytest.raises(
        DataError, match="TensorSource makes its own batches, so the task's collate would not be called"
    ):
        as_source(TensorSource(torch.ones(2), torch.ones(2)), 0, Pad())


class _Generator:
    """A collator with a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, rows):
        return torch.rand(len(rows), 4, generator=self.generator), torch.zeros(len(rows))


def _masked(seed=None):
    from transformers import DataCollatorForLanguageModeling

    tokenizer = words("a", "[PAD]", "[MASK]", pad_token="[PAD]", mask_token="[MASK]")
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=seed)


def _plain(rows):
    return torch.tensor([row.pop("input_ids") for row in rows]), torch.zeros(len(rows))


def _flipping(rows):
    return _plain(rows if random.random() < 0.01 else rows[::-1])


def _noisy(rows):
    inputs, targets = _plain(rows)
    return inputs + torch.from_numpy(np.random.normal(size=inputs.shape)), targets


def _for_the_batch(rows):
    inputs, targets = _plain(rows)
    return inputs + torch.rand(4), targets


class _Centring:
    """Subtracts the mean of all batches so far."""

    def __init__(self):
        self.means = []

    def __call__(self, rows):
        inputs, targets = _plain(rows)
        self.means.append(float(inputs.sum()) + len(self.means))
        return inputs - sum(self.means) / len(self.means), targets


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("collate", "draws"),
    [
        (_plain, False),
        (_masked(), False),
        (_masked(5), True),
        (_flipping, True),
        (_noisy, True),
        (_Generator(), True),
        (_for_the_batch, True),
        (_Centring(), True),
    ],
)
def test_a_collate_that_draws_is_said(collate, draws, workers):
    """Its numbers are a batch's: other ones with another micro-batch or another number of ranks."""
    source = as_source([{"input_ids": [3, 4, 5, 6]} for _ in range(16)], 0, collate)
    loader = Loader(source, seed=0, micro_batch_size=4, workers=workers)
    before = torch.get_rng_state()
    assert [line.startswith("collate draws random numbers") for line in loader.lines(3)] == [True] * draws
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_collate_draws_for_a_row_does_not_depend_on_ranks_micro_batches_workers_and_resumes(workers):
    """Each sample twice in an epoch: every copy has draws of its own. Rows of several lengths: padding changes none."""
    rows = [{"input_ids": list(range(3, 7 + number % 9))} for number in range(8)]
    source = as_source(rows + rows, 0, _masked())

    def seen(ranks, accumulation, first=0):
        """For each row of steps 2 and 3 what it shows and what is to be learned."""
        found = []
        for step in range(2, 4):
            streams = [
                Loader(
                    source, seed=0, micro_batch_size=8 // ranks // accumulation, accumulation_steps=accumulation,
                    rank=rank, ranks=ranks, workers=workers, order=lambda epoch, samples: torch.arange(16) % 8,
                ).stream(first, 4) for rank in range(ranks)
            ]  # fmt: skip
            batches = list(zip(*map(list, streams), strict=True))[(step - first) * accumulation :][:accumulation]
            for inputs, targets in (batch for of_ranks in batches for batch in of_ranks):
                keep = inputs["attention_mask"].bool()
                found += [
                    [*inputs["input_ids"][row][kept].tolist(), *targets[row][kept].tolist()]
                    for row, kept in enumerate(keep)
                ]
        return found

    expected = seen(1, 1)
    assert len(expected) == 16
    assert any(target != -100 for row in expected for target in row[len(row) // 2 :])
    assert sum(first != copy for first, copy in zip(expected[:8], expected[8:], strict=True)) > 4
    assert seen(2, 1) == seen(1, 4) == seen(2, 2, first=2) == expected


def test_a_collate_that_sorts_makes_no_predictions():
    rows = [(torch.tensor([float(row), 0.0]), row % 2) for row in (3, 1, 2)]

    def sorts(rows):
        return default_collate(sorted(rows, key=lambda row: -row[0][0].item()))

    DatasetSource(rows, 0, default_collate).refuse_other_order()
    DatasetSource(rows[:1], 0, sorts).refuse_other_order()
    pictures = [(torch.arange(10.0).view(5, 2) + row, row) for row in range(5)]  # as many lines as rows are compared
    DatasetSource(pictures, 0, lambda rows: tuple(map(list, zip(*rows, strict=True)))).refuse_other_order()
    with pytest.raises(DataError, match="sorts gives the rows of a batch in another order"):
        DatasetSource(rows, 0, sorts).refuse_other_order()

    def packs(rows):  # which keeps its own way back to the order of the rows
        return pack_sequence([row for row, _ in rows], enforce_sorted=False), torch.tensor([label for _, label in rows])

    lengths = [(torch.ones(2 + row % 3, 4), row) for row in range(5)]
    DatasetSource(lengths, 0, packs).refuse_other_order()
