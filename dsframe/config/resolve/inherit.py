"""Finds the defaults that a file inherits because it does not set them, and whose they are.

DeepSpeed and torch differ in ways that are easily missed: clipping, weight decay, what "Adam" is. ``"inherit":
"torch"`` writes torch's defaults into the file before it is read, so that every engine uses them, DeepSpeed too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsframe.config.read.findings import Resolved, show
from dsframe.config.read.reader import Raw, inside
from dsframe.config.schema.optimizer import Optimizer

TORCH: Mapping[str, Mapping[str, Any]] = {
    "adam": {"adam_w_mode": False, "weight_decay": 0.0},
    "adamw": {"adam_w_mode": True, "weight_decay": 0.01},
}
"""Defaults of torch.optim's classes (torch 2.13) that differ from DeepSpeed 0.19.8 for the same ``optimizer.type``."""
_PARAMS = ("lr", "momentum", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode")
_DIFFERENT = frozenset({"gradient_clipping", "lr", "weight_decay", "adam_w_mode"})
"""The rate, and keys with different defaults in the two libraries. Only with one of these the others are printed
too."""


def fill(raw: Raw) -> tuple[Resolved, ...]:
    """Writes torch's defaults into a file that asks for them, in place. Returns the inherited defaults."""
    by_torch = inside(raw, ("dsframe", "inherit")) == "torch"
    library = "torch's default" if by_torch else "DeepSpeed's default"
    values: dict[tuple[str, ...], Any] = {}
    if "gradient_clipping" not in raw:
        values["gradient_clipping",] = 0.0 if by_torch else 1.0
    name, params = inside(raw, ("optimizer", "type")), inside(raw, ("optimizer", "params")) or {}
    section = Optimizer.variant(raw["optimizer"], "params") if isinstance(name, str) else None
    torchs = TORCH.get(str(name).lower(), {}) if by_torch else {}
    if section is not None and isinstance(params, dict):
        for key in _PARAMS:
            if key in section.model_fields and key not in params and (key != "adam_w_mode" or name.lower() == "adam"):
                values["optimizer", "params", key] = torchs.get(key, section.model_fields[key].get_default())
        decoupled = str(name).lower() == "adamw" or {**torchs, **params}.get("adam_w_mode", True)
        if params.get("torch_adam") is True and decoupled and "weight_decay" not in {**torchs, **params}:
            values["optimizer", "params", "weight_decay"] = 0.01  # DeepSpeed passes torch only the written keys
        if torchs:
            raw["optimizer"]["params"] = {**torchs, **params}
    if by_torch:
        raw.setdefault("gradient_clipping", 0.0)
    reason = f"inherited, {library}"
    return tuple(Resolved(path, value, reason, detail=library) for path, value in values.items())


def sentence(inherited: tuple[Resolved, ...]) -> str:
    """Returns one line; empty if the file sets the rate and everything whose default differs."""
    if not any(default.path[-1] in _DIFFERENT for default in inherited):
        return ""
    values = ", ".join(f"{default.path[-1]} {show(default.value)}" for default in inherited)
    decoupled = any(default.path[-1] == "adam_w_mode" and default.value for default in inherited)
    note = ' ("Adam" is AdamW)' if decoupled else ""
    return f"the file does not say, so inherited: {values}{note}; {inherited[0].detail}s"
