"""Single mistakes (check_mistakes.json), each with the exact message: what ``dsframe check`` prints for it."""

from pathlib import Path

import pytest

from dsframe.config.load import examine
from dsframe.engines import TABLE
from tests.files import read_json

*OTHERS, LAST = ["auto", *TABLE]
ENGINES = ", ".join(f'"{name}"' for name in OTHERS) + f' or "{LAST}"'
MISTAKES = read_json(Path(__file__).with_name("check_mistakes.json"))


@pytest.mark.parametrize(("text", "message"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_message(text, message):
    problems = [str(problem) for problem in examine(text, "f.json").problems if problem.severity != "note"]
    assert problems == [message.replace("ENGINES", ENGINES)]


def test_a_byte_order_mark_is_no_part_of_the_file():
    problems = examine('\ufeff\ufeff{"train_batch_size" 8}', "f.json").problems
    assert [str(problem) for problem in problems] == [
        "f.json:1:23: error: expected ':' after the key, found '8}'; check quotes and commas [syntax]"
    ]


def test_gradients_are_sent_in_the_models_own_type():
    """That is no other training, so no engine refuses it."""
    text = '{"train_batch_size": 8, "communication_data_type": "%s"}'
    fp32, bf16 = (examine(text % name, "f.json").config for name in ("fp32", "bf16"))
    assert [len(config.features) for config in (fp32, bf16)] == [0, 1]
