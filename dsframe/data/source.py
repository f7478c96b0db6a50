"""The ``Source`` protocol, random numbers per sample, and sources in memory.

A source returns whole batches. The randomness of a sample (crop, flip) is a pure function of ``(seed, epoch, sample
index)``: a sample looks the same on any rank, in any batch and after any restart.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dsframe.errors import DataError

Batch: TypeAlias = tuple[Any, Any]
"""``(inputs, targets)``: each a tensor or a nesting of tensors whose first dimension is the sample."""


@runtime_checkable
class Source(Protocol):
    """A data set read in batches; samples are numbered from 0."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def batch(self, indices: Tensor, epoch: int) -> Batch:
        """Returns the samples ``indices`` (int64 ``[n]``, on the CPU) as they look in ``epoch``.

        May depend only on ``(index, epoch)`` of each row and on the source's arguments; for randomness use
        :func:`draws`. On GPUs it is called in a thread, one batch ahead.
        """
        ...


@runtime_checkable
class GatheringSource(Source, Protocol):
    """A source that builds batches with rows of several epochs itself."""

    def gather(self, parts: list[tuple[int, Tensor]]) -> Batch:
        """Returns the rows of ``parts``, each an epoch and sample indices, as one batch."""
        ...


# Constants of the splitmix64 generator (Steele, Lea, Flood 2014), as signed 64-bit integers because torch has no uint64
# arithmetic. Multiplication wraps in two's complement, which gives the same bits as unsigned.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_GOLDEN_S, _MIX_1_S, _MIX_2_S = _signed(_GOLDEN), _signed(_MIX_1), _signed(_MIX_2)


def _mix(value: int) -> int:
    """Applies splitmix64's finaliser to a Python integer."""
    value &= _MASK
    value = (value ^ value >> 30) * _MIX_1 & _MASK
    value = (value ^ value >> 27) * _MIX_2 & _MASK
    return value ^ value >> 31


def draws(seed: int, epoch: int, indices: Tensor, stream: int = 0) -> Tensor:
    """Returns 64 random bits for each of ``indices``: int64, same shape and device.

    Counter-based (splitmix64 of the index, keyed by the rest) and stateless, so any process can ask for any sample.
    Streams are independent. Integer arithmetic only: the same on every platform, device and version.
    """
    bits = indices * _GOLDEN_S + _signed(_key(seed, epoch, stream))
    # torch's shift of signed integers is arithmetic: mask away the copies of the sign bit.
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _MIX_1_S
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _MIX_2_S
    return bits ^ (bits >> 31 & (1 << 33) - 1)


@lru_cache(maxsize=64)
def _key(seed: int, epoch: int, stream: int) -> int:
    return _mix(_mix(_mix(seed + _GOLDEN) + epoch + _GOLDEN) + stream + _GOLDEN)


def draw(seed: int, epoch: int, index: int, stream: int = 0) -> int:
    """Returns the bits of :func:`draws` for one index, 0 to 2**64 - 1, faster than with a tensor."""
    return _mix(index * _GOLDEN + _key(seed, epoch, stream))


class TensorSource:
    """Tensors in memory, one row per sample: the fast path for ``torch.utils.data.TensorDataset``."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        lengths = {len(leaf) for leaf in tree_leaves((inputs, targets))}
        if len(lengths) != 1:
            raise DataError(f"inputs and targets must have the same number of rows; they have {sorted(lengths)}")
        self._data = (inputs, targets)
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Tensor, epoch: int) -> Batch:
        inputs, targets = self._data
        return (
            tree_map(lambda rows: rows.index_select(0, indices), inputs),
            tree_map(lambda rows: rows.index_select(0, indices), targets),
        )


class ImageSource:
    """uint8 images in memory, normalised and augmented a batch at a time.

    ``images``: uint8 ``[N, channels, height, width]``. ``labels``: int64 ``[N]``, each in ``[0, classes)``. A batch is
    float32 ``[n, channels, height, width]``, ``(pixel / 255 - mean) / std`` per channel, and int64 ``[n]``.

    Augmentation per sample and epoch: a crop of the original size from the image with ``padding`` black pixels (0
    before normalisation) on every side, then with ``flip`` a mirror image with probability 1/2, as by torchvision's
    ``RandomCrop(size, padding)`` and ``RandomHorizontalFlip()``.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        padding: int = 0,
        flip: bool = False,
        seed: int = 0,
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise DataError(
                f"images must be uint8 of shape [N, channels, height, width]; got {images.dtype} {list(images.shape)}"
            )
        if labels.shape != images.shape[:1]:
            raise DataError(f"{len(images)} images, but labels of shape {list(labels.shape)}")
        channels = images.shape[1]
        if not channels == len(mean) == len(std):
            raise DataError(f"{channels} channels, but {len(mean)} means and {len(std)} standard deviations")
        check_labels(labels, classes)
        self._images = images.contiguous()
        self._labels = labels.long()
        # Normalisation is one multiplication and one addition.
        self._scale = (1 / (255 * torch.tensor(std, dtype=torch.float64))).float().view(-1, 1, 1)
        self._shift = (-torch.tensor(mean, dtype=torch.float64) / torch.tensor(std)).float().view(-1, 1, 1)
        self._factors = {self._scale.device: (self._scale, self._shift)}
        self._padding, self._flip, self._seed = padding, flip, seed

    def __len__(self) -> int:
        return len(self._images)

    def batch(self, indices: Tensor, epoch: int) -> Batch:
        return self.normalised(self.pixels(indices, epoch))

    def pixels(self, indices: Tensor, epoch: int) -> Batch:
        """Returns the batch before normalisation: uint8 images, a quarter of the bytes to copy to a GPU."""
        if self._padding or self._flip:
            images = self._augmented(indices, draws(self._seed, epoch, indices))
        else:
            images = self._images.index_select(0, indices % len(self))
        return images, self._labels.index_select(0, indices % len(self))

    def normalised(self, batch: Batch) -> Batch:
        """Returns a batch of :meth:`pixels` with float32 images; the same bits on any device."""
        images, labels = batch
        if images.device not in self._factors:
            self._factors[images.device] = (self._scale.to(images.device), self._shift.to(images.device))
        scale, shift = self._factors[images.device]
        return images.float().mul_(scale).add_(shift), labels

    def _augmented(self, indices: Tensor, bits: Tensor) -> Tensor:
        _, channels, height, width = self._images.shape
        count, padding, offsets = len(indices), self._padding, 2 * self._padding + 1
        # 24 bits each, scaled to 0 .. offsets-1: the bias is below offsets / 2**24.
        top = (bits & 0xFFFFFF) * offsets >> 24
        left = (bits >> 24 & 0xFFFFFF) * offsets >> 24
        order = bits.argsort()  # by the sign bit: the images to mirror come first
        mirrored = int((bits < 0).sum()) if self._flip else 0
        images = self._images.index_select(0, indices.index_select(0, order) % len(self))
        frame_height, frame_width = height + 2 * padding, width + 2 * padding
        frames = images.new_zeros(count, channels, frame_height, frame_width)
        inside = frames[..., padding : padding + height, padding : padding + width]
        inside[:mirrored] = images[:mirrored].flip(-1)
        inside[mirrored:] = images[mirrored:]
        # A row of a crop is `width` bytes of a row of a frame: one gather of rows crops and restores the order.
        frame = torch.empty_like(order)
        frame[order] = torch.arange(count)
        corner = (frame * channels * frame_height + top) * frame_width + left
        row = (torch.arange(channels)[:, None] * frame_height + torch.arange(height)) * frame_width
        starts = corner[:, None] + row.view(-1)
        every_row = frames.as_strided((frames.numel() - width + 1, width), (1, 1))  # an overlapping view, no copy
        return every_row.index_select(0, starts.view(-1)).view(images.shape)


def own_rows(source: Source, rows: Tensor) -> Tensor:
    """Returns the source's row indices. Only ImageSource has separate draws for copies of a sample within an epoch."""
    knows_copies = isinstance(source, ImageSource) and type(source).batch is ImageSource.batch
    return rows if knows_copies else rows % len(source)


def check_labels(labels: Tensor, classes: int) -> None:
    """Raises DataError if a label is not in ``[0, classes)``."""
    if len(labels) == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(f"labels run from {low} to {high}, but there are {classes} classes (0 to {classes - 1})")
