"""Training's state in memory, for elastic engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dsframe.checkpoint.preflight import preflight
from dsframe.checkpoint.resume import Start, archive_earlier, remove_unfinished
from dsframe.checkpoint.store import Store
from dsframe.model.state import SavedState
from dsframe.tasks.layers import seed_generators

if TYPE_CHECKING:
    from dsframe.engine import Engine


@dataclass(frozen=True)
class Commit:
    """A state of training in this process's memory."""

    start: Start
    state: SavedState


class MemoryCheckpoint(Protocol):
    """Keeps the last commit."""

    @property
    def last(self) -> Commit | None:
        """The same on every rank; None until there is one."""

    def due(self, step: int) -> bool:
        """True if a commit is due after ``step``."""

    def keep(self, engine: Engine, start: Start) -> None:
        """**Collective.** Copies the engine's state. May raise what ends this training, to begin it anew with other ranks."""


def begin_again(engine: Engine, commit: Commit, folder: Store, say: Callable[[str], None]) -> Start:
    """**Collective.** Continues from ``commit``, which is the same on every rank; no file is read.

    Later checkpoints in ``folder`` are moved away. Ranks are other ones than before, so random generators start from seed,
    rank and step. Raises CheckpointError where the folder does not let it.
    """
    plan, start = engine.plan, commit.start
    preflight(engine, folder.directory)
    remove_unfinished(engine, folder, say)
    engine.load_state(commit.state)
    seed_generators(plan.seed + 1 + plan.data_rank + 1_000_003 * start.step)
    archive_earlier(engine, folder, start.step, say)
    say(f"going on after step {start.step} from memory, with {plan.world.size} rank(s)")
    return start
