"""Rules about ``dsframe.model`` and adapters."""

from __future__ import annotations

import os
import shutil

from dsframe.config.rules.context import RuleContext


def compiler() -> str | None:
    """Returns the C++ compiler that torch.compile would use: $CXX, else one of the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def check(context: RuleContext) -> None:
    """Reports a missing compiler, and keys that the adapter's folder defines too."""
    if context.model.compile and compiler() is None:
        message = "torch.compile needs a C++ compiler, which this machine does not have"
        context.warn("dsframe.model.compile", message, "install g++, or write false", code="not-installed")
    adapter = context.settings.adapter
    if adapter is not None and adapter.folder is not None:
        for key in sorted(adapter.model_fields_set - {"type", "folder", "base_format"})[:1]:
            context.conflict(f"dsframe.adapter.{key}", "the adapter of the folder says it", "remove one of them")
