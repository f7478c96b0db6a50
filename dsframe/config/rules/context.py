"""The context of the rules: the typed file, the file as written, and where to report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsframe.config.read.findings import Findings
from dsframe.config.schema.file import File
from dsframe.engines.table import TABLE, Entry, named


@dataclass(eq=False, repr=False)
class RuleContext:
    """One file, as the rules see it."""

    file: File
    raw: dict[str, Any]
    findings: Findings
    engine: str = "auto"
    """The engine that will run."""
    world_size: int | None = None
    """Processes of the run, where that is known."""

    @property
    def entry(self) -> Entry:
        """Returns the facts about this engine; nothing, where a command line names one that there is not."""
        return TABLE.get(named(self.engine), Entry(""))

    @property
    def by_deepspeed(self) -> bool:
        """True if DeepSpeed is the engine."""
        return self.entry.by_deepspeed

    @property
    def pipelined(self) -> bool:
        """True if DeepSpeed splits the model into stages."""
        return self.by_deepspeed and self.file.pipeline.stages > 1

    @property
    def splits_layers(self) -> bool:
        """True if DeepSpeed splits each layer (tensor parallelism)."""
        return self.by_deepspeed and self.file.tensor_parallel.autotp_size > 1

    @property
    def splits_sequences(self) -> bool:
        """True if DeepSpeed splits each sample (sequence parallelism)."""
        return self.by_deepspeed and (self.file.sequence_parallel_size or 1) > 1

    def wrote(self, *path: str) -> bool:
        """True if the file has this key, and no error is reported about its value."""
        owner: Any = self.raw
        for part in path:
            if not isinstance(owner, dict) or part not in owner:
                return False
            owner = owner[part]
        return not self.findings.fails(path)

    def conflict(self, path: tuple[str, ...], message: str, remedy: str) -> None:
        """Report two values that exclude each other."""
        self.findings.error(path, message, remedy, code="conflict", at_value=True)

    def no_effect(self, path: tuple[str, ...], message: str, remedy: str = "remove it") -> None:
        """Report a key without effect."""
        self.findings.warning(path, message, remedy, code="no-effect")

    def imports(self, path: tuple[str | int, ...], name: object) -> None:
        """Say that a ``module:name`` runs code; a name of dsframe's own or of a library does not."""
        if isinstance(name, str) and ":" in name:
            text = f"imports and runs code: {name.partition(':')[0]}"
            self.findings.note(path, text, code="imports", at_value=True)
