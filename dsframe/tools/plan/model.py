"""What the plan knows of a model: what each of its layers holds, computes, keeps and hands on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Affine:
    """A number that grows with the samples of a micro-batch: ``fixed + each * samples``."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, samples: int) -> float:
        return max(0.0, self.fixed + self.each * samples)

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.fixed + other.fixed, self.each + other.each)

    def scaled(self, factor: float) -> Affine:
        return Affine(self.fixed * factor, self.each * factor)


@dataclass(frozen=True)
class Segment:
    """A layer, or the whole of a model that is not a list of layers, or the loss."""

    parameters: int
    """Trainable elements that it owns; what it shares belongs to an earlier one."""
    frozen: int = 0
    """Elements that are not trained."""
    shared: int = 0
    """Elements of an earlier layer's weight that it uses."""
    owner: int | None = None
    """The layer whose weight it uses, counted from 0."""
    experts: int = 0
    """Elements of ``parameters`` that belong to single experts of a mixture."""
    buffer_bytes: int = 0
    largest: int = 0
    """Elements of the module with the most of its own: what ZeRO-3 gathers at a time."""
    flops: Affine = field(default_factory=Affine)
    """Floating-point operations of a forward and a backward pass."""
    saved: Affine = field(default_factory=Affine)
    """Bytes kept for the backward pass, parameters left out."""
    saved_wide: Affine = field(default_factory=Affine)
    """Those whose last dimension is the hidden size: tensor parallelism does not shard them."""
    saved_inside: Affine = field(default_factory=Affine)
    """Bytes kept inside of the parts that the file has recomputed or offloaded; ``saved`` is without."""
    inputs_inside: Affine = field(default_factory=Affine)
    """Bytes of these parts' inputs."""
    transient: Affine = field(default_factory=Affine)
    """Bytes that one recomputed part keeps while its turn in the backward pass comes."""
    offloaded: Affine = field(default_factory=Affine)
    """Bytes that wait in the host's memory."""
    output: Affine = field(default_factory=Affine)
    """Bytes that it hands on."""
    scratch: Affine = field(default_factory=Affine)
    """Bytes of the largest operation's results."""
    attentions: int = 0
    heads: int = 0
    """Of its attention; 0 without any."""


@dataclass(frozen=True)
class Model:
    """A task's model as the plan sees it."""

    segments: tuple[Segment, ...]
    loss: Segment
    layered: bool
    """True if it is a list of layers, which can be split into pipeline stages."""
    bytes_each: int
    """Of a parameter in the model's own number format."""
    inputs: Affine = field(default_factory=Affine)
    """Bytes of a micro-batch."""

    @property
    def parameters(self) -> int:
        """Elements that are trained."""
        return sum(segment.parameters for segment in self.segments)

    @property
    def frozen(self) -> int:
        """Elements that are not."""
        return sum(segment.frozen for segment in self.segments)

    @property
    def heads(self) -> int:
        return max(segment.heads for segment in self.segments)

    def flops(self, samples: int) -> float:
        """Of a forward and a backward pass."""
        return sum(segment.flops.at(samples) for segment in (*self.segments, self.loss))


def bare(parameters: int, bytes_each: int) -> Model:
    """A model of which only the size is known: no activations, no operations."""
    return Model((Segment(parameters),), Segment(0), False, bytes_each)


def autocast(model: Model, short: Model) -> Model:
    """fp32 parameters with the activations of ``short``, the model in 16 bits, and 16-bit copies
    of the weights."""
    segments = tuple(
        replace(in_16_bits, saved=in_16_bits.saved + Affine(2.0 * segment.parameters))
        for segment, in_16_bits in zip(model.segments, short.segments, strict=True)
    )
    return replace(model, segments=segments, loss=short.loss)
