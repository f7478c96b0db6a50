"""Damaged files: every one gets a verdict, none a traceback, none a wait; and slips get the right suggestion."""

import contextlib
import copy
import json
import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsframe.config.load import examine
from dsframe.config.read.reader import ReadError, read
from dsframe.errors import ConfigError
from dsframe.tools.check import resolved
from tests.unit.test_config_reader import TEXTS


def _trees():
    found = []
    for text in TEXTS:
        try:
            root = read(text).root
        except ReadError:
            continue
        if isinstance(root, dict) and root:
            found.append(root)
    return found


TREES = _trees()
LIMIT_SECONDS = 2.0
MANY = settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

PIECES = st.sampled_from(
    ["{", "}", "[", "]", ",", ":", '"', "'", "\\", "\n", "//", "#", "/*", "*/", "'''", "auto", "null", "true", "NaN", "1e999",
     "-", "0", "9" * 400, "é", "\x00", "\ufeff", "\ud83d\ude00", '"stage": 9', '"a": {"b": [', "True", " "]
)  # fmt: skip

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "cpu", "2", "1e-3"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def judged(text):
    """The verdict on a text, and everything that a user can ask for afterwards."""
    start = time.perf_counter()
    examined = examine(text, "x.json")
    for problem in examined.problems:
        assert str(problem)
        assert problem.message
        assert problem.code
        assert problem.line <= text.count("\n") + 1
    errors = [problem for problem in examined.problems if problem.severity == "error"]
    assert examined.config is not None or errors
    if examined.config is not None:
        json.dumps(examined.config.written())
        assert len(examined.config.digest) == 64
        if not errors:
            with contextlib.suppress(ConfigError):  # the batch sizes may not divide
                resolved(examined.config, 2)
    assert time.perf_counter() - start < LIMIT_SECONDS
    return examined


@MANY
@given(
    st.sampled_from(TEXTS),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 30), PIECES), min_size=1, max_size=5),
)
def test_damaged_text(text, edits):
    for position, length, piece in edits:
        at = position % (len(text) + 1)
        text = text[:at] + piece + text[at + length :]
    judged(text)


def _paths(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


@MANY
@given(
    st.sampled_from(TREES),
    st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from("vdkm"), VALUES, st.text(max_size=5))),
)
def test_damaged_values(tree, edits):
    tree = copy.deepcopy(tree)
    for index, kind, value, name in edits:
        paths = list(_paths(tree))
        if not paths:
            break
        path = paths[index % len(paths)]
        owner = tree
        for part in path[:-1]:
            owner = owner[part]
        if kind == "v":
            owner[path[-1]] = value
        elif kind == "d":
            del owner[path[-1]]
        elif kind == "m":  # misplaced: to the top level
            tree[str(path[-1])] = owner[path[-1]]
        elif isinstance(owner, dict):
            owner[str(path[-1])[:-1] + name] = owner.pop(path[-1])
    judged(json.dumps(tree))


def test_invisible_characters_are_shown():
    problems = examine('{"train_batch_size": 8,\u00a0"zero_optimisation": {}, "x\u200b": 1}', "a.json").problems
    said = "\n".join(map(str, problems))
    assert (r"\xa0" in said, r"x\u200b: unknown key" in said) == (True, True)
