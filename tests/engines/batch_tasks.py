"""Batches that are no tensors: packed and nested sequences, graphs of an object's own class."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from dsframe import Task

F = nn.functional
ROWS = 48


class _Sequences(Task):
    """Rows of different lengths, with one label each."""

    def train_data(self):
        draw = torch.Generator().manual_seed(1)
        lengths = torch.randint(2, 7, (ROWS,), generator=draw).tolist()
        return [
            (torch.randn(length, 4, generator=draw), int(torch.randint(3, (), generator=draw))) for length in lengths
        ]

    def eval_data(self):
        return self.train_data()

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(4, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(self.body(inputs)[1][-1])


class Packed(_Sequences):
    """``torch.nn.utils.rnn.pack_sequence``: a tuple that is one argument."""

    def model(self):
        return _Recurrent()

    def collate(self, rows):
        return pack_sequence([row for row, _ in rows], enforce_sorted=False), torch.tensor([label for _, label in rows])


class _OfNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, rows):
        return torch.stack([self.head(self.body(row).tanh()).mean(0) for row in rows.unbind()])


class Nested(_Sequences):
    """``torch.nested``: no two have one shape, as torch writes it."""

    def model(self):
        return _OfNested()

    def collate(self, rows):
        nested = torch.nested.nested_tensor([row for row, _ in rows], layout=torch.jagged)
        return {"rows": nested, "labels": torch.tensor([label for _, label in rows])}


class Graphs:
    """Some graphs as one, as libraries for graphs have them."""

    def __init__(self, nodes, edges, graph, count):
        self.nodes, self.edges, self.graph, self.count = nodes, edges, graph, count


class _OfGraphs(nn.Module):
    def __init__(self, nodes):
        super().__init__()
        self.body, self.head, self.nodes = nn.Linear(4, 8), nn.Linear(8, 3), nodes

    def forward(self, graphs):
        hidden = self.body(graphs.nodes)
        first, second = graphs.edges
        hidden = (hidden + torch.zeros_like(hidden).index_add(0, second, hidden[first])).tanh()
        if not self.nodes:
            hidden = hidden.new_zeros(graphs.count, 8).index_add(0, graphs.graph, hidden)
        return self.head(hidden)


class OfGraphs(_Sequences):
    """A label for each graph."""

    nodes = False

    def model(self):
        return _OfGraphs(self.nodes)

    def collate(self, rows):
        sizes = torch.tensor([len(nodes) for nodes, _ in rows])
        graph = torch.arange(len(rows)).repeat_interleave(sizes)
        labels = torch.tensor([label for _, label in rows])
        nodes = torch.cat([nodes for nodes, _ in rows])
        first = (sizes.cumsum(0) - sizes)[graph]  # each node has an edge from its graph's first one
        graphs = Graphs(nodes, torch.stack([first, torch.arange(len(nodes))]), graph, len(rows))
        return graphs, labels[graph] if self.nodes else labels


class OfNodes(OfGraphs):
    """A label for each node, and so a mean over nodes."""

    nodes = True

    def loss_weight(self, targets):
        return int(targets.numel())


class OfNodesUnsaid(OfGraphs):
    """The same, of which the task says nothing."""

    nodes = True
