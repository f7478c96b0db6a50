"""Old spellings: removed sections, deprecated keys, and keys of other tools, with their replacements.

Sources: ``_REMOVED_TOP_LEVEL_CONFIG_KEYS`` and ``_REMOVED_ZERO_CONFIG_KEYS`` in ``deepspeed/runtime/config.py``
(0.19.8); the fields marked deprecated in ``deepspeed/runtime/zero/config.py``; public configuration files.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsframe.config.read.findings import Findings, show
from dsframe.config.read.reader import Path, Raw, inside, keys
from dsframe.text import table_of

_TABLE = table_of(__file__)
OTHER_TOOLS: Mapping[str, tuple[list[str], str]] = _TABLE["other tools"]
"""Message -> keys that only files of that program have, and the remedy."""
REMOVED: Mapping[str, str] = _TABLE["removed"]
"""Path -> remedy. Removed from DeepSpeed 0.19, which raises if the key is present, whatever its value."""
RENAMED: Mapping[str, str] = _TABLE["renamed"]
"""Old spelling that DeepSpeed still reads -> current spelling, with the same value."""
SYNONYMS: Mapping[str, tuple[str, str]] = _TABLE["unknown"]
"""Key that people write for something else -> what is wrong, and the remedy."""
MEANT: Mapping[str, str] = _TABLE["meant"]
"""Old names and names of other tools that DeepSpeed ignores -> the key of the same section with that meaning."""


def modernise(raw: Raw, findings: Findings) -> None:
    """Replaces deprecated keys in ``raw`` in place, and reports each."""
    for old, new in RENAMED.items():
        _rename(raw, keys(old), keys(new), findings)
    if isinstance(raw.get("zero_optimization"), dict):
        _cpu_offload(raw["zero_optimization"], findings)


def _rename(raw: Raw, old: Path, new: Path, findings: Findings) -> None:
    owner, before, after = inside(raw, old[:-1]), str(old[-1]), str(new[-1])
    if not isinstance(owner, dict) or before not in owner:
        return
    value = owner.pop(before)
    if owner.get(after) is not None:
        findings.error(old, f'another name of "{after}", which the file has as well', "keep one", code="conflict")
        return
    owner[after] = value
    findings.moved(old, new)
    if old[0] == "zero_optimization" and f"stage3_{before}" == after:
        findings.note(old, "short name", f'DeepSpeed documents it as "{after}"', code="deprecated")
    else:
        findings.warning(old, "deprecated", f'write "{after}"', code="deprecated")


def _cpu_offload(zero: Raw, findings: Findings) -> None:
    sections = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
    for old in (*sections, "cpu_offload_use_pin_memory"):
        new = sections.get(old)
        if old not in zero or (new and zero[old] == "auto"):
            continue
        path: Path = ("zero_optimization", old)
        value, section = zero.pop(old), {"device": "cpu"}
        message, remedy = "deprecated, and DeepSpeed ignores it", 'write "pin_memory" under the offload'
        if new is not None:
            message, remedy = "deprecated, and false is the default", f'write "{new}": {{"device": "cpu"}}'
        if not isinstance(value, bool) and (new or value not in (None, "auto")):
            message = f"deprecated, and {show(value)} is not true or false"
            findings.error(path, message, remedy, code="type", at_value=True)
        elif new is None or not value:
            findings.warning(path, message, remedy if new is None else "remove it", code="deprecated")
        elif zero.get(new) is not None:
            message = f'deprecated name of "{new}", which the file has as well: DeepSpeed raises'
            findings.error(path, message, "remove it", code="conflict")
        else:
            zero[new] = section
            findings.warning(path, "deprecated", remedy, code="deprecated")
            findings.moved(path, ("zero_optimization", new))
