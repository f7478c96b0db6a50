"""Diagnoses a loss or gradients that are not finite: first step, rank, samples, and affected parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dsframe.cluster.exchange import all_gather_json
from dsframe.data import Loader
from dsframe.engine import Engine

_SHOWN = 8


class FirstNonFinite:
    """Remembers, on the device and without waiting for it, the first step whose loss was not finite on this rank, and
    the first whose gradients were not finite on any rank."""

    def __init__(self, device: torch.device) -> None:
        self._none = torch.full((), torch.inf, dtype=torch.float64, device=device)
        self._loss = self._gradients = self._none

    def look(self, step: int, loss: Tensor, norm: Tensor | float | None) -> None:
        """Called after each step; costs three scalar operations. ``norm``: of all gradients, if known."""
        self._loss = self._earliest(self._loss, step, loss)
        if norm is not None:
            self._gradients = self._earliest(self._gradients, step, norm)

    def _earliest(self, first: Tensor, step: int, value: Tensor | float) -> Tensor:
        finite = torch.isfinite(torch.as_tensor(value, device=first.device))
        return torch.minimum(first, torch.where(finite, self._none, step))

    def exists(self) -> Tensor:
        """Returns 1 if there is such a step, else 0, as a tensor on the device."""
        return torch.isfinite(torch.minimum(self._loss, self._gradients)).double()

    def steps(self) -> tuple[int | None, int | None]:
        """Returns the first bad step (from 1) of loss and gradients; None if there is none. Waits for the device."""
        loss, gradients = (None if first == torch.inf else int(first) for first in (self._loss, self._gradients))
        return loss, gradients


def diagnose_nonfinite(engine: Engine, loader: Loader, first: FirstNonFinite, step: int) -> str:
    """**Collective.** Describes what is not finite after ``step``, and the remedy: first step, rank, samples, parameter."""
    bad_since, gradients = first.steps()
    if bad_since is not None and gradients is not None and gradients < bad_since:
        bad_since = None  # the loss follows from the gradients
    # If no loss was bad, samples of any rank may have caused bad gradients.
    at = bad_since or gradients or step
    samples = [index for _, rows in _parts(loader, at) for index in rows.tolist()]
    report = {"since": bad_since, "samples": samples, "broken": _nonfinite_samples(loader, at)}
    ranks = all_gather_json(engine, report)
    since = min((reported["since"] for reported in ranks if reported["since"]), default=None)
    lines = [f"the gradients are not finite at step {gradients or step}, though the loss is" if since is None else ""]
    for rank, reported in enumerate(ranks):
        if reported["since"] is not None and reported["since"] == since:
            lines.append(
                f"the loss of rank {rank} is not finite since step {since}, made of samples {_few(reported['samples'])}"
            )
        if reported["broken"] and reported["since"] == since:
            lines.append(f"of these, {_few(reported['broken'])} hold NaN or infinity themselves")
    began = "no update was made before, so look at the weights that the training begins with, the data and the loss"
    later = "lower the learning rate, warm up longer, clip harder or repair the data"
    return "; ".join(filter(None, [*lines, _parameters(engine), began if since == 1 else later]))


def _nonfinite_samples(loader: Loader, step: int) -> list[int]:
    """Returns the samples whose inputs or targets are not finite. Reads them again, as in that step."""
    return [
        index
        for epoch, rows in _parts(loader, step)
        for index in rows.tolist()
        if not all(_finite(leaf) for leaf in tree_leaves(loader.source.batch(torch.tensor([index]), epoch)))
    ]


def _parts(loader: Loader, step: int) -> list[tuple[int, Tensor]]:
    size, micro_batches = loader.micro_batch_size, range(loader.accumulation_steps)
    cut = loader.sampler.micro_batch
    return [part for micro in micro_batches for part in cut(step - 1, micro, loader.rank, loader.ranks, size)]


def _parameters(engine: Engine) -> str:
    """**Collective.** Describes parameters that are not finite, with the same result on every rank."""
    names = [(parameter.name, _finite(parameter.weight)) for parameter in engine.state().parameters]
    bad = [name for name, finite in names if not finite]
    if not bad:
        return "every parameter is finite"
    return f"{len(bad)} of {len(names)} parameters are not finite now: {_few(bad)}"


def _finite(value: Any) -> bool:
    return not (isinstance(value, Tensor) and value.is_floating_point()) or bool(torch.isfinite(value).all())


def _few(values: list[Any]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(map(str, values[:_SHOWN])) + more
