"""Did-you-mean suggestions by edit distance."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path


def closest(word: str, candidates: Iterable[str], limit: int | None = None) -> str | None:
    """Returns the candidate that ``word`` most likely stands for; None if none is similar.

    Args:
        limit: Largest edit distance (insertions, deletions, substitutions, swaps). Default: a quarter of the letters,
            at least 1.
    """
    from rapidfuzz.distance import DamerauLevenshtein, Prefix  # 20 ms: only for files that need suggestions

    limit = max(1, len(word) // 4) if limit is None else limit
    ranked = []
    for candidate in set(candidates) - {word}:
        distance: float = 0.5
        if _plain(candidate) != _plain(word):
            distance = DamerauLevenshtein.distance(word, candidate, score_cutoff=limit)
        if distance <= limit and distance < max(len(word), len(candidate)):
            # Ties: prefer the same letters in another order, then the longest common prefix.
            other_letters, start = sorted(word) != sorted(candidate), Prefix.similarity(word, candidate)
            ranked.append((distance, other_letters, -start, candidate))
    return min(ranked)[-1] if ranked else None


def longer(word: str, candidates: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns candidates that begin with ``word``, and others that contain all of its words."""
    names, words = sorted(set(candidates) - {word}), set(word.split("_"))
    begin = [name for name in names if name.startswith(word)]
    return begin, [name for name in names if name not in begin and words <= set(name.split("_"))]


def did_you_mean(word: str, candidates: Iterable[str], limit: int | None = None, otherwise: str = "") -> str:
    """Returns the question as a remedy; ``otherwise`` if no candidate is similar."""
    similar = closest(word, candidates, limit)
    return f'did you mean "{similar}"?' if similar else otherwise


def near_path(path: Path) -> str:
    """Returns the question for a missing path; empty if the path exists or no entry of its folder is similar."""
    if path.exists():
        return ""
    with suppress(OSError):
        similar = closest(path.name, [entry.name for entry in path.parent.iterdir()])
        return f"; did you mean {path.parent / similar}?" if similar else ""
    return ""


def _plain(word: str) -> str:
    return re.sub("[^a-z0-9]", "", word.lower())


def similar_pattern(pattern: str, names: Iterable[str]) -> str:
    """Suggests a similar pattern that matches something; else lists some of the names."""
    names, word = list(names), pattern.strip("*.")
    parts = {part for name in names for part in (name, name.rpartition(".")[0], *name.split("."))}
    similar = pattern.replace(word, closest(word, parts - {""}) or word) if word else pattern
    if any(fnmatchcase(name, similar) for name in names):
        return f'did you mean "{similar}"?'
    return f"there are {len(names)} parameters, such as {', '.join(names[:: max(1, len(names) // 4)])}"
