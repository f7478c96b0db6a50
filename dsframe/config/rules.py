"""What single values cannot tell: combinations that make DeepSpeed raise, and keys without effect.

Each rule names the place in DeepSpeed 0.19.8 that raises or ignores. An error is something that fails or silently trains
something else; a warning is something that works and does nothing, or works elsewhere only.
"""

from __future__ import annotations

from typing import Any

from dsframe.config import (
    rules_checkpoints,
    rules_model,
    rules_optimizer,
    rules_pipeline,
    rules_report,
    rules_sequence,
    rules_system,
    rules_tensor,
    rules_training,
    rules_zero,
)
from dsframe.config.findings import Findings
from dsframe.config.model import File
from dsframe.config.rule import Judge


def judge(file: File, raw: dict[str, Any], findings: Findings, engine: str | None = None) -> None:
    """Report what is wrong with the combination of values. ``raw`` tells what was written; ``engine``: not the file's."""
    bench = Judge(file, raw, findings, engine or file.dsframe.engine)
    rules_zero.judge(bench)
    rules_tensor.judge(bench)
    rules_sequence.judge(bench)
    rules_training.judge(bench)
    rules_optimizer.judge(bench)
    rules_system.judge(bench)
    rules_model.judge(bench)
    rules_pipeline.judge(bench)
    rules_checkpoints.judge(bench)
    rules_report.judge(bench)
