"""Did-you-mean: the most similar word, by the number of slips that turn one into the other."""

from __future__ import annotations

import re
from collections.abc import Iterable


def closest(word: str, candidates: Iterable[str], limit: int | None = None) -> str | None:
    """The candidate that ``word`` most likely stands for, or None when none is near.

    Args:
        limit: Most slips (letters added, left out, changed, or swapped with their neighbour). By default one in four
            letters, at least one.
    """
    from rapidfuzz.distance import DamerauLevenshtein  # 20 ms: only for files that have something to suggest

    if limit is None:
        limit = max(1, len(word) // 4)
    plain = _plain(word)
    best: tuple[float, int, str] | None = None
    for candidate in candidates:
        if candidate == word:
            continue
        if _plain(candidate) == plain:
            distance = 0.5
        else:
            distance = DamerauLevenshtein.distance(word, candidate, score_cutoff=limit)
            if distance > limit or distance >= max(len(word), len(candidate)):
                continue
        # Among equals: the same letters in another order, then the longest common start.
        rank = (distance, _order(word, candidate), candidate)
        if best is None or rank < best:
            best = rank
    return best[2] if best else None


def did_you_mean(word: str, candidates: Iterable[str], limit: int | None = None, otherwise: str = "") -> str:
    """The question, as a remedy; ``otherwise`` where no candidate is near."""
    similar = closest(word, candidates, limit)
    return f'did you mean "{similar}"?' if similar else otherwise


def containing(word: str, candidates: Iterable[str]) -> str | None:
    """The only candidate that has every part of ``word``: ``warmup_steps`` is short for ``warmup_num_steps``."""
    parts = _parts(word)
    found = [candidate for candidate in candidates if len(parts) > 1 and parts <= _parts(candidate)]
    return found[0] if len(found) == 1 else None


def _parts(word: str) -> set[str]:
    return {part.removesuffix("s") for part in word.lower().split("_")}


def _plain(word: str) -> str:
    return re.sub("[^a-z0-9]", "", word.lower())


def _order(word: str, candidate: str) -> int:
    common = next((i for i, (a, b) in enumerate(zip(word, candidate, strict=False)) if a != b), len(word))
    return (0 if sorted(word) == sorted(candidate) else 100) - common
