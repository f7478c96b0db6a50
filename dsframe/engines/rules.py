"""Rules for files of one engine only (``Entry.rules``). DeepSpeed's are in ``dsframe.config.rules``."""

from __future__ import annotations

from dsframe.config.rules.context import RuleContext


def fsdp(context: RuleContext) -> None:
    """Reports a shard size that does not divide the number of processes."""
    wanted, processes = context.file.dsframe.fsdp, context.world_size
    if processes and wanted.sharding == "hybrid" and processes % (wanted.shard_size or 1):
        context.findings.error(
            ("dsframe", "fsdp", "shard_size"), f"{wanted.shard_size} does not divide {processes} processes",
            "choose a number that does", code="world", at_value=True,
        )  # fmt: skip
