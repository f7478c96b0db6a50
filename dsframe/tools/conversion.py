"""The file that ``dsframe convert`` writes, and what became of each argument that it met."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsframe.config.read import foreign

_OFF: tuple[Any, ...] = (None, False, "no", "NO", "none", "None", [], {})
_ITSELF = "dsframe does so by itself, or has nothing like it to switch"


class Conversion:
    """A file that grows, and what became of each argument."""

    def __init__(self, ds_config: Mapping[str, Any] | None = None) -> None:
        """``ds_config``: what to begin with."""
        self.document: dict[str, Any] = dict(ds_config or {})
        self.entries: list[tuple[str, str, str]] = []
        self.processes: int | None = None

    def of(self, kind: str) -> dict[str, str]:
        """Returns what became of the arguments of one kind."""
        return {name: text for of_kind, name, text in self.entries if of_kind == kind}

    def put(self, name: str, path: str, value: Any, changed: str = "") -> None:
        """Writes ``value`` at the dotted ``path``. A ds_config's own value stays, unless "auto"."""
        *above, last = path.split(".")
        section = self.document
        for part in above:
            section = section.setdefault(part, {})
        present = section.get(last, "auto")
        if present in ("auto", value):
            section[last] = value
            text = f"{path} = {json.dumps(value)}"
            self.note("changed" if changed else "taken", name, f"{text}; {changed}" if changed else text)
        else:
            stays = f"the file has {path} = {json.dumps(present)}, which stays"
            self.note("to do", name, f"{stays}; it said {json.dumps(value)}")

    def note(self, kind: str, name: str, text: str) -> None:
        """Says what became of an argument, once."""
        if (kind, name, text) not in self.entries:
            self.entries.append((kind, name, text))

    def todo(self, name: str, text: str) -> None:
        """Says what is left to the user."""
        self.note("to do", name, text)

    def take(self, name: str, value: Any, special: Mapping[str, str]) -> None:
        """Takes one argument by the table, or says what is to be done."""
        path = special.get(name) or foreign.target(name)
        if name in foreign.table()["nothing to do"] and not path:
            self.note("nothing to do", name, _ITSELF)
        elif (isinstance(value, (bool, str, list, dict, type(None))) and value in _OFF) or value == "auto":
            self.note("nothing to do", name, f"{json.dumps(value)}, as without it")
        elif path:
            self.put(name, path, value)
        else:
            self.todo(name, foreign.advice(name) or "no counterpart is known")

    def take_precision(self, name: str, value: str) -> None:
        """Takes a number format, by its name in any of the libraries."""
        form, _, pure = value.rpartition("-") if value.endswith(("-mixed", "-true")) else (value, "", "")
        short = {"bf16": "bf16", "fp16": "fp16", "16": "fp16"}.get(form)
        if form in ("no", "None", "32", "False"):
            self.note("nothing to do", name, "fp32, as without it")
        elif short is None:
            self.todo(name, f"{value} has no counterpart; {foreign.advice('precision')}")
        elif pure == "true" or self.document.get("dsframe", {}).get("engine") == "deepspeed":
            self.put(name, f"{short}.enabled", True)
        else:
            self.put(name, "torch_autocast.enabled", True)
            self.document["torch_autocast"]["dtype"] = "bfloat16" if short == "bf16" else "float16"
