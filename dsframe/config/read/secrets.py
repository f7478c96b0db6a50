"""Hides secrets, which are used in the run but neither written nor printed: account keys such as ``comet.api_key``, and
``user:password@`` in URLs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from dsframe.config.read.reader import value_of

HIDDEN = "***"
_NAME = re.compile(
    r"(^|_)(token|(api|access|account|auth|client|deploy|encryption|hf|hub|license|private|secret|service|signing|ssh|wandb)?_?key)$"
    r"|_key$|secret|passw(or)?d|passphrase|(^|_)pwd$|credential",
    re.IGNORECASE,
)
_HARMLESS = re.compile(
    r"^key$|(^|_)(eos|bos|pad|unk|sep|cls|mask|image|audio|video|boi|eoi|start|end|stop|special|prefix|suffix|new|next)_token$"
    r"|^(experiment|image|audio|label|text|input|output|target|metric|prompt|answer|messages?|sort|primary|group|feature)_key$",
    re.IGNORECASE,
)
"""Harmless names: tokens of a tokenizer, columns of a table, and Comet's ``experiment_key``."""
_ACCOUNT = re.compile(r'(?<=://)[^/\s"]+@')
_PARAMETER = re.compile(r"""(?P<start>[?&;](?P<key>[\w.~-]+)=)[^&;#\s"']+""")
_SIGNATURE = re.compile(r"^(sig|signature|x-amz-.*|x-goog-.*|key|code|auth|jwt|awsaccesskeyid)$", re.IGNORECASE)
"""Query parameters that grant access to a URL."""
_SETTING = re.compile(r"(?P<start>(?:--set=)?(?P<key>[\w.\s-]+)=)(?P<value>.*)", re.DOTALL)


def is_secret(key: str) -> bool:
    """True if a value under this name is a secret. Only the last part of a dotted name counts."""
    name = key.strip().lstrip("-").rpartition(".")[2].strip().replace("-", "_")
    return _NAME.search(name) is not None and _HARMLESS.search(name) is None


def without(content: Any) -> Any:
    """Returns a copy of JSON ``content`` without its secrets, which ``--config`` reads as the same training.

    A secret is text or an object under a secret name; numbers are not secret.
    """
    if isinstance(content, dict):
        return {
            key: without(value)
            for key, value in content.items()
            if value is None or isinstance(value, (bool, int, float)) or not is_secret(str(key))
        }
    if isinstance(content, str):
        return anonymous(content)
    return [without(item) for item in content] if isinstance(content, list) else content


def anonymous(text: str) -> str:
    """Returns ``text`` without credentials in URLs: ``//user:password@host/path?token=V`` becomes
    ``//host/path?token=***``."""
    return _PARAMETER.sub(_hidden_parameter, _ACCOUNT.sub("", text)) if "://" in text else text


def _hidden_parameter(match: re.Match[str]) -> str:
    secret = is_secret(match["key"]) or _SIGNATURE.match(match["key"])
    return match["start"] + HIDDEN if secret else match[0]


def redact(command: Sequence[str]) -> list[str]:
    """Returns the words of a command with ``***`` for secrets (``--set a.api_key=V``, ``--api-key=V``, ``--api-key
    V``).

    URLs lose their credentials.
    """
    return [
        HIDDEN if before.startswith("--") and "=" not in before and is_secret(before) else _word(word)
        for before, word in zip(["", *command], command, strict=False)
    ]


def _word(word: str) -> str:
    word = anonymous(word)
    setting = _SETTING.fullmatch(word)
    if setting is None:
        return word
    value = value_of(setting["value"])
    public = HIDDEN if is_secret(setting["key"]) else without(value)
    return word if public == value else setting["start"] + (public if public == HIDDEN else json.dumps(public))
