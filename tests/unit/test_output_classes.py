"""Libraries that add hooks see the tensors in what a module returns, and what they cannot see is refused."""

from collections import UserDict, deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from dsframe.data.fingerprint import digest
from dsframe.engines.precision import cast_inputs
from dsframe.errors import TaskError
from dsframe.model import output_classes


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.layer, self.wrap = nn.Linear(2, 2), wrap

    def forward(self, rows):
        return self.wrap(self.layer(rows))


def seen(model):
    """The tensors that a library's hook sees, as FSDP looks for them; and what the caller gets, with the library's tensors."""
    held = []

    def replaced(value):
        if isinstance(value, Tensor):
            held.append(value)
            return value + 1
        if isinstance(value, (list, tuple)):
            return type(value)(map(replaced, value))
        return {key: replaced(part) for key, part in value.items()} if isinstance(value, dict) else value

    close = output_classes.show([model])
    model.register_forward_hook(lambda module, args, outputs: replaced(outputs))
    close()
    return held, model(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda rows: deque([rows]), lambda value: value[0]),
        (lambda rows: UserDict(rows=rows), lambda value: value["rows"]),
        (lambda rows: SimpleNamespace(rows=[rows]), lambda value: value.rows[0]),
        (lambda rows: [SimpleNamespace(inner=SimpleNamespace(rows=rows))], lambda value: value[0].inner.rows),
    ],
)
def test_tensors_in_objects_are_seen_and_replaced(wrap, unwrap):
    model = Wrapped(wrap)
    held, value = seen(model)
    assert [tensor.shape for tensor in held] == [(1, 2)]
    assert torch.equal(unwrap(value), held[0] + 1)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda rows: lambda: rows,
        lambda rows: partial(torch.add, rows),
        lambda rows: SimpleNamespace(make=lambda: rows),
    ],
)
def test_hidden_tensors_are_refused(wrap):
    with pytest.raises(TaskError, match=r"Wrapped returns a .* that holds tensors with gradients"):
        seen(Wrapped(wrap))
    with torch.no_grad():
        seen(Wrapped(wrap))


def test_what_holds_no_gradients_is_returned():
    seen(Wrapped(lambda rows: (rows, len, "text", 3, SimpleNamespace(scale=rows.detach()))))


def test_objects_as_inputs_are_cast_and_have_digests():
    class Graph:
        def __init__(self, nodes, edges):
            self.nodes, self.edges = nodes, edges

    graph = Graph(torch.ones(2, 3), torch.tensor([[0], [1]]))
    short = cast_inputs({"graph": graph}, torch.bfloat16)["graph"]
    assert (short.nodes.dtype, short.edges.dtype, graph.nodes.dtype) == (torch.bfloat16, torch.int64, torch.float32)
    assert digest((graph, None)) != digest((Graph(torch.zeros(2, 3), graph.edges), None))
