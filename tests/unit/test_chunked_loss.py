"""The loss of a language model in slices of tokens: what torch's cross entropy of all logits is, without all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsframe import Task, tasks
from dsframe.config import load
from dsframe.errors import ConfigError, TaskError
from dsframe.model import loss_head
from dsframe.model.forward import TargetedInputs, call
from dsframe.tasks import chunked_loss
from dsframe.tasks.layers import Tied, assemble
from tests.unit.test_task_huggingface import LLAMA

ROWS, TIME, WIDTH, WORDS = 3, 11, 8, 50


def case(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, TIME, WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH).to(dtype).requires_grad_()
    targets = torch.randint(WORDS, (ROWS, TIME))
    targets[0, :4] = targets[2] = chunked_loss.IGNORED
    return hidden, weight, torch.randn(WORDS).to(dtype).requires_grad_() if bias else None, targets


def plainly(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias).float().flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("tokens", [1, 7, 33, 1000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_losses_and_gradients_are_those_of_all_logits(
    tokens: int, bias: bool, dtype: torch.dtype, bound: float
) -> None:
    *tensors, targets = case(dtype, bias=bias)
    inputs = [tensor for tensor in tensors if tensor is not None]
    loss = plainly(*tensors, targets)
    expected = torch.autograd.grad(3 * loss, inputs)
    scores = chunked_loss.cross_entropy(*tensors, targets, tokens)
    found = torch.autograd.grad(3 * chunked_loss.mean(scores), inputs)
    assert scores.dtype == torch.float32
    assert chunked_loss.mean(scores).item() == pytest.approx(loss.item(), abs=bound)
    for one, other, tensor in zip(found, expected, inputs, strict=True):
        assert one.dtype == tensor.dtype
        torch.testing.assert_close(one, other, atol=bound, rtol=bound)


def test_rows_are_by_themselves() -> None:
    """So that rows of padding can be left out, and halves of a micro-batch looked at."""
    *tensors, targets = case()
    with torch.no_grad():
        scores = chunked_loss.cross_entropy(*tensors, targets, 5)
        logits = F.linear(tensors[0], tensors[1])
    counted = targets != chunked_loss.IGNORED
    assert scores[:, 1].tolist() == counted.sum(1).tolist() == [7.0, 11.0, 0.0]
    assert scores[:, 2].tolist() == ((logits.argmax(-1) == targets) & counted).sum(1).tolist()
    alone = plainly(tensors[0][:1], tensors[1], None, targets[:1])  # type: ignore[index, arg-type]
    assert (scores[0, 0] / 7).item() == pytest.approx(alone.item(), abs=1e-6)


def test_nothing_that_counts_is_not_a_number() -> None:
    """As torch's mean over nothing, which the engines leave out by its weight."""
    *tensors, targets = case()
    assert chunked_loss.mean(chunked_loss.cross_entropy(*tensors, torch.full_like(targets, -100), 5)).isnan()


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *found) if found else self.elements
        return out


def test_no_operation_sees_more_than_a_slice() -> None:
    """Forward and backward; plain logits are what makes the figure mean something."""
    *tensors, targets = case()
    largest = {}
    for name, loss_of in {
        "plain": lambda: plainly(*tensors, targets),
        "slices": lambda: chunked_loss.mean(chunked_loss.cross_entropy(*tensors, targets, 8)),
    }.items():
        with _Largest() as watch:
            loss_of().backward()
        largest[name] = watch.elements
    assert largest == {"plain": ROWS * TIME * WORDS, "slices": WORDS * WIDTH}


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    """As beside an adapter."""
    *tensors, targets = case()
    weight = tensors[1].detach()  # type: ignore[union-attr]
    chunked_loss.mean(chunked_loss.cross_entropy(tensors[0], weight, None, targets, 5)).backward()
    assert tensors[0].grad is not None
    assert weight.grad is None


def config(tokens: Any = 4, **more: Any) -> Any:
    return load({"train_batch_size": 8, "dsframe": {"model": {"loss_chunk_tokens": tokens}, **more}})


class Words(Task):
    """An embedding whose weight gives the logits, too."""

    def model(self) -> nn.Module:
        return assemble([lambda: nn.Embedding(WORDS, WIDTH), lambda: nn.LayerNorm(WIDTH), Tied(0, F.linear)], 1)

    def head(self, model: nn.Module) -> nn.Module | None:
        return list(model.children())[-1]


def test_a_layer_gives_logits_where_no_targets_come() -> None:
    model, tokens = Words().model(), torch.arange(6).view(2, 3)
    plain = model(tokens)
    assert loss_head.settle_chunks(config(), Words(), model)
    scores = call(model, TargetedInputs(tokens, tokens))
    assert scores.shape == (2, 3)
    assert torch.equal(model(tokens), plain)
    named = {name for name, _ in model.named_parameters()}
    assert named == {name for name, _ in Words().model().named_parameters()}
    assert type(list(model.children())[-1]).__name__ == "TiedLayer"


def test_auto_is_a_slice_of_128_mebibytes() -> None:
    assert chunked_loss.tokens_of(1 << 17) * (1 << 17) * 4 == 128 << 20
    assert chunked_loss.tokens_of(1 << 30) == 64


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (None, r"Words has no head\(\), which names the layer that gives the logits"),
        (nn.Bilinear(2, 2, 2), "its logits come from a Bilinear, not from a linear layer"),
    ],
)
def test_models_without_a_linear_output_layer_are_refused(
    monkeypatch: pytest.MonkeyPatch, head: nn.Module | None, message: str
) -> None:
    monkeypatch.setattr(Words, "head", lambda *_: head)
    with pytest.raises(TaskError, match=message):
        loss_head.settle_chunks(config(), Words(), Words().model())


def test_a_model_that_caps_its_logits_is_refused() -> None:
    kind = {**LLAMA, "model_type": "gemma2", "head_dim": 8}
    section = {"name": "causal-language-model", "model": kind, "context": 16}
    task = tasks.build(config(task=section).settings.task, 1)
    with pytest.raises(TaskError, match='model_type "gemma2" changes the logits of its output layer'):
        loss_head.settle_chunks(config(task=section), task, task.model())


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"pipeline": {"stages": 2}}, "not possible with a pipeline, whose last stage hands logits to the loss"),
        ({"dsframe": {"model": {"loss_chunk_tokens": 4, "compile": True}}}, 'not possible with "compile": true'),
        ({"dsframe": {"task": {"name": "vision"}, "model": {"loss_chunk_tokens": 4}}}, "is for language models"),
    ],
)
def test_what_excludes_it_is_refused(file: dict[str, Any], message: str) -> None:
    base = {"train_batch_size": 8, "dsframe": {"model": {"loss_chunk_tokens": "auto"}}}
    with pytest.raises(ConfigError) as caught:
        load({**base, **file})
    assert message in str(caught.value)


def test_a_pipeline_is_placement_for_engines_without_one() -> None:
    assert config(engine="ddp").settings.model.loss_chunk_tokens == 4
    load(
        {
            "train_batch_size": 8,
            "pipeline": {"stages": 2},
            "dsframe": {"engine": "ddp", "model": {"loss_chunk_tokens": 4}},
        }
    )
