"""Defaults that a file inherits because it does not say: which values train, and whose they are.

DeepSpeed's and torch's differ where nobody looks: clipping, weight decay, what "Adam" is. ``"inherit": "torch"`` writes
torch's into the file before it is read, so that every engine has them, DeepSpeed too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsframe.config.read.findings import Resolved, show
from dsframe.config.schema.optimizer import Optimizer

TORCH: Mapping[str, Mapping[str, Any]] = {
    "adam": {"adam_w_mode": False, "weight_decay": 0.0},
    "adamw": {"adam_w_mode": True, "weight_decay": 0.01},
}
"""Where torch.optim's classes (torch 2.13) have another default than DeepSpeed 0.19.8 for the same ``optimizer.type``."""
_SAID = ("lr", "momentum", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode")
_TOLD = frozenset({"gradient_clipping", "lr", "weight_decay", "adam_w_mode"})
"""The rate, and where DeepSpeed and torch differ. The others are said beside them, not alone: both libraries agree."""


def fill(raw: dict[str, Any]) -> tuple[Resolved, ...]:
    """Writes torch's defaults into a file that asks for them, in place. Returns what trains although the file did not say it."""
    found = tuple(_inherited(raw))
    if _torchs(raw):
        raw.setdefault("gradient_clipping", 0.0)
        kind, params = _optimizer(raw)
        if TORCH.get(kind) and isinstance(params, dict):
            raw["optimizer"]["params"] = {**TORCH[kind], **params}
    return found


def _inherited(raw: Mapping[str, Any]) -> Iterator[Resolved]:
    torchs = _torchs(raw)
    reason = f"inherited, {'torch' if torchs else 'DeepSpeed'}'s default"
    if "gradient_clipping" not in raw:
        yield Resolved(("gradient_clipping",), 0.0 if torchs else 1.0, reason)
    kind, params = _optimizer(raw)
    section = Optimizer.variant(raw.get("optimizer", {}), "params") if kind else None
    if section is None or not isinstance(params, dict):
        return
    values = {**(TORCH.get(kind, {}) if torchs else {}), **params}
    for key in _SAID:
        if key not in section.model_fields or key in params or (key == "adam_w_mode" and kind != "adam"):
            continue
        value = values.get(key, section.model_fields[key].get_default(call_default_factory=True))
        decoupled = kind == "adamw" or values.get("adam_w_mode", True)
        if key == "weight_decay" and decoupled and values.get("torch_adam") is True:
            value = TORCH["adamw"][key]  # DeepSpeed hands torch what is written, and no more
        yield Resolved(("optimizer", "params", key), value, reason)


def _torchs(raw: Mapping[str, Any]) -> bool:
    settings = raw.get("dsframe")
    return isinstance(settings, dict) and settings.get("inherit") == "torch"


def _optimizer(raw: Mapping[str, Any]) -> tuple[str, Any]:
    section = raw.get("optimizer")
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        return "", None
    return section["type"].lower(), section.get("params", {})


def sentence(found: tuple[Resolved, ...]) -> str:
    """Returns one line; empty where the file says the rate and everything that DeepSpeed and torch have other defaults for."""
    if not any(one.path[-1] in _TOLD for one in found):
        return ""
    values = ", ".join(f"{one.path[-1]} {show(one.value)}" for one in found)
    decoupled = any(one.path[-1] == "adam_w_mode" and one.value for one in found)
    what = ' ("Adam" is AdamW)' if decoupled else ""
    return f"the file does not say, so inherited: {values}{what}; {found[0].reason.removeprefix('inherited, ')}s"
