"""A separate folder for this run under ``nvme_path``.

DeepSpeed names its swap files after stage and rank only, so two runs with the same ``nvme_path`` would silently
overwrite each other's state. It also leaves the files behind. Each run gets ``dsframe-HOST-PID-RANDOM`` there, removes
it at the end, and removes those of runs on this node that are no longer alive.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsframe.cluster.world import World
from dsframe.errors import EngineError
from dsframe.host.leftovers import host, unused_swap

_SECTIONS = ("offload_optimizer", "offload_param")


class SwapFolders:
    """The NVMe folders of one run."""

    def __init__(self, zero: Mapping[str, Any], world: World, device: torch.device) -> None:
        """**Collective.** Creates a separate folder under each ``nvme_path`` of ``zero_optimization``.

        torch.distributed must be initialized. Raises EngineError if a folder cannot be created.
        """
        self._world = world
        self.paths: dict[str, str] = {}
        """Section -> its folder."""
        sections = {
            name: zero[name]
            for name in _SECTIONS
            if isinstance(zero.get(name), Mapping) and zero[name].get("device") == "nvme"
        }
        if not sections:
            return
        # Each rank's process id and node, and a number unique to this run, which rank 0 draws.
        table = torch.zeros(2 * world.size + 1, dtype=torch.int64, device=device)
        table[world.rank], table[world.size + world.rank] = os.getpid(), world.node
        table[-1] = int.from_bytes(os.urandom(4), "big") if world.is_main else 0
        dist.all_reduce(table)
        processes, nodes = table[: world.size].tolist(), table[world.size : -1].tolist()
        leader, number = processes[nodes.index(world.node)], int(table[-1])
        for name, section in sections.items():
            folder = Path(section["nvme_path"]) / f"dsframe-{host()}-{leader}-{number:08x}"
            if world.local_rank == 0:
                _make(folder)
            self.paths[name] = str(folder)
        dist.barrier()

    def remove(self) -> None:
        """Removes the swap folders."""
        if self._world.local_rank == 0:
            for folder in self.paths.values():
                shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path) -> None:
    try:
        for old in unused_swap(folder.parent):
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise EngineError(f"cannot swap to {folder.parent}: {error.strerror}; choose another nvme_path") from error
