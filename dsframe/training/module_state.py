"""What a model keeps from one forward pass to the next in plain attributes of its modules: ``self.h = h.detach()``.

No checkpoint has it, and each rank has its own. Some of it moves no loss: caches, counters, values for a log. So where attributes
have changed in the first step, its micro-batch is evaluated with them as before and as after: where the losses differ, the model
depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dsframe.checkpoint import generators
from dsframe.cluster.exchange import all_gather_text
from dsframe.engine import Engine
from dsframe.errors import EngineError, TaskError, WorldError
from dsframe.model.forward import MicroBatch
from dsframe.tasks.task import Sum, loss_and_terms
from dsframe.training import unmoved

_TOLERANCE = 1e-6
"""Relative; and ten times what two equal evaluations differ by."""
_SINGLY = 8
"""Attributes that are tried one by one."""


class ModuleState:
    """Looks at one micro-batch of this rank and judges with the other ranks."""

    def __init__(self, engine: Engine) -> None:
        batch = engine.plan.batch
        self._engine = engine
        # Of a pipeline one rank would see the loss; of several models none has outputs of its own.
        self._looks = batch.data_parallel_size == engine.plan.world.size and engine.built.losses is None
        self._batch: tuple[Any, Any] | None = None
        self._before: unmoved.Attributes | None = None
        self._after: unmoved.Attributes | None = None

    def begin(self, batch: MicroBatch) -> None:
        """Before the first micro-batch."""
        watch = self._engine.built.watch
        if watch is not None and self._looks:
            self._batch, self._before = (batch.inputs, batch.targets), unmoved.Attributes(watch.model)

    def step_ended(self) -> None:
        """Right after the step: hooks, which come next, may set attributes."""
        watch = self._engine.built.watch
        if watch is not None and self._before is not None and self._before.changed():
            self._after = unmoved.Attributes(watch.model)

    def judge(self, *, resumed: bool) -> str:
        """**Collective.** Returns what is to be said, or nothing. Raises TaskError where the model has a state that ranks, or a run
        that is ``resumed``, would not share."""
        changed = self._of_all(self._before.changed() if self._before and self._after else set())
        depends = self._of_all(self._needed(sorted(changed)) if changed else set())
        self._batch = self._before = self._after = None
        if not depends:
            return ""
        said = (
            f"model keeps {', '.join(sorted(depends))} from one forward pass to the next, and its loss depends on that"
        )
        if not resumed and self._engine.plan.world.size == 1:
            return f"{said}; no checkpoint has it"
        why = "a resumed run would begin with another" if resumed else "each rank would have its own"
        raise TaskError(
            f"this {said}: {why}, and no checkpoint has it. Make it a buffer (self.register_buffer), the same on all ranks "
            "(dsframe.tasks.global_batch.all_rows), or a part of the inputs"
        )

    def _of_all(self, names: set[str]) -> set[str]:
        texts = all_gather_text(self._engine, json.dumps(sorted(names)))
        return {name for text in texts for name in json.loads(text)}

    def _needed(self, changed: Sequence[str]) -> set[str]:
        """**Collective.** Returns which of ``changed`` this rank's loss depends on."""
        engine, watch, device = self._engine, self._engine.built.watch, self._engine.plan.device
        if watch is None or self._batch is None or self._before is None:
            return set()
        after = self._after or self._before
        kept = generators.capture(device)
        losses: list[float] = []

        def measure(outputs: Any, targets: Any) -> Mapping[str, Sum]:
            held, task = unmoved.HeldBuffers(engine), unmoved.twin(engine.plan.task)
            losses.append(float(loss_and_terms(task.loss(outputs, targets))[0]))
            held.put_back()
            return {}

        singly = [[name] for name in changed[:_SINGLY]]
        try:
            with unmoved.unmoved(watch.model, device), watch.trial(), engine.plan.task.context.evaluation():
                for names in ([], changed, *singly, []):
                    generators.restore(kept, device)
                    self._before.put_back()
                    after.put_back(names)
                    engine.eval_step(self._batch, measure)
        except (EngineError, WorldError):
            raise
        except Exception:  # such as a state of another size: it is no state that a batch can do without
            return {*changed}
        finally:
            after.put_back()
        if not losses:
            return set()
        first, together, *apart, again = losses
        noise = max(_TOLERANCE * abs(first), 10 * abs(again - first))
        guilty = {name for (name,), loss in zip(singly, apart, strict=True) if abs(loss - first) > noise}
        return guilty or ({*changed} if abs(together - first) > noise else set())
