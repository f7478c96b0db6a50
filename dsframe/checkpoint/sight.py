"""Whether every rank sees the run's folder as the others do: hosts may lack it, or have trouble of their own with it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection
from pathlib import Path

from dsframe.checkpoint import store
from dsframe.checkpoint.share import Ranks, share
from dsframe.errors import CheckpointError


def examine(ranks: Ranks, path: Path, sign_of_life: Callable[[], None] = lambda: None) -> list[str]:
    """**Collective.** What is damaged in a checkpoint, of which each rank reads its share; none where it is whole.

    Damaged is what every rank finds so. Raises CheckpointError, on every rank, for what only some cannot read: that is their
    hosts' trouble, and the checkpoint may be whole.
    """
    suspects = sorted(set().union(*_look(ranks, path, None, sign_of_life)))
    if not suspects:
        return []
    found = _look(ranks, path, suspects, sign_of_life)
    if damaged := sorted(set(suspects).intersection(*found)):
        return [found[0][name] for name in damaged]
    raise _unread(path, ["; ".join(one.values()) for one in found], ranks)


def _look(
    ranks: Ranks, path: Path, names: Collection[str] | None, sign_of_life: Callable[[], None]
) -> list[dict[str, str]]:
    """**Collective.** What each rank finds damaged among ``names``, or in its share of all files."""
    world = ranks.plan.world
    damage, failure = {}, ""
    try:
        own = sorted(store.read_manifest(path)["files"])[world.rank :: world.size] if names is None else names
        damage = store.damage(path, own, sign_of_life)
    except store.UnreadableError as error:
        failure = str(error)
    except CheckpointError as error:
        damage = {store.MANIFEST: str(error)}
    told = [json.loads(text) for text in share(ranks, json.dumps({"damage": damage, "failure": failure}))]
    if any(one["failure"] for one in told):
        raise _unread(path, [one["failure"] for one in told], ranks)
    return [one["damage"] for one in told]


def _unread(path: Path, said: list[str], ranks: Ranks) -> CheckpointError:
    """**Collective.** The same error on every rank; ``said``: by each of them, empty where all is well."""
    return CheckpointError(
        f"{path} cannot be read by every rank: {'; '.join(named(ranks, said))}; nothing was renamed; every host needs this "
        "folder, shared (NFS) and readable"
    )


def named(ranks: Ranks, said: list[str]) -> list[str]:
    """**Collective.** What each rank ``said``, with its number and host; not those that said nothing."""
    hosts = share(ranks, socket.gethostname())
    return [f"rank {rank} on {host}: {text}" for rank, (host, text) in enumerate(zip(hosts, said, strict=True)) if text]
