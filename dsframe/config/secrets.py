"""Keys of accounts, such as ``comet.api_key``, and what stands before the host of an address, ``//user:password@``: nothing that
dsframe writes or prints has them. What runs does, of course."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from dsframe.config.overrides import value_of

HIDDEN = "***"
_NAME = re.compile(
    r"(^|_)(api_?key|(access|auth|api|bearer|hf|hub|refresh)_?token|password|passwd|secret|secret_?key|access_?key|credentials?)$"
    r"|^token$",
    re.IGNORECASE,
)
"""Not every token: ``eos_token`` and ``max_tokens`` are no secrets."""
_ACCOUNT = re.compile(r'(?<=://)[^/\s"]+@')
_SETTING = re.compile(r"(?P<start>(?:--set=)?(?P<key>[\w.\s-]+)=)(?P<value>.*)", re.DOTALL)


def is_secret(key: str) -> bool:
    """Whether a value of that name, the last part of a dotted one, is nobody else's business."""
    return _NAME.search(key.strip().lstrip("-").rpartition(".")[2].strip().replace("-", "_")) is not None


def without(content: Any) -> Any:
    """A copy of ``content``, of JSON's kinds, that lacks the secrets in it: ``--config`` reads it as the same training."""
    if isinstance(content, dict):
        return {
            key: without(value)
            for key, value in content.items()
            if value is None or isinstance(value, dict) or not is_secret(str(key))
        }
    if isinstance(content, str):
        return anonymous(content)
    return [without(item) for item in content] if isinstance(content, list) else content


def anonymous(text: str) -> str:
    """``text`` with addresses that name no user: ``https://user:password@host/path`` is ``https://host/path``."""
    return _ACCOUNT.sub("", text)


def redact(command: Sequence[str]) -> list[str]:
    """The words of a command with ``***`` for what is secret: in ``--set a.api_key=V``, ``--api-key=V``, ``--api-key V``.

    Addresses lose what stands before the host."""
    return [
        HIDDEN if before.startswith("--") and "=" not in before and is_secret(before) else _word(word)
        for before, word in zip(["", *command], command, strict=False)
    ]


def _word(word: str) -> str:
    word = anonymous(word)
    found = _SETTING.fullmatch(word)
    if found is None:
        return word
    if is_secret(found["key"]):
        return found["start"] + HIDDEN
    value = value_of(found["value"])
    kept = without(value)
    return word if kept == value else found["start"] + json.dumps(kept)
