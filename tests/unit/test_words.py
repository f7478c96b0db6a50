"""The words of messages and docstrings: no sentence that has been replaced comes back, and docstrings have a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import REPOSITORY

PACKAGE = REPOSITORY / "dsframe"

REPLACED = (
    "takes one rank's share of the gradients for all",
    "makes groups for one of them",
    "a task's loss takes all scores",
    "reaches nobody",
    "would carry what is not finite",
    "laid out as no checkpoint here can hold it",
    "flat shares: another training",
    "inputs that they could share out",
    "2-D convolution, whose layout this is",
    "does the same, once more",
    "of the checkpoints, at multiples of",
    "nothing left to tune",
    "drop one of the three and it is computed",
    "with which Horovod crashes when it starts",
    "have other buffers by now",
    "each as much as any other",
    "times over, its neighbours",
    "never starts from the beginning",
    "came after that",
    "Puts together what does",
    "depends on all the same",
    "is not to count as much",
    "Whether what only DeepSpeed does is done",
    "leaves pipeline and tensor parallelism be",
    "nothing to write a default to",
    "Damaged is what every rank finds so",
    "is nothing that this engine can do",
    "by a scale that their loss was never multiplied by",
    "clipped while the gradients are still scaled",
    "leave the rest at its first learning rate",
    "layers cut among",
    "sequences cut among",
    "weights kept whole",
    "nothing says how to cut",
    "has a mistake of its own.",
    "of which no sample can be asked for",
    "makes its own batches; then all have to",
    "where a batch reaches over the end of an",
    "every start is not known",
    "writes the prompt otherwise",
    "sort what comes out of a set, whose order",
    "and decide nothing by the",
    "about a share of",
    "the size of what layers pass on",
    "here bounds are settled",
    "for which the next one's host waits",
    "which slices of sequences do not know",
    "of which the mean over all samples follows",
    "its blocks take more than the stream",
    "checkpoints would have two counts",
    "saved place is one in the order of these weights",
    "trained in this order beside these frozen ones",
    "of no launcher that is known here",
    "batches have other samples since",
    "a compiled block keeps by itself",
    "whose stages pass on one tensor",
    "auto: from the start where there is none",
    "the first is what speed-up is to",
    "among so many likeliest",
    "its last value is the trial's",
    "who still holds the directory is one of its own",
    "Of the buffers that differ between the ranks that hold them",
)
"""Sentences that a second-language reader had to read twice."""

REPLACED_ON_PAGES = (
    "What would break that is an error",
    "as far as it can be found",
    "where they are root on Debian",
    "name one that has",
    "The number is that of processes:",
    "decide where state lives, not what is computed",
    "are the gathering, that training waits for",
    "or three kills, at one step end it",
    "compute along and count for nothing",
    "ignores them, here they hold",
    "has DeepSpeed's ZeRO-3 gather every parameter",
    "the rival's rate",
)
"""Of the README and docs/, as readers found them."""

ELSEWHERE = (
    "engines/deepspeed/",
    "trainer.py",
    "job.py",
    "run.py",
    "run_dir/",
    "observe/",
    "tools/",
    "config/schema/",
)
"""Folders whose docstrings are not yet checked for a verb, but for the ones that follow."""
AMONG_THEM = ("tools/launch/", "tools/check.py", "tools/doctor.py", "tools/convert.py", "tools/explain.py")
WITHOUT_A_VERB = re.compile(r"(\*\*Collective\.\*\* )?(Of|Whether|Around|Until|Also|So long|So many)\b")
"""Beginnings of a docstring without a noun or a verb; of a function's, ``What``, ``Where`` and ``How`` as well."""
OF_A_FUNCTION = re.compile(r"(\*\*Collective\.\*\* )?(What|Where|How)\b")


def sources() -> dict[str, str]:
    found = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert len(found) > 100
    return found


@pytest.mark.parametrize("sentence", REPLACED)
def test_no_replaced_sentence_comes_back(sentence: str) -> None:
    wrong = [name for name, text in sources().items() if sentence in text]
    assert wrong == []


@pytest.mark.parametrize("sentence", REPLACED_ON_PAGES)
def test_no_replaced_sentence_comes_back_on_a_page(sentence: str) -> None:
    pages = [REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("examples/**/*.md")]
    assert len(pages) > 50
    assert [page.name for page in pages if sentence in page.read_text()] == []


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Line, text, and whether it is a function's, of every docstring, those under fields included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for index, child in enumerate(body if isinstance(body, list) else []):
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, value.value, isinstance(node, ast.FunctionDef) and index == 0


def test_docstrings_have_a_subject_and_a_verb() -> None:
    wrong, seen = [], 0
    for name, text in sources().items():
        if name.startswith(ELSEWHERE) and not name.startswith(AMONG_THEM):
            continue
        for line, words, of_function in docstrings(ast.parse(text)):
            seen += 1
            if WITHOUT_A_VERB.match(words) or (of_function and OF_A_FUNCTION.match(words)):
                wrong.append(f"dsframe/{name}:{line}: {words.splitlines()[0][:80]}")
    assert seen > 500
    assert not wrong, "\n".join(wrong)


def test_every_word_of_the_glossary_is_there() -> None:
    text = Path(REPOSITORY / "CONTRIBUTING.md").read_text()
    glossary = text[text.index("## Glossary") :]
    for word in (
        "cut",
        "read",
        "whole",
        "place",
        "share",
        "examine",
        "find",
        "measure",
        "refuse",
        "count",
        "batch",
        "plan",
    ):
        assert f"| {word} |" in glossary, word
