"""What the planner knows of a model: what each of its layers computes, keeps and hands on."""

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


@dataclass(frozen=True)
class Linear:
    """A linear layer inside of a layer."""

    name: str
    elements: int
    rows: int
    """Output features, which can be cut into tiles. 0 where the weight is another module's too: it cannot be cut, and its elements
    are among ``Segment.largest``."""


@dataclass(frozen=True)
class Segment:
    """A layer, or the whole of a model that is not a list of layers, or the loss."""

    parameters: int
    """Trainable elements that it owns; what it shares belongs to an earlier one."""
    frozen: int
    """Elements that are not trained."""
    shared: int
    """Elements of an earlier layer's weight that it uses: in a stage (``case.cut``) of one that another stage owns."""
    buffer_bytes: int
    largest: int
    """Elements of the module with the most of its own, ``linears`` left out: what ZeRO-3 gathers at a time."""
    linears: tuple[Linear, ...]
    flops: Affine
    """Floating-point operations of a forward and a backward pass."""
    moved: float
    """Bytes that the operation with the most reads and writes for each sample, in the forward pass."""
    saved: Affine
    """Bytes kept for the backward pass, parameters left out."""
    saved_wide: Affine
    """Those of them whose last dimension is the model's hidden size: tensor parallelism does not cut them."""
    output: Affine
    """Bytes that it hands on."""
    scratch: Affine
    """Bytes of the largest operation's results."""
    attentions: int
    heads: int
    """Of its attention; 0 without any."""
    owner: int | None = None
    """The layer whose weight it uses, counted from 0."""
    switched: bool = False
    """True if ``saved`` is what stays on the device of parts that are recomputed, or whose activations wait on the host."""
    transient: Affine = field(default_factory=Affine)
    """Bytes that one of these parts keeps while its turn in the backward pass comes."""
    away: Affine = field(default_factory=Affine)
    """Bytes that wait on the host."""
    sliced: bool = False
    """True if logits are there a slice at a time, as ``scratch`` says and ``moved`` does not."""
    experts: int = 0
    """Elements of ``parameters`` that belong to single experts of a mixture."""
    lent: int = 0
    """Elements of its weights that layers of later stages use, as ``case.cut`` finds."""


@dataclass(frozen=True)
class Model:
    """A task's model as the planner sees it."""

    segments: tuple[Segment, ...]
    loss: Segment
    layered: bool
    """Whether it can be cut into stages."""
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
        return max((segment.heads for segment in self.segments), default=0)

    @property
    def attentions(self) -> int:
        return sum(segment.attentions for segment in self.segments)

    def flops(self, samples: int) -> float:
        """Of a forward and a backward pass."""
        return sum(segment.flops.at(samples) for segment in (*self.segments, self.loss))


def bare(parameters: int, bytes_each: int) -> Model:
    """A model of which nothing is known but its size: no activations, no operations."""
    none = Affine()
    nothing = Segment(parameters, 0, 0, 0, 0, (), none, 0.0, none, none, none, none, 0, 0)
    return Model((nothing,), replace(nothing, parameters=0), False, bytes_each)


def autocast(model: Model, short: Model) -> Model:
    """fp32 parameters, 16-bit products: operations and activations of the model in 16 bits, and 16-bit copies of the weights."""
    segments = tuple(
        replace(two, saved=two.saved + Affine(2.0 * one.parameters), saved_wide=two.saved_wide)
        for one, two in zip(model.segments, short.segments, strict=True)
    )
    return replace(model, segments=segments, loss=short.loss)
