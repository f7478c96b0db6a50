"""Parameters split by tensor parallelism: joined for a checkpoint, and split again from one.

DeepSpeed's AutoTP notes on each parameter that it splits how it did so (``ds_autotp_universal_checkpoint_meta``), which
suffices for both directions. Source: deepspeed 0.19.8, ``module_inject/layers.py`` (_build_param_uc_restore_meta).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsframe.errors import CheckpointError
from dsframe.model.persistent import compare
from dsframe.model.state import EngineState, ParameterState, SavedState, SavedView, Shapes, narrowed

_NOTE = "ds_autotp_universal_checkpoint_meta"


@dataclass(frozen=True)
class Cut:
    """How one parameter is split among the ranks of a tensor-parallel group."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    view: tuple[int, ...]
    """The shape in which it is split: a packed weight may be viewed with more dimensions."""
    dimension: int
    """Dimension of the view along which it is split."""
    widths: tuple[tuple[int, ...], ...]
    """Segment -> rank -> extent. A packed query-key-value weight has three segments, each split separately."""

    def share(self, whole: Tensor, rank: int, shape: Sequence[int]) -> Tensor:
        """Returns ``rank``'s share of ``whole``, in the ``shape`` of the rank's parameter."""
        view = whole.reshape(self.view)
        parts = [
            torch.split(segment, list(widths), self.dimension)[rank]
            for segment, widths in zip(self._segments(view), self.widths, strict=True)
        ]
        return torch.cat(parts, self.dimension).reshape(tuple(shape))

    def whole(self, shares: Sequence[Tensor]) -> Tensor:
        """Joins the flattened shares of all ranks to the whole parameter."""
        result = shares[0].new_empty(self.view)
        for rank, share in enumerate(shares):
            extents = [widths[rank] for widths in self.widths]
            mine = torch.split(share.view(self.share_view(rank)), extents, self.dimension)
            for segment, widths, part in zip(self._segments(result), self.widths, mine, strict=True):
                torch.split(segment, list(widths), self.dimension)[rank].copy_(part)
        return result.view(self.shape)

    def numel(self, rank: int) -> int:
        """Number of elements of ``rank``'s share."""
        return math.prod(self.share_view(rank))

    def _segments(self, view: Tensor) -> tuple[Tensor, ...]:
        return torch.split(view, [sum(widths) for widths in self.widths], self.dimension)

    def share_view(self, rank: int) -> tuple[int, ...]:
        """Returns the view's shape of ``rank``'s share."""
        extent = sum(widths[rank] for widths in self.widths)
        return (*self.view[: self.dimension], extent, *self.view[self.dimension + 1 :])


def note_of(parameter: Any) -> Mapping[str, Any] | None:
    """Returns AutoTP's note on a split parameter; None for a whole one."""
    note: Mapping[str, Any] | None = getattr(parameter, _NOTE, None)
    return None if note is None or note["replicated"] or note["partition_dim"] is None else note


def cuts(model: nn.Module) -> dict[str, Cut]:
    """Returns by name how each parameter that is not whole on every rank was split."""
    cut_by_name = {}
    for name, parameter in model.named_parameters():
        if (note := note_of(parameter)) is None:
            continue
        widths = note["sub_param_shard_widths"] or [note["partition_sizes"]]
        shape, view = tuple(note["original_shape"]), tuple(note["logical_shape"])
        cut_by_name[name] = Cut(shape, view, note["partition_dim"], tuple(tuple(part) for part in widths))
    return cut_by_name


def refuse_unlike(parameter: ParameterState, name: str, section: str) -> None:
    """Raises CheckpointError if optimizer state has another shape than the rank's share: such shares cannot be joined.
    ``name``: of the whole parameter. ``section``: key of the file that makes ranks hold shares."""
    for key, moment in parameter.moments.items():
        if moment.shape != parameter.weight.shape:
            raise CheckpointError(
                f"{name}: this rank's share has shape {list(parameter.weight.shape)}, but the optimizer's {key} for it has "
                f"shape {list(moment.shape)}, so the shares of {key} cannot be joined; train with an "
                f"optimizer that keeps state for each element, or without {section}"
            )


def whole(state: EngineState, cut: Mapping[str, Cut], group: dist.ProcessGroup) -> EngineState:
    """**Collective** to read to its end, over ``group``: joins all ranks' shares, one parameter at a time."""

    def gathered() -> Iterator[ParameterState]:
        for parameter in state.parameters:
            if parameter.name not in cut:
                yield parameter
                continue
            refuse_unlike(parameter, parameter.name, "tensor_parallel")
            moments = {key: _gather(moment, cut[parameter.name], group) for key, moment in parameter.moments.items()}
            yield ParameterState(
                parameter.name, _gather(parameter.weight, cut[parameter.name], group), moments, parameter.scalars
            )

    return dataclasses.replace(state, parameters=gathered())


def _gather(share: Tensor, cut: Cut, group: dist.ProcessGroup) -> Tensor:
    sizes = [cut.numel(rank) for rank in range(dist.get_world_size(group))]
    padded = share.new_zeros(max(sizes))  # not every backend gathers different sizes
    padded[: share.numel()].copy_(share.flatten())
    shares = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(shares, padded, group)
    return cut.whole([row[:size] for row, size in zip(shares, sizes, strict=True)])


class Shares(SavedView):
    """A saved state as one rank of a tensor-parallel group needs it: its share of every split parameter."""

    def __init__(self, saved: SavedState, shapes: Shapes, cut: Mapping[str, Cut], rank: int) -> None:
        """``shapes``: the shapes of this rank's parameters. Raises CheckpointError if the models differ."""
        compare("parameter", {name: cut[name].shape if name in cut else shapes[name] for name in shapes}, saved.shapes)
        super().__init__(saved)
        self._shapes, self._cut, self._rank = shapes, cut, rank

    @property
    def shapes(self) -> Shapes:
        """Shapes of this rank's parameters."""
        return self._shapes

    def parameter(self, name: str) -> ParameterState:
        """Returns this rank's share. Optimizer state of another shape than the weight is not split."""
        parameter = self._saved.parameter(name)
        if name not in self._cut:
            return parameter
        share: Callable[[Tensor], Tensor] = lambda whole: self._cut[name].share(whole, self._rank, self._shapes[name])  # noqa: E731
        moments = {key: share(m) if m.shape == parameter.weight.shape else m for key, m in parameter.moments.items()}
        return ParameterState(name, share(parameter.weight), moments, parameter.scalars)

    def part(self, name: str, first: int, size: int) -> ParameterState:
        """Returns a range of this rank's share."""
        if name not in self._cut:
            return self._saved.part(name, first, size)
        return narrowed(self.parameter(name), first, size)
