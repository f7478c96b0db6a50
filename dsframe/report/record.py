"""A run's directory: ``run.json`` and ``config.json`` say what runs, ``metrics.jsonl`` is written as it happens, and
``summary.json`` when the run has succeeded.

Only rank 0 keeps a record. The files hold plain JSON and can be read while the run goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsframe.errors import DataError
from dsframe.report.loggers import Ending, Loggers
from dsframe.report.provenance import provenance

if TYPE_CHECKING:
    from dsframe.engine import Plan
    from dsframe.report.utilization import Utilization
    from dsframe.trainer import Summary

_METRICS = "metrics.jsonl"
_SUMMARY = "summary.json"
_ORIGIN = "run.json"
"""What was started, with which versions, on which machine."""
_CONFIG = "config.json"
"""The file that ran, with overrides, "auto" resolved: ``--config RUN/config.json`` is the same training again."""


class Record:
    """What rank 0 writes down. An earlier run's record in the same directory is replaced."""

    def __init__(
        self,
        plan: Plan,
        engine: str,
        description: str,
        start_seconds: float,
        done_steps: int = 0,
        utilization: Utilization | None = None,
    ) -> None:
        """``start_seconds``: from the start of the run to a ready engine. ``done_steps``: steps of an earlier run to go on from."""
        directory = plan.directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _SUMMARY).unlink(missing_ok=True)
        self._directory = directory
        self._about = {
            "engine": engine,
            "description": description,
            "config": str(plan.config.path),
            "config_digest": plan.config.digest,
            "launcher": plan.world.launcher,
            "world_size": plan.world.size,
            "device": plan.device.type,
            "train_batch_size": plan.batch.train_batch_size,
            "start_seconds": start_seconds,
        }
        if utilization:
            self._about |= {"flops_per_unit": utilization.flops_per_unit, "peak_flops": utilization.peak_flops}
        _write(directory / _ORIGIN, provenance())
        _write(directory / _CONFIG, plan.config.shown())
        before = _lines_until(directory / _METRICS, done_steps) if done_steps else []
        self._file = (directory / _METRICS).open("w", encoding="utf-8", buffering=1)
        self._file.writelines(before)
        self._loggers = Loggers(
            plan.config, self._about, directory, plan.batch.train_batch_size, done_steps if before else 0
        )
        self.write({"run": self._about})

    def write(self, record: Mapping[str, Any]) -> None:
        """One line of ``metrics.jsonl``."""
        clean = _clean(record)
        self._file.write(json.dumps(clean) + "\n")
        self._loggers.write(clean)

    def started(self, phases: Mapping[str, float]) -> None:
        """The first step has ended. ``phases``: seconds since the process's start, by what they were spent on."""
        self._about["startup_seconds"] = dict(phases)
        self._file.write(json.dumps({"startup_seconds": dict(phases), "at": time.time()}) + "\n")

    def close(self, ending: Ending) -> None:
        """The run ends; what was written stays."""
        self._file.close()
        self._loggers.close(ending)

    def finish(self, summary: Summary, predicted: Mapping[str, Any], communication: Mapping[str, Any] | None) -> None:
        """Writes ``summary.json``; its presence says that the run came to its end.

        ``predicted``: by ``dsframe.plan``. ``communication``: by :mod:`dsframe.report.replay`, where it was measured.
        """
        self.close("FINISHED")
        content = {**self._about, **asdict(summary), "predicted": dict(predicted)}
        if communication is not None:
            content["communication"] = dict(communication)
        _write(self._directory / _SUMMARY, content)


def beside(summary: Summary, predicted: Mapping[str, Any]) -> str:
    """Predictions and measurements in one line."""
    if "problem" in predicted:
        return f"no prediction: {predicted['problem']}"
    peak = max(summary.peak_memory_bytes)
    parts = [
        f"{predicted['memory_bytes'] / 2**20:,.0f} MiB a rank ({peak / predicted['memory_bytes'] - 1:+.0%} measured)"
    ]
    seconds = predicted["seconds_per_step"]
    if seconds and summary.rate:
        parts.append(
            f"{seconds * 1e3:,.4g} ms a step ({summary.units_per_step / summary.rate / seconds - 1:+.0%} measured)"
        )
    sent = sum(predicted["sent_bytes_per_step"].values())
    return f"predicted: {', '.join(parts)}, {sent / 1e6:,.4g} MB sent a step and rank"


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(_clean(content), indent=2) + "\n", encoding="utf-8")


def _clean(value: Any) -> Any:
    """``value`` with null for every number that is not finite: JSON has none of those."""
    if isinstance(value, Mapping):
        return {key: _clean(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_until(path: Path, step: int) -> list[str]:
    """What was recorded up to ``step``: the steps after it are trained again."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line).get("step", 0) <= step]


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The records of a run, in order; a last line that a crash cut off is left out. Raises DataError where there are none."""
    try:
        text = (directory / _METRICS).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{directory} holds no run: {error}") from None
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_summary(directory: Path) -> dict[str, Any]:
    """What a finished run came to. Raises DataError where the run did not come to its end."""
    try:
        summary: dict[str, Any] = json.loads((directory / _SUMMARY).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{directory} holds no finished run: {error}") from None
    return summary


def read_origin(directory: Path) -> dict[str, Any]:
    """Where a run's figures come from; empty for a directory without it."""
    return _read(directory / _ORIGIN)


def read_config(directory: Path) -> dict[str, Any]:
    """The file that ran; empty for a directory without it."""
    return _read(directory / _CONFIG)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    return found
