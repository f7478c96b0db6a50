"""Context of the rules: the typed file, the file as written, and the findings to report to."""

from __future__ import annotations

from functools import cached_property

from dsframe.config.read.findings import Findings
from dsframe.config.read.reader import Path, Raw, inside, keys
from dsframe.config.schema.file import File
from dsframe.engines.table import TABLE, Entry, named


class RuleContext:
    """One file, as the rules see it. Paths are dotted, or tuples if they contain an index."""

    def __init__(
        self, file: File, raw: Raw, findings: Findings, engine: str = "auto", world_size: int | None = None
    ) -> None:
        self.file = file
        self.raw = raw
        self.findings = findings
        self.engine = engine
        self.world_size = world_size
        """Processes of the run, if known."""
        self.settings, self.model = file.dsframe, file.dsframe.model
        self.zero, self.stage = file.zero_optimization, file.zero_optimization.stage
        self.optimizer = file.optimizer.type.lower() if file.optimizer else ""
        """Type of the optimizer in lower case; empty if there is none."""
        self.params = file.optimizer.params if file.optimizer else {}
        self.task = str(getattr(file.dsframe.task, "name", ""))
        self.offloads = self.zero.optimizer_device != "none"
        self.half = "bf16" if file.bf16.enabled else "fp16" if file.fp16.enabled else ""
        """16-bit format of the parameters; empty if none."""

    @cached_property
    def entry(self) -> Entry:
        """The engine's entry in the table; an empty one if there is no such engine."""
        return TABLE.get(named(self.engine), Entry(""))

    @property
    def by_deepspeed(self) -> bool:
        """True if DeepSpeed is the engine."""
        return self.entry.by_deepspeed

    @property
    def splits_layers(self) -> bool:
        """True if DeepSpeed splits each layer (tensor parallelism)."""
        return self.by_deepspeed and self.file.tensor_parallel.autotp_size > 1

    def wrote(self, path: str) -> bool:
        """True if the file has this key and no error is reported about its value."""
        *parents, key = keys(path)
        owner = inside(self.raw, parents)
        return isinstance(owner, dict) and key in owner and not self.fails(path)

    def fails(self, path: str) -> bool:
        """True if an error is reported at or below ``path``."""
        return self.findings.fails(path)

    def conflict(self, path: str | Path, message: str, remedy: str = "remove it") -> None:
        """Reports two values that exclude each other."""
        self.findings.error(path, message, remedy, code="conflict", at_value=True)

    def warn(self, path: str | Path, message: str, remedy: str, *, code: str) -> None:
        """Reports a value that works but may not be meant."""
        self.findings.warning(path, message, remedy, code=code, at_value=True)

    def no_effect(self, path: str | Path, message: str = "has no effect", remedy: str = "remove it") -> None:
        """Reports a key without effect."""
        self.findings.warning(path, message, remedy, code="no-effect")

    def note(self, path: str | Path, message: str, remedy: str = "", *, code: str = "no-effect") -> None:
        """Reports something that is easily overlooked."""
        self.findings.note(path, message, remedy, code=code)

    def imports(self, path: str | Path, name: object) -> None:
        """Reports that a ``module:name`` runs code; other names run only dsframe's or a library's code."""
        if isinstance(name, str) and ":" in name:
            text = f"imports and runs code: {name.partition(':')[0]}"
            self.findings.note(path, text, code="imports", at_value=True)
