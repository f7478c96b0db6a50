"""Damaged files: every one gets a verdict, none a traceback, none a wait; and slips get the right suggestion."""

import contextlib
import copy
import json
import random
import string
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from docs.schema import sections
from dsframe.config.load import examine
from dsframe.config.read.reader import ReadError, read
from dsframe.errors import ConfigError
from dsframe.tools.check import resolved

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLIC = sorted((REPOSITORY.parent / "shared" / "public_ds_configs").glob("*.json"))
OWN = sorted(path for path in (REPOSITORY / "ds_configs").glob("*.json") if "schema" not in path.name)
TEXTS = [path.read_text() for path in OWN + PUBLIC]


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


def slip(word, rng):
    """``word`` with one letter left out, added, changed, or swapped with the next."""
    at = rng.randrange(len(word))
    kind = rng.choice("dist")
    letter = rng.choice(string.ascii_lowercase)
    if kind == "d":
        return word[:at] + word[at + 1 :]
    if kind == "i":
        return word[:at] + letter + word[at:]
    if kind == "s":
        return word[:at] + letter + word[at + 1 :]
    at = min(at, max(0, len(word) - 2))
    return word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :]


def holder(path, document):
    """The object at a path as ``sections()`` names it, made if need be."""
    owner = document
    for part in path:
        name, _, rest = part.partition(" ")
        choice = rest.strip("()").split(",")[0]
        if name == "params":
            owner["type"] = choice
        if name == "task":
            owner = owner.setdefault(name, {"name": "a.b:C" if choice == "custom" else choice})
        elif name.endswith("[]"):
            owner = owner.setdefault(name[:-2], [{}])[0]
        elif name.endswith(".NAME"):
            owner = owner.setdefault(name[:-5], {}).setdefault("metric", {})
        else:
            owner = owner.setdefault(name, {})
    return owner


def test_invisible_characters_are_shown():
    problems = examine('{"train_batch_size": 8,\u00a0"zero_optimisation": {}, "x\u200b": 1}', "a.json").problems
    said = "\n".join(map(str, problems))
    assert (r"\xa0" in said, r"x\u200b: unknown key" in said) == (True, True)


def test_slips_get_the_right_suggestion_first():
    rng = random.Random(3)
    right = total = 0
    for path, section in sections():
        for key in section.model_fields:
            for _ in range(4):
                word = slip(key, rng)
                if not word or word in section.model_fields:
                    continue
                document = {"train_batch_size": 1}
                owner = holder(path, document)
                owner.pop(key, None)
                owner[word] = 1
                found = [p for p in examine(json.dumps(document), "x.json").problems if p.path.split(".")[-1] == word]
                total += 1
                right += any(f'"{key}"' in problem.message + problem.remedy for problem in found)
    print(f"{right} of {total} slips: {right / total:.1%}")
    assert total > 2000
    assert right / total >= 0.95
