"""The reader beside hjson, the package that DeepSpeed reads its file with; and its places."""

import random

import pytest

from dsframe.config.read.findings import Findings
from dsframe.config.read.reader import ReadError, inside, number_of, read
from tests.processes import REPOSITORY

OWN = sorted(path for path in (REPOSITORY / "ds_configs").glob("*.json") if "schema" not in path.name)
TEXTS = [path.read_text() for path in OWN]

HJSON = """\
# a comment
{
  // another
  "number": 5e8, /* inside */ small: 1e-3
  list: [1, 2
         3,],
  'single': 'it\\'s'
  empty: {}, nothing: null, yes: true
}
"""


def theirs(text):
    hjson = pytest.importorskip("hjson", reason="hjson comes with DeepSpeed, which is not installed")
    try:
        return hjson.loads(text, object_pairs_hook=dict)
    except (ValueError, IndexError, OverflowError, RecursionError) as error:
        return error


def ours(text):
    try:
        return read(text).root
    except ReadError as error:
        return error


@pytest.mark.parametrize(
    "text",
    [
        HJSON, "", "  \n", "// nothing", '{"a": 1,}', '{"a": [1, 2, 3,]}', "{a: 5e8, b: 1e10, c: 1.0, d: 1.5}",
        '{"a": "\\u00e9\\ud83d\\ude00\\n"}', "{a: true }", "{a: -0.0}", '\ufeff{"a": 1}',
        "{a: 1 // c\n}", "[1 2]", "[", "{", '{"a"}', '{"a":}', '{"a": "x}', "{a b: 1}", "5", '"x"',
        '{"a": 1} trailing', "{a: 1e400}", "/* open", '{"a": "\\x"}',
    ],
)  # fmt: skip
def test_reads_what_hjson_reads(text):
    expected, found = theirs(text), ours(text)
    if not isinstance(expected, (dict, list, Exception)) or (expected == {} and "{" not in text):
        assert isinstance(found, ReadError)  # a lone value is no configuration
    elif isinstance(expected, Exception):
        assert isinstance(found, ReadError), found
    else:
        assert repr(found) == repr(expected), "1 and 1.0 are equal"


@pytest.mark.parametrize("value", ["tru, ", "01", "1 2", "'''x'''", "x /* not a comment */ y", "NaN\n"])
def test_text_without_quotes_is_refused(value):
    with pytest.raises(ReadError, match=r"without quotes|expected"):
        read(f"{{a: {value}\n}}")


def test_reads_damaged_files_as_hjson_does():
    rng = random.Random(11)
    letters = "{}[],:\"'\\ \n\t#/*-+.eE0123456789abtruefalsn_"
    for _ in range(3000):
        text = rng.choice(TEXTS)[:1200]
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(letters) * rng.randint(0, 2) + text[at + rng.randint(0, 2) :]
        expected, found = theirs(text), ours(text)
        assert isinstance(found, ReadError) or found == expected, text


def test_places():
    document = read(HJSON)
    assert document.position(document.spans[("number",)].key_start) == (4, 3)
    assert document.position(document.spans[("list", 2)].start) == (6, 10)
    assert [inside(document.root, ("list", index)) for index in (2, 3)] == [3, None]
    for path, span in document.spans.items():
        if path and isinstance(path[-1], str):
            key = HJSON[span.key_start : span.key_end].strip("'\"")
            assert key == path[-1]


def test_columns_count_characters():
    document = read('{"é😀": 1, "b": 2}')
    assert document.position(document.spans[("b",)].key_start) == (1, 11)


def test_duplicates_are_all_reported_and_the_last_one_counts():
    document = read('{"a": {"x": 1},\n "a": {"y": 2, "y": 3},\n "a": 4}')
    assert document.root == {"a": 4}
    places = [
        (path, document.position(offset), document.position(first)) for path, offset, first in document.duplicates
    ]
    assert places == [
        (("a",), (2, 2), (1, 2)),
        (("a", "y"), (2, 16), (2, 8)),
        (("a",), (3, 2), (2, 2)),
    ]
    assert ("a", "y") not in document.spans


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{a:" * 70 + "1" + "}" * 70])
def test_deep_nesting_is_a_message(text):
    with pytest.raises(ReadError, match="nested more than 64 levels"):
        read(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 5e8 ", 500_000_000),
        ("-1e-3", -0.001),
        ("x", None),
        ("1e999", None),
    ],
)
def test_number_of(text, number):
    assert number_of(text) == number


def test_the_same_problem_is_named_once():
    """Several rules may look at a key."""
    findings = Findings(read('{"a": 1, "b": 2}'), "a.json")
    for _ in range(2):
        findings.error(("a",), "is wrong", "remove it", code="value")
    findings.warning(("a",), "is wrong", "remove it", code="value")
    findings.error(("b",), "is wrong", "remove it", code="value")
    assert [(problem.severity, problem.path) for problem in findings.problems] == [
        ("error", "a"),
        ("warning", "a"),
        ("error", "b"),
    ]
