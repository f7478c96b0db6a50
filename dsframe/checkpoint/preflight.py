"""Checks before training that every rank sees the run's folder and can write to it; a node may lack it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.checkpoint import store
from dsframe.checkpoint.byte_files import catch_io_error
from dsframe.checkpoint.layout import DTYPES
from dsframe.cluster.exchange import Ranks, all_gather_json, all_gather_text
from dsframe.errors import CheckpointError

if TYPE_CHECKING:
    from dsframe.engine import Engine


def preflight(engine: Engine, folder: Path) -> None:
    """**Collective.** Tries what a save needs: rank 0 creates a folder next to ``folder`` (in the target, if that is a
    link), every other rank writes into it, and it is removed. Raises CheckpointError, on every rank, if one cannot.

    Otherwise the first save would fail, by default at the end of training. The folder itself is not used: it may be
    renamed to archive it, and nodes would cache the old one by its name (NFS).
    """
    wanted, world = engine.plan.config.settings.checkpoints, engine.plan.world
    if not wanted.at_end and wanted.every_steps is None:
        return
    buffers = engine.state().buffers.items()
    refused = [f"{name} ({buffer.dtype})" for name, buffer in buffers if buffer.dtype not in DTYPES]
    if refused := sorted({name for names in all_gather_json(engine, refused) for name in names}):
        raise CheckpointError(
            f"this run cannot be saved: checkpoints do not support the buffer {', '.join(refused)}; register it with "
            "persistent=False, or use another dtype"
        )
    # A new name, so that no node can have cached it as missing.
    trial_name = f"{folder.name if folder.is_symlink() else '.'}/.{os.urandom(8).hex()}.partial"
    trial = folder.parent / all_gather_text(engine, trial_name)[0]
    failure = catch_io_error(lambda: _begin(trial)) if world.is_main else ""
    failures = all_gather_text(engine, failure)
    if not world.is_main and not failures[0]:
        failure = catch_io_error(lambda: _join(trial, world.rank))
    failures = all_gather_text(engine, failure)
    if world.is_main:
        shutil.rmtree(trial, ignore_errors=True)
    if any(failures):
        raise CheckpointError(
            f"this run cannot be saved: {'; '.join(named(engine, failures))}; every host needs this folder, shared (NFS) and "
            'writable: choose another with --run-dir, or write "checkpoints": {"at_end": false} to save nothing'
        )


def _begin(trial: Path) -> None:
    trial.mkdir(parents=True)
    (trial / "0").write_bytes(b"0")


def _join(trial: Path, rank: int) -> None:
    (trial / "0").read_bytes()
    (trial / str(rank)).write_bytes(b"0")
    (trial / str(rank)).unlink()  # removed here, so that this node knows at once


def damaged_files(ranks: Ranks, path: Path, sign_of_life: Callable[[], None] = lambda: None) -> list[str]:
    """**Collective.** Returns what is damaged in a checkpoint, empty if nothing is; each rank reads its share.

    A file is damaged only if every rank says so. Raises CheckpointError, on every rank, if only some ranks cannot read
    it: then their nodes have a problem, and the checkpoint may be complete.
    """
    suspects = sorted({name for damages in _damage_of_ranks(ranks, path, None, sign_of_life) for name in damages})
    if not suspects:
        return []
    damage_of = _damage_of_ranks(ranks, path, suspects, sign_of_life)
    if damaged := sorted(set(suspects).intersection(*damage_of)):
        return [damage_of[0][name] for name in damaged]
    raise _unread(path, ["; ".join(damages.values()) for damages in damage_of], ranks)


def _damage_of_ranks(
    ranks: Ranks, path: Path, names: Collection[str] | None, sign_of_life: Callable[[], None]
) -> list[dict[str, str]]:
    """**Collective.** Returns each rank's report on the files ``names``, or on its share of all files."""
    world = ranks.plan.world
    damage: dict[str, str] = {}
    failure = ""
    try:
        share = (world.rank, world.size) if names is None else (0, 1)
        damage = store.damage(path, names, share, sign_of_life)
    except store.UnreadableError as error:
        failure = str(error)
    except CheckpointError as error:
        damage = {store.MANIFEST: str(error)}
    reports = all_gather_json(ranks, {"damage": damage, "failure": failure})
    if any(report["failure"] for report in reports):
        raise _unread(path, [report["failure"] for report in reports], ranks)
    return [report["damage"] for report in reports]


def _unread(path: Path, failures: list[str], ranks: Ranks) -> CheckpointError:
    """**Collective.** Returns the same error on every rank. ``failures``: by rank, empty strings for success."""
    return CheckpointError(
        f"not every rank can read {path}: {'; '.join(named(ranks, failures))}; nothing was renamed; every host needs this "
        "folder, shared (NFS) and readable"
    )


def named(ranks: Ranks, failures: list[str]) -> list[str]:
    """**Collective.** Returns the failures, each with its rank and node, without the empty ones."""
    hosts = all_gather_text(ranks, socket.gethostname())
    return [
        f"rank {rank} on {host}: {text}" for rank, (host, text) in enumerate(zip(hosts, failures, strict=True)) if text
    ]
