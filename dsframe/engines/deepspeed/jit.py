"""DeepSpeed's ops that are compiled on first use: which ones a file needs, and removal of locks of dead processes.

A cold build takes one to five minutes (measured), so it is announced. torch protects a build with an empty lock file. A
process that is killed during a build leaves it behind, and every later run silently waits for it forever. A lock that
no living process has open is stale.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.errors import EngineError
from dsframe.host.leftovers import host, is_shared, stale_locks

if TYPE_CHECKING:
    from dsframe.cluster.world import World
    from dsframe.config.value import Config
    from dsframe.model.optimizers import OptimizerSpec


def needed_ops(config: Config, optimizer: OptimizerSpec) -> tuple[str, ...]:
    """Returns the names of the ops that DeepSpeed will load for this file; empty by default."""
    zero = config.deepspeed.zero_optimization
    optimizer_name = optimizer.kind.lower()
    ops = []
    offloaded = zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
    if optimizer_name == "adagrad" and offloaded:
        ops.append("cpu_adagrad")
    if optimizer.cls is None and optimizer_name in ("adam", "adamw", "lamb", "lion"):
        ops.append(f"{'cpu' if offloaded else 'fused'}_{optimizer_name.removesuffix('w')}")
    if optimizer_name == "muon" and not optimizer.arguments.get("torch_adam"):
        ops.append("cpu_adam" if offloaded else "fused_adam")
    if any(
        section is not None and section.device == "nvme" for section in (zero.offload_optimizer, zero.offload_param)
    ):
        ops.append("async_io")
    return tuple(ops)


def prepare(ops: tuple[str, ...], world: World) -> None:
    """Sets the cache, removes stale locks, announces compilation. Raises EngineError if ops cannot be compiled."""
    if not ops:
        return
    cache = extensions_directory()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache)
    from dsframe.engines.deepspeed import patches  # late: it imports torch, and the launcher imports this module

    patches.leave_out_debug_symbols()  # also if nothing is missing: with other options torch compiles again
    missing = [op for op in ops if not _is_built(cache / op)]
    if missing and shutil.which("c++") is None and shutil.which("g++") is None:
        raise EngineError(
            f"the file asks for {', '.join(missing)}, which DeepSpeed compiles at first use, and there is no C++ compiler (g++)"
        )
    if "async_io" in missing and not _has_libaio():
        raise EngineError(
            "NVMe offload needs libaio's header and library, which are not installed (Debian: apt-get install libaio-dev)"
        )
    if world.local_rank == 0:
        for lock in remove_stale_locks(cache):
            print(f"dsframe: removed {lock}, left by a process that was killed", file=sys.stderr)
        if missing:
            print(
                f"dsframe: compiling {', '.join(missing)} once, as the file asks for it; this takes minutes",
                file=sys.stderr,
                flush=True,
            )


def _is_built(folder: Path) -> bool:
    """True if an op is compiled (on CPUs without debug symbols, which earlier dsframe and plain DeepSpeed add)."""
    how = folder / "build.ninja"  # CUDA's flags have a standard between the two
    return any(folder.glob("*.so")) and not (how.exists() and "-O3 -g " in how.read_text(encoding="utf-8"))


def extensions_directory() -> Path:
    """Returns $TORCH_EXTENSIONS_DIR, or a cache for this Python environment: a shared one is rebuilt by each.

    If the home is shared by nodes, the cache is per node: ops are compiled for its processor, and only processes on the
    same node can be checked for being alive.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    if not os.access(home if home.exists() else home.parent, os.W_OK):
        home = Path(tempfile.gettempdir())
    if given:
        return Path(given)
    cache = home / "dsframe" / "torch_extensions" / f"{zlib.crc32(sys.prefix.encode()):08x}"
    return cache / host() if is_shared(cache) else cache


def remove_stale_locks(cache: Path) -> list[Path]:
    """Removes and returns the build locks under ``cache`` that no living process of this node has open."""
    locks = stale_locks(cache)
    for lock in locks:
        lock.unlink(missing_ok=True)
    return locks


def _has_libaio() -> bool:
    directories = [
        "/usr/include",
        "/usr/local/include",
        sysconfig.get_path("include"),
        *os.environ.get("CPATH", "").split(":"),
    ]
    return any((Path(directory) / "libaio.h").exists() for directory in directories if directory)
