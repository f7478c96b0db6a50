"""Preference pairs: which tokens are inputs, and which are learned."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from dsframe.data.preferences import Preferences
from dsframe.errors import DataError

WORDS = ["<end>", "q", "r", "yes", "no", "maybe"]
END, Q, R, YES, NO, MAYBE = range(len(WORDS))


def collate(context: int = 8) -> Preferences:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "<end>"))
    words.pre_tokenizer = Whitespace()
    return Preferences(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>"), context, multiple=1)


def test_the_answers_are_learned_and_the_prompts_are_not() -> None:
    inputs, targets = collate()([{"prompt": "q r ", "chosen": "yes maybe", "rejected": "no"}])
    assert inputs["input_ids"].tolist() == [[[Q, R, YES, MAYBE], [Q, R, NO, 0]]]
    assert inputs["attention_mask"].tolist() == [[[1, 1, 1, 1], [1, 1, 1, 0]]]
    assert targets.tolist() == [[[-100, YES, MAYBE, END], [-100, NO, END, -100]]]


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(DataError, match="row 0 of the batch, chosen: nothing of the answer is within context 1"):
        collate(1)([{"prompt": "q r q ", "chosen": "yes", "rejected": "no"}])
