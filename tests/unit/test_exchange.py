"""What ranks tell each other by sums: texts, tensors, agreements, and the place of the first difference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsframe.cluster import exchange
from dsframe.errors import TaskError, WorldError
from dsframe.model.build import assert_same_model
from tests.threads import Room


def of_each(call, values):
    """What each rank gets from ``call`` with its own value."""
    return Room(len(values)).run(lambda ranks: call(ranks, values[ranks.plan.world.rank]))


@pytest.mark.parametrize("texts", [["", ""], ["", "é€𝄞" * 50, "x" * 4001], ["\x00\xff", "abcd"]])
def test_all_ranks_hear_all(texts):
    assert of_each(exchange.all_gather_text, texts) == [texts] * len(texts)


def test_a_model_of_another_class_is_named():
    def call(ranks, model):
        ranks.plan.task = None
        with pytest.raises(
            TaskError,
            match=r"first difference: module \(the model\) Sequential\(\) on rank 0; module \(the model\) Mod",
        ):
            assert_same_model(ranks, model)

    of_each(call, [nn.Sequential(nn.Linear(1, 1)), nn.ModuleList([nn.Linear(1, 1)])])


def test_ranks_that_are_elsewhere_are_no_lengths():
    """Another exchange's numbers were taken for the length of a text, and gigabytes were allocated."""

    def call(ranks, other):
        if other:
            ranks.sum_over_ranks(torch.tensor(other, dtype=torch.float64))
            return ""
        with pytest.raises(WorldError, match="exchange different things"):
            exchange.all_gather_text(ranks, "text")
        return "refused"

    for other in ([4e9, 3e9], [0.0, exchange._FRAME + (1 << 30)]):  # words of a digest; a text that nobody sends
        assert of_each(call, [None, other]) == ["refused", ""]


def test_all_ranks_get_all_tensors(monkeypatch):
    """Of other shapes and dtypes, to the bit, whatever is sent at once; one without elements takes the others' dtype."""
    monkeypatch.setattr(exchange, "_PIECE_BYTES", 8)
    wide = torch.arange(3.0 * 2).view(2, 3)
    kinds = [
        [torch.tensor([[1, -2], [3, 2**40]]), torch.tensor([]), torch.tensor(7)],
        [
            torch.tensor([True, False, True]),
            torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
            torch.tensor(-0.0),
        ],
        [torch.tensor([]), torch.tensor([], dtype=torch.int8), torch.tensor([3], dtype=torch.uint8)],
        [wide[:1, 0], wide[:, 0], wide.T],  # with strides
    ]
    for own in kinds:
        filled = [one.dtype for one in own if one.numel()]
        for found in of_each(exchange.all_gather_tensor, own):
            assert [one.dtype for one in found] == [one.dtype if one.numel() else filled[0] for one in own]
            assert [one.shape for one in found] == [one.shape for one in own]
            for one, other in zip(found, own, strict=True):
                assert repr(one.tolist()) == repr(other.tolist())


def test_one_rank_whose_digest_is_the_mean_of_the_others_agrees_that_they_differ(monkeypatch):
    monkeypatch.setattr(exchange, "xxh3_128_hexdigest", lambda content: f"{int(content):08x}" * 4)
    assert of_each(exchange.same, ["2", "1", "3"]) == [False] * 3
    assert of_each(exchange.same, ["7"] * 3) == [True] * 3


@given(st.lists(st.sampled_from(["", *(f"{'0' * at}1" for at in range(4))]), min_size=2, max_size=3))
@settings(max_examples=8, deadline=None)
def test_each_word_of_a_digest_counts(digests):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            exchange, "xxh3_128_hexdigest", lambda content: "".join(f"{d:0>8}" for d in f"{content.decode():0<4}")
        )
        assert of_each(exchange.same, digests) == [len(set(digests)) == 1] * len(digests)


def test_failures_are_told_to_all_with_their_rank():
    assert of_each(exchange.failures, ["", "no disk", ""]) == [["rank 1: no disk"]] * 3
    assert of_each(exchange.failures, [""] * 2) == [[]] * 2
    assert of_each(exchange.any_rank, [False, True]) == [True] * 2
    assert of_each(exchange.any_rank, [False, False]) == [False] * 2


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=5), min_size=2, max_size=3))
@settings(max_examples=25, deadline=None)
def test_the_first_difference_is_told_by_every_rank(lists):
    longest = max(map(len, lists))
    rows = [[entries[at] if at < len(entries) else "" for entries in lists] for at in range(longest)]
    expected = next((row for row in rows if len(set(row)) > 1), [])
    assert of_each(exchange.first_difference, lists) == [expected] * len(lists)


def test_ranks_are_named_by_what_they_say():
    assert exchange.by_value(["A", "B", "A"]) == "A on ranks 0, 2; B on rank 1"
    assert exchange.numbered(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert exchange.numbered(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
