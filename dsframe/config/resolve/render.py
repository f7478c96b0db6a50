"""Prints the file that would run, each value that the user did not write with its reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dsframe.config.load import Config
from dsframe.config.read.reader import Path
from dsframe.config.resolve.batch import MICRO, STEPS, TRAIN, Batch


def batch_line(batch: Batch) -> str:
    """The batch sizes in one line."""
    text = (
        f"batch {batch.train_batch_size} = {batch.micro_batch_size} (micro) x {batch.accumulation_steps} (accumulation) "
        f"x {batch.data_parallel_size} (data-parallel ranks)"
    )
    return text + (f"; derived: {', '.join(batch.derived)}" if batch.derived else "")


def resolved(config: Config, world_size: int | None) -> str:
    """The file as JSON with comments. With a world size the batch sizes are explicit."""
    raw = config.shown()
    comments: dict[Path, str] = {}
    for found in config.resolved:
        line = next((found.path[:index] for index, part in enumerate(found.path) if isinstance(part, int)), found.path)
        before = f"{comments[line]}; " if line in comments else ""
        comments[line] = f"{before}{json.dumps(found.was)}: {found.reason}"
    for found in config.inherited:
        owner = raw
        for part in found.path[:-1]:
            owner = owner.setdefault(str(part), {})
        owner[str(found.path[-1])] = found.value
        comments[found.path] = found.reason
    if world_size is not None:
        batch = config.batch(world_size)
        handed = config.for_deepspeed(world_size)
        sizes = {}
        for key in (TRAIN, MICRO, STEPS):
            sizes[key] = handed[key]
            if key not in raw:
                how = next((line.partition(" = ")[2] for line in batch.derived if line.startswith(f"{key} = ")), "")
                comments[(key,)] = f"derived: {how or 'from the other two'}"
        raw = {**sizes, **{key: value for key, value in raw.items() if key not in sizes}}
    return "\n".join(_object(raw, (), comments, ""))


def _object(value: dict[str, Any], path: Path, comments: dict[Path, str], indent: str) -> Iterator[str]:
    yield "{"
    for index, (key, item) in enumerate(value.items()):
        here = (*path, key)
        comma = "," if index + 1 < len(value) else ""
        comment = f"  // {comments[here]}" if here in comments else ""
        start = f"{indent}  {json.dumps(key)}: "
        if isinstance(item, dict) and item:
            lines = list(_object(item, here, comments, indent + "  "))
            yield start + lines[0]
            yield from lines[1:-1]
            yield lines[-1] + comma + comment
        else:
            yield start + json.dumps(item) + comma + comment
    yield indent + "}"
