"""Programs that do with weights what their engine does not see; each a few lines of what public programs do."""

from __future__ import annotations

import copy
import weakref
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

import dsframe
from dsframe import Hooks, Task

F = nn.functional


class Rows(Task):
    """Eight numbers, three classes."""

    def model(self):
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        return self.net

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets)

    def train_data(self):
        draw = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(48, 8, generator=draw), torch.randint(0, 3, (48,), generator=draw))


def _eleven(task):
    return TensorDataset(*(one[:11] for one in task.train_data().tensors))


class Words(Rows):
    """Four words, three classes."""

    words = 20

    def train_data(self):
        draw = torch.Generator().manual_seed(1)
        found = torch.randint(0, self.words, (48, 4), generator=draw)
        return TensorDataset(found, torch.randint(0, 3, (48,), generator=draw))


class Two(Rows):
    """Two models, each with its own loss."""

    model = dsframe.Task.model

    def models(self):
        return {"one": partial(Rows.model, self), "two": partial(nn.Linear, 8, 3)}

    def losses(self):
        return {"one": partial(self.of, "one"), "two": partial(self.of, "two")}

    def of(self, name, models, inputs, targets):
        return F.cross_entropy(models[name](inputs), targets)


class Unregistered(Rows):
    """A layer that the model does not show: in a list."""

    def model(self):
        class Model(nn.Linear):
            def __init__(self):
                super().__init__(8, 3)
                self.hidden = [nn.Linear(8, 8)]

            def forward(self, rows):
                return super().forward(self.hidden[0](rows))

        return Model()


class Penalty(Rows):
    """Reads weights in the loss."""

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) + 0.01 * sum(one.square().sum() for one in self.net.parameters())


class TwoNames(Rows):
    """One layer under two names, whole for each step."""

    whole_weights = True

    def model(self):
        layer = nn.Linear(8, 8)
        return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(8, 3))


class Gathered(Rows):
    """Reads weights in the loss, where they are whole: how far they are from those of an earlier task (Kirkpatrick et al. 2017),
    and a weight that is used twice."""

    def model(self):
        net = super().model()
        for name, weight in list(net.named_parameters()):
            net.register_buffer("earlier_" + name.replace(".", "_"), weight.detach() + 0.1)
        return net

    def loss(self, outputs, targets):
        with dsframe.gathered(self.net) as net:
            weights = zip(net.parameters(), net.buffers(), strict=True)
            penalty = sum((weight - earlier).square().sum() for weight, earlier in weights)
            tied = F.linear(outputs, net[2].weight.t()).square().mean()
        return super().loss(outputs, targets) + 0.01 * penalty + 0.1 * tied


class WrittenInside(Rows):
    """Writes to the copies of gathered weights."""

    def loss(self, outputs, targets):
        with dsframe.gathered(self.net) as net, torch.no_grad():
            net[0].weight.mul_(0.9)
        return super().loss(outputs, targets)


class CalledInside(Rows):
    """Calls a module whose weights are gathered copies."""

    def loss(self, outputs, targets):
        with dsframe.gathered(self.net) as net:
            more = net(torch.ones(4, 8)).square().mean()
        return super().loss(outputs, targets) + more


class After(Rows):
    """Writes to weights after each update: whole ones, or parts of them."""

    def __init__(self, what):
        self.what, self.after_step_elementwise = what, what != "norms"

    def after_step(self, name, weight):
        if self.what == "clamp":
            weight.clamp_(-0.1, 0.1)
        elif weight.ndim == 2 or self.what == "wrong":
            weight.div_(weight.norm())


class _Shrinking:
    def __call__(self, name, weight):
        weight.mul_(0.99)


class AfterByObject(Rows):
    """after_step is an object."""

    after_step = _Shrinking()


class _InThreads(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(16, 3)

    def forward(self, rows):
        with ThreadPoolExecutor(2) as threads:
            return self.head(torch.cat([*threads.map(lambda tower: tower(rows), self.towers)], 1))


class InThreads(Rows):
    """Runs two parts at once."""

    def model(self):
        return _InThreads()


class _Inferred(nn.Sequential):
    def forward(self, rows):
        with torch.inference_mode():
            likely = super().forward(rows).argmax(1)
        return super().forward(rows) + 0.01 * likely.clone()[:, None]


class Inferred(Rows):
    """Calls its layers in inference mode, and then with gradients, as self-training does."""

    def model(self):
        return _Inferred(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def eval_data(self):
        return _eleven(self)


class _Toggling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, rows):
        hidden, judge = self.layers[0](rows).tanh(), self.layers[1]
        judge.requires_grad_(False)
        fixed = judge(hidden)
        judge.requires_grad_(True)
        return (fixed + judge(hidden.detach()))[:, :3]


class Toggling(Rows):
    """Freezes a block for one call of it in forward, as GANs do."""

    def model(self):
        return _Toggling()


class _Unit(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.inner, self.what = nn.Linear(8, 8), what
        self.idle = nn.Linear(8, 8) if "idle" in what else None
        self.kept = torch.ones(())

    def encode(self, rows):
        if "in place" in self.what:
            rows = rows.clamp_(min=0.0)
        if "keeps" in self.what:
            rows, self.kept = rows + 0.0 * self.kept, self.kept * rows.mean()
        return self.inner(rows).tanh()

    def forward(self, rows, into=None):
        if self.what == "writes":
            rows.mul_(2.0)
        hidden = self.encode(rows.clone() if self.what.startswith("g") else rows)
        if "remembers" in self.what:
            self.memory = 1.5 * hidden
            return self.memory[:, :4] if "part" in self.what else self.memory
        if "gets" in self.what:
            into.add_(hidden)
            return rows.sin()
        if "gives" in self.what:
            return rows[:, :4] if "part" in self.what else rows, hidden
        if isinstance(into, Tensor):
            into.add_(hidden)
        elif into is not None:
            into["hidden"] = hidden
        if self.what in ("a view", "itself"):
            hidden = 1.5 * hidden
            return hidden[:, :4] if self.what == "a view" else hidden, hidden
        if "returns" in self.what:
            return hidden, self.inner.weight.detach()[1:] if "detached" in self.what else self.inner.weight
        return {"hidden": [hidden]} if self.what == "dict" else hidden


class _OfUnits(nn.Sequential):
    def forward(self, rows):
        first, unit, head = self
        rows, what, into = rows if "first" in unit.what else first(rows), unit.what, {}
        if what == "one call too many":
            unit(2 * rows)
        if what == "twice":
            rows = unit(rows)
        if what == "method":
            return head(unit.encode(rows))
        if what == "nothing uses it":
            unit(rows)
            return head(rows)
        if "remembers" in what:
            written = unit(rows)
            written.mul_(2.0)
            return head(unit.memory.sin())
        if "gets" in what:
            rows = 1.5 * rows
            return head(unit(rows, rows[:] if "view" in what else rows))
        if "gives" in what:
            rows = 1.5 * rows
            written, hidden = unit(rows)
            written.mul_(2.0)
            return head(rows.sin() * hidden)
        if what == "writes":
            return head(unit(rows) + rows)
        if what in ("a view", "itself"):
            written, kept = unit(rows)
            written.mul_(2.0)
            return head(kept.sin())
        if what == "memory":
            memory = torch.zeros_like(rows)
            unit(rows, memory)
            unit(rows.tanh(), into=memory)
            return head(memory)
        if "returns" in what:
            hidden, weight = unit(rows)
            return head(hidden + (hidden @ weight.t()).sum(1, keepdim=True))
        hidden = unit(rows=rows) if what == "keywords" else unit(rows, into if "adds" in what else None)
        return head(hidden["hidden"][0] if what == "dict" else into["hidden"] if "adds" in what else hidden)


class Units(Rows):
    """A block that an engine gathers as one unit, called in all ways."""

    def __init__(self, what):
        self.what = what

    def model(self):
        return _OfUnits(nn.Linear(8, 8), _Unit(self.what), nn.Linear(8, 3))


class Escaping(Rows):
    """A hook on a part of the model keeps a penalty on its weights, from the first step on or later."""

    def __init__(self, part, late=False):
        self.part, self.late, self.hooks = part, late, [_Beginning(self)]

    def model(self):
        net = _OfUnits(nn.Linear(8, 8), _Unit("plain"), nn.Linear(8, 3))
        net.get_submodule(self.part).register_forward_hook(self._keep)
        return net

    def _keep(self, module, inputs, outputs):
        self.penalty = 0.0 if self.late else sum(weight.square().sum() for weight in module.parameters())

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) + 0.01 * self.penalty


class _Beginning(dsframe.Hooks):
    def __init__(self, task):
        self.task = task

    def on_step(self, run):
        self.task.late = self.task.late and run.step < 2


class _Remembering(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.inner, self.head, self.what = nn.Linear(8, 16), nn.Linear(16, 3), what
        self.carried = None
        self.mean, self.queue, self.calls = torch.zeros(16), list[Tensor](), 0
        self.long, self.last = [1.0] * 2000, None

    def forward(self, rows):
        values = self.inner(rows)
        seen = values.detach().mean(0)
        self.calls, self.last = self.calls + 1, seen
        if self.what == "carried":
            values = values + self.carried if self.carried is not None else values
            self.carried = seen
        elif self.what == "mean":
            values = values - self.mean.lerp_(seen, 0.1)
        elif self.what == "queue":
            self.queue.append(seen)
            values = values + self.queue[0]
        elif self.what == "long":
            self.long[7] += float(seen.mean())
            values = values * self.long[7]
        elif self.what == "calls":
            values = values / self.calls
        elif self.what == "warm" and self.training:
            values = values * min(1.0, self.calls / 10)
        return self.head(values.tanh())


class Remembers(Rows):
    """Keeps something from one forward pass to the next, in an attribute; "nothing" that the loss depends on."""

    def __init__(self, *, what="carried"):
        self.what = what

    def model(self):
        return _Remembering(self.what)


class SeveralRemember(Two):
    """Two models, of which one keeps something."""

    def models(self):
        return {**super().models(), "one": Remembers().model}


class _Looked(nn.Embedding):
    def forward(self, input):  # torch's name
        return F.embedding(input, self.weight, max_norm=1.0)


class MaxNorm(Words):
    """Writes to the rows that are looked up: a layer, or a function."""

    def __init__(self, *, function=False, words=20):
        self.function, self.words = function, words

    def model(self):
        table = _Looked(20, 8) if self.function else nn.Embedding(self.words, 8, max_norm=1.0)
        return nn.Sequential(table, nn.Flatten(), nn.Linear(32, 3))


class _Doubled(nn.Embedding):
    def forward(self, input):  # torch's name
        return 2 * super().forward(input)


class Limits(Words):
    """Limits of a class of the user's, or of sums of rows."""

    def __init__(self, *, of):
        self.of = of

    def model(self):
        if self.of == "bag":
            return nn.Sequential(nn.EmbeddingBag(20, 8, max_norm=1.0), nn.Linear(8, 3))
        return nn.Sequential(_Doubled(20, 8, max_norm=1.0), nn.Flatten(), nn.Linear(32, 3))


class TwoTables(Two, Words):
    """Two models with limits; the second one's loss runs the first one too."""

    def models(self):
        return dict.fromkeys(("one", "two"), MaxNorm().model)

    def of(self, name, models, inputs, targets):
        both = (model(inputs) for model in models.values())
        return F.cross_entropy(sum(both), targets) if name == "two" else super().of(name, models, inputs, targets)


class _First(Rows):
    """A layer of another class in the first place."""

    layer: type[nn.Module]

    def model(self):
        return nn.Sequential(self.layer(8, 16), nn.Tanh(), nn.Linear(16, 3))


class _Clamped(nn.Linear):
    def forward(self, input):  # torch's name
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(input)


class Clamped(_First):
    """Writes to a weight by ``data``, in forward."""

    layer = _Clamped


class _Grown(nn.Linear):
    def forward(self, input):  # torch's name
        with torch.no_grad():
            self.weight += 0.01
        return super().forward(input)


class Grown(_First):
    """A weight has other numbers after each forward pass."""

    layer = _Grown


class Layered(Rows):
    """The same in the first layer of a list."""

    model = dsframe.Task.model

    def layers(self):
        return [partial(_Clamped, 8, 16), nn.Tanh, partial(nn.Linear, 16, 3)]


class _Clipping(Hooks):
    def __init__(self, task):
        self.task = task

    @torch.no_grad()
    def on_step(self, run):
        for one in self.task.net.parameters():
            one.clamp_(-0.2, 0.2)


class Clipped(Rows):
    """Writes to all weights after each update, as a WGAN's critic does."""

    def __init__(self):
        self.hooks = [_Clipping(self)]


class _Written(nn.Linear):
    how = ""

    def forward(self, input):  # torch's name
        with torch.no_grad():
            if self.how == "foreach":
                torch._foreach_clamp_max_([self.weight, self.bias], 0.1)
            elif self.how == "out":
                torch.clamp(self.weight, -0.1, 0.1, out=self.weight)
            elif self.how == "init":
                nn.init.constant_(self.bias, 0.1)
            else:
                self.weight.data[self.weight > 0.1] = 0.1
        return super().forward(input)


class Written(_First):
    """Writes to weights in forward, by functions that have no underscore at the end, or take lists."""

    layer = _Written

    def __init__(self, how):
        self.how = how

    def model(self):
        net = super().model()
        net[0].how = self.how
        return net


class Decayed(Rows):
    """A hook of a gradient reads its weight, which an engine may have replaced."""

    def model(self):
        net = super().model()
        weight = net[0].weight
        weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())
        return net


class _Copying(_Clipping):
    def on_step(self, run):
        self.copy = copy.deepcopy(self.task.net)


class Copied(Rows):
    """A hook keeps a copy of the model."""

    def __init__(self):
        self.hooks = [_Copying(self)]


class _Converting(Hooks):
    def __init__(self, task):
        self.task = task

    def on_step(self, run):
        self.task.net.bfloat16()


class Converted(Rows):
    """Gives the weights another dtype after the first update."""

    def __init__(self):
        self.hooks = [_Converting(self)]


class _Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Linear(8, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, inputs):
        if self.training:
            with torch.no_grad():
                for one, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    one.mul_(0.5).add_(other, alpha=0.5)
        return self.online(inputs) + 0.1 * self.target(inputs)


class Teacher(Rows):
    """Writes to a frozen copy that follows the trained weights."""

    def model(self):
        return _Student()


class _Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 3))

    def forward(self, inputs):
        places = inputs.detach().requires_grad_()
        energy = self.energy(places)
        (force,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return energy + force.square().mean(1, keepdim=True)


class Forces(Rows):
    """Takes derivatives in forward."""

    def model(self):
        return _Field()


class GradientHook(Rows):
    """Changes the gradient of a weight: by a mask, by a clip, or where it lies."""

    def __init__(self, what):
        self.what = what

    def model(self):
        weight = super().model()[0].weight
        mask = torch.arange(16).ge(8).float()[:, None]
        if self.what == "mask":
            weight.register_hook(lambda gradient: gradient * mask)
        if self.what == "clip":
            weight.register_hook(lambda gradient: gradient / gradient.norm() * 0.1)
        if self.what == "late":
            weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return self.net


class _Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)

    def forward(self, inputs):
        places = inputs.detach().requires_grad_()
        outputs = self.net(places).square()
        (slopes,) = vars(torch.autograd)["grad"](outputs.sum(), places, None, None, True)
        return outputs + slopes.mean(1, keepdim=True)


class Hidden(Rows):
    """Takes derivatives in forward, by a name that a look at its code does not see."""

    def __init__(self, *, whole=False):
        self.whole_weights = whole or None

    def model(self):
        return _Hidden()


class _Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.places = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 3, bias=False)

    def forward(self, inputs):
        return self.body(inputs.view(-1, 4, 2))[0][:, -1]


class Prototypes(Rows):
    """Weights that only the loss reads: their module is never called."""

    def model(self):
        self.net = _Prototypes()
        return self.net

    def loss(self, outputs, targets):
        with dsframe.gathered(self.net.places) as places:
            scores = outputs @ places.weight.t()
        return super().loss(scores, targets)


class _Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.scale = nn.Linear(16, 4), nn.Parameter(torch.ones(4))

    def forward(self, inputs):
        assert {inputs.dtype, self.gate.weight.dtype, self.scale.dtype} == {torch.float32}
        return (self.gate(inputs) * self.scale).softmax(-1)


class _Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.router, self.head = nn.Linear(8, 16), nn.LayerNorm(16), _Router(), nn.Linear(16, 3)

    def forward(self, inputs):
        hidden = self.norm(torch.tanh(self.body(inputs)))
        shares = self.router(hidden)
        assert hidden.dtype == shares.dtype == self.head.weight.dtype
        return self.head(hidden * shares.repeat(1, 4))


class Routed(Rows):
    """Has parts that are to compute in fp32."""

    def model(self):
        return _Routed()


class _Solution(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, points):
        points = points.detach().requires_grad_()
        return self.net(points), points


class Equation(Rows):
    """A network that solves u'' + u = 0 (Raissi et al. 2019): the loss takes derivatives twice."""

    def __init__(self, *, summed=False):
        self.summed = summed

    def model(self):
        return _Solution()

    def loss(self, outputs, targets):
        values, points = outputs
        (slopes,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        (curves,) = torch.autograd.grad(slopes.sum(), points, create_graph=True)
        squares = (curves + values).square() + (values - targets).square()
        return squares.sum() if self.summed else squares.mean()

    def train_data(self):
        points = torch.randn(48, 1, generator=torch.Generator().manual_seed(1))
        return TensorDataset(points, torch.sin(points))


class _Recomputed(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.calls, self.first, self.block, self.last = calls, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = self.first(inputs)
        for _ in range(self.calls):
            hidden = torch.tanh(checkpoint(self.block, hidden, use_reentrant=True))
        return self.last(hidden)


class Recomputed(Rows):
    """A block of the model's own that a backward pass inside of the backward pass recomputes."""

    def __init__(self, calls):
        self.calls = calls

    def model(self):
        return _Recomputed(self.calls)

    def eval_data(self):
        return TensorDataset(*self.train_data()[:13])  # the last batch is smaller: two are tried before the training


class _Transformed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        slopes = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(F.linear(row, self.body.weight)).sum()))(inputs)
        return self.head(self.body(inputs) + slopes)


class Transformed(Rows):
    """Takes derivatives in forward by a transform of torch.func."""

    def model(self):
        return _Transformed()


class _Unusual(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0
        self.body = nn.LazyLinear(16) if kind == "lazy" else nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)
        if kind == "complex":
            self.turn = nn.Parameter(torch.ones(16, dtype=torch.complex64))
        if kind == "integer":
            self.codes = nn.Parameter(torch.tensor([16777217, 33554435]), requires_grad=False)
        if kind == "empty":
            self.extra = nn.Linear(16, 0)
        if kind == "unfrozen":
            self.head.requires_grad_(False)
        if kind == "meta":
            self.body = nn.Linear(8, 16, device="meta")
        if kind == "replaced":
            self.scale = nn.Parameter(torch.ones(16))

    def forward(self, inputs):
        self.calls += 1
        hidden = torch.tanh(self.body(inputs))
        if self.kind == "late":
            if not hasattr(self, "middle"):
                self.middle = nn.Linear(16, 16)
            hidden = self.middle(hidden)
        if self.kind == "unfrozen" and self.calls > 2:
            self.head.requires_grad_(True)
        if self.kind == "complex":
            hidden = (hidden * self.turn).real
        if self.kind == "replaced":
            if self.calls == 1:
                self.scale = nn.Parameter(2 * self.scale.detach())
            hidden = hidden * self.scale
        if self.kind == "integer":
            hidden = hidden * (self.codes % 3).sum()
        if self.kind == "empty":
            hidden = hidden + self.extra(hidden).sum(1, keepdim=True)
        return self.head(hidden)


class Unusual(Rows):
    """Parameters of a kind that an optimizer does not expect, or that are made, frozen or unfrozen later."""

    def __init__(self, kind):
        self.kind = kind

    def model(self):
        return _Unusual(self.kind)


class _Shared(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.body, self.head = kind, nn.Linear(8, 8), nn.Linear(8, 3)
        if kind == "buffer":
            self.register_buffer("copy", self.body.weight.data)
        if kind in ("attribute", "replaced"):
            self.copy = self.body.weight.detach()
        if kind in ("memory", "columns"):
            whole = torch.randn(8, 16)
            self.body.weight = nn.Parameter(whole[:, :8])
            self.copy = nn.Parameter(whole[:, 8:] if kind == "columns" else self.body.weight.data.t())

    def forward(self, inputs):
        hidden = self.body(inputs)
        if self.kind == "replaced":  # as torch.nn.utils.spectral_norm does
            self.copy = self.body.weight / 2
        return self.head(hidden + 0.1 * F.linear(inputs, self.copy))


class Shared(Rows):
    """Tensors in memory that another tensor has too."""

    def __init__(self, kind):
        self.kind = kind

    def model(self):
        self.net = _Shared(self.kind)
        return self.net


class _Merging(nn.Linear):
    """Merges a product into its weight for evaluations, as loralib does."""

    def __init__(self):
        super().__init__(8, 8)
        self.first, self.second = nn.Parameter(torch.randn(2, 8)), nn.Parameter(0.1 * torch.randn(8, 2))
        self.weight.requires_grad_(False)
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * (self.second @ self.first)
            self.merged = not mode
        return self

    def forward(self, input):  # torch's name
        outputs = super().forward(input)
        return outputs if self.merged else outputs + input @ self.first.t() @ self.second.t()


class Merging(Rows):
    """Writes to a weight where the model goes into evaluation mode, and back."""

    def model(self):
        return nn.Sequential(_Merging(), nn.Tanh(), nn.Linear(8, 3))


class _Transient(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.calls += 1
        return self.head(inputs) * (1 + 0.1 * self.calls)


class Transient(Rows):
    """Counts in a buffer that no checkpoint has."""

    def model(self):
        return _Transient()


class _Scaling(nn.Linear):
    """Follows the size of its outputs in training, and divides by it in evaluations alone."""

    scale = 1.0

    def forward(self, input):  # torch's name
        outputs = super().forward(input)
        if self.training:
            self.scale = 0.5 * self.scale + float(outputs.detach().abs().mean())
        return outputs if self.training else outputs / self.scale


class Scaling(_First):
    """A state that evaluations alone need."""

    layer = _Scaling


class _Scales(list):
    """No look at attributes copies it: its class is the user's."""


class _Scheduled(nn.Linear):
    """Divides by a scale that it keeps in its extra state: of its own outputs ``by_rank``, else one that grows with each pass."""

    def __init__(self, *sizes, by_rank):
        super().__init__(*sizes)
        self.scales, self.by_rank = (list if by_rank else _Scales)([1.0] * 1001), by_rank

    def forward(self, input):  # torch's name
        outputs = super().forward(input)
        if self.training:
            self.scales.append(float(outputs.detach().abs().mean()) if self.by_rank else 1.2 * self.scales[-1])
        return outputs / self.scales[-2 if self.training else -1]

    def get_extra_state(self):
        return {"scales": [*self.scales], "first": torch.tensor(self.scales[0])}

    def set_extra_state(self, state):
        self.scales = type(self.scales)(state["scales"])


class ExtraState(Rows):
    """A layer of the above."""

    def __init__(self, *, by_rank=False):
        self.by_rank = by_rank

    def model(self):
        layer = _Scheduled(8, 8, by_rank=self.by_rank)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3))


class _Bank(nn.Linear):
    """Keeps the size of each pass in a buffer that grows, and divides by its last but one entry."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("bank", torch.ones(1))

    def forward(self, input):  # torch's name
        if self.training:
            last = self.bank[-1].item()
            self.bank.resize_(len(self.bank) + 1)[-1] = 1.2 * last  # refused by torch once NumPy has seen it
        return super().forward(input) / self.bank[-2 if self.training else -1]


class GrowingBuffer(_First):
    """A buffer has one more entry after each step."""

    layer = _Bank


class _Tagged(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.gain = 2.0

    def forward(self, input):  # torch's name
        return super().forward(input) * self.weight.gain


class Tagged(_First):
    """A parameter has an attribute of the model's."""

    layer = _Tagged


class _Uneven(nn.Linear):
    def forward(self, input):  # torch's name
        if input.is_sparse:
            return torch.sparse.mm(input, self.weight.t()) + self.bias
        return torch.stack([row.mean(0) for row in super().forward(input).unbind()])


class Batches(Rows):
    """Inputs are sparse, or rows of different lengths."""

    def __init__(self, *, nested):
        self.nested = nested

    def model(self):
        return nn.Sequential(_Uneven(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def collate(self, rows):
        inputs, targets = zip(*rows, strict=True)
        if not self.nested:
            return torch.stack(inputs).relu().to_sparse(), torch.stack(targets)
        parts = [row.expand(1 + int(row[0] > 0), 8) for row in inputs]
        return torch.nested.nested_tensor(parts, layout=torch.jagged), torch.stack(targets)


class _Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(32, 3)

    def forward(self, words):
        return self.head(F.embedding(words, self.table.weight, sparse=True).flatten(1))


class Sparse(Words):
    """Asks for sparse gradients where no module says so."""

    def model(self):
        return _Sparse()


class Proxies(Rows):
    """The loss has weights of its own."""

    def __init__(self):
        self.proxies = nn.Linear(3, 3)

    def loss(self, outputs, targets):
        return super().loss(self.proxies(outputs), targets)


class Beside(Rows):
    """Keeps a trainable module that takes no part in the loss."""

    def __init__(self):
        self.critic = nn.Linear(3, 3)


class _Reading(_Clipping):
    def on_step(self, run):
        """Nothing."""

    def on_evaluation(self, run, metrics):
        self.task.net[0].weight.norm()


class Reported(Rows):
    """Reads a weight after an evaluation, in a step whose own weights nobody looks at."""

    def __init__(self):
        self.hooks = [_Reading(self)]

    def eval_data(self):
        return self.train_data()


class Centre(Rows):
    """The loss has a state, as DINO's centre."""

    def __init__(self):
        self.centre = torch.zeros(3)

    def loss(self, outputs, targets):
        found = super().loss(outputs - self.centre, targets)
        self.centre = 0.5 * self.centre + 0.5 * outputs.detach().mean(0)
        return found


class ModelCentre(Rows):
    """The loss moves a buffer of the model, by the rows of all ranks or of one."""

    def __init__(self, *, all_ranks=True):
        self.all_ranks = all_ranks

    def model(self):
        net = super().model()
        net.register_buffer("centre", torch.zeros(3))
        return net

    def loss(self, outputs, targets):
        loss = super().loss(outputs - self.net.centre, targets)
        rows = self.all_rows(outputs.detach()) if self.all_ranks else outputs.detach()
        self.net.centre = self.net.centre.lerp(rows.mean(0), 0.5)
        return loss


class Contrastive(Rows):
    """Each row belongs to itself, among the rows of all ranks."""

    def loss(self, outputs, targets):
        rows = self.all_rows(outputs)
        return F.cross_entropy(4.0 * rows @ rows.t(), torch.arange(len(rows)))


class _Growing(_Clipping):
    def on_step(self, run):
        net = self.task.net
        if self.task.replaces:
            net[2] = nn.Linear(16, 3)
        else:
            net.append(nn.Linear(3, 3))


class Growing(Rows):
    """A hook adds or replaces a layer after the first step."""

    def __init__(self, *, replaces=False):
        self.replaces, self.hooks = replaces, [_Growing(self)]


class _Listed(nn.Linear):
    def parameters(self, recurse=True):
        yield self.weight


class Overridden(Rows):
    """A module lists other parameters than it has."""

    def model(self):
        return nn.Sequential(nn.Linear(8, 8), _Listed(8, 3))


class _Freezing(_Clipping):
    def on_step(self, run):
        if run.step == 2:
            self.task.net[0].requires_grad_(False)


class Phases(Rows):
    """A hook freezes a layer after the last step before a save; or model() sets the hooks, which were read before."""

    def __init__(self, *, late=False):
        self.hooks = [] if late else [_Freezing(self)]

    def model(self):
        self.hooks = self.hooks or [_Freezing(self)]
        return super().model()


class _Resetting(_Clipping):
    calls = 0

    @torch.no_grad()
    def on_step(self, run):
        self.calls += 1
        if self.calls == 3:
            self.task.net[2].weight.mul_(0.5)


@torch.no_grad()
def _halve(module, *_):
    module.bias.mul_(0.5)


class _HalvingAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, layer):
        ctx.layer = layer
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.weight.data.mul_(0.5)
        return gradient, None


class Later(Rows):
    """Writes to a weight in the backward pass; or in the third step, which is not one of those that are looked at closely."""

    def __init__(self, what="hook"):
        self.what, self.hooks = what, [_Resetting(self)] if what == "hook" else []

    def model(self):
        net = super().model()
        if self.what == "backward":
            self.net[2].register_full_backward_hook(_halve)
        if self.what in ("gradient", "function"):
            self.net[1].register_forward_hook(getattr(self, f"_{self.what}"))
        return net

    def _gradient(self, module, inputs, outputs):
        if outputs.requires_grad:
            outputs.register_hook(self._write)

    def _write(self, gradient):
        self.net[2].weight.data = self.net[2].weight.data * 0.5

    def _function(self, module, inputs, outputs):
        return _HalvingAfter.apply(outputs, self.net[2])


@dataclass
class _Losses:
    found: tuple = ()


class _Adding(nn.Linear):
    def forward(self, rows, losses, *, named):
        hidden = super().forward(rows).tanh()
        losses[0].append(hidden.square().mean())
        named["sum"] = named.get("sum", 0) + hidden.sin().mean()
        losses[1].found = (*losses[1].found, hidden.cos().mean())
        return hidden


class _Filling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(_Adding(8, 8) for _ in range(3)), nn.Linear(8, 3)

    def forward(self, rows):
        losses, named, others = [], {}, _Losses()
        for layer in self.layers:
            rows = layer(rows, (losses, others), named=named)
        return self.head(rows), sum(losses) + named["sum"] + sum(others.found)


class Filled(Rows):
    """Layers add their losses to a list, a dict and an object that they are given."""

    def model(self):
        return _Filling()

    def loss(self, outputs, targets):
        return super().loss(outputs[0], targets) + 0.5 * outputs[1]


class WrittenLater(Rows):
    """Its forward pass writes to a weight in the third step, which is not one of those that are looked at closely."""

    def model(self):
        task = self

        class Layer(nn.Linear):
            @torch.no_grad()
            def halve(self):
                if self.training and task.context.step == 3:
                    self.weight.mul_(0.5)

            def forward(self, rows):
                self.halve()
                return super().forward(rows)

        return nn.Sequential(Layer(8, 16), nn.Tanh(), nn.Linear(16, 3))


class ClippedOne(Two):
    """A hook clips one of two models."""

    def __init__(self):
        self.hooks = [_Clipping(self)]


class Augmented(Two):
    """One of the models has no weights, as an augmentation of pictures."""

    def models(self):
        return {**super().models(), "augment": nn.Hardtanh}

    def of(self, name, models, inputs, targets):
        return super().of(name, models, models["augment"](inputs), targets)


class _Codebook(nn.Module):
    """A VQ-VAE's codes, which follow the means of what all ranks map to them (van den Oord et al. 2017, appendix A.1)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())
        self.codes: Tensor
        self.counts: Tensor
        self.sums: Tensor

    def forward(self, inputs):
        hidden = self.encoder(inputs)
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        quantized = self.codes[nearest]
        if self.training and torch.is_grad_enabled():
            self._follow(hidden.detach(), F.one_hot(nearest, 6).float())
        commitment = (hidden - quantized).square().mean(1)
        return self.decoder(hidden + (quantized - hidden).detach()), commitment

    def _follow(self, hidden, chosen):
        counts, sums = chosen.sum(0), chosen.t() @ hidden
        if dist.is_initialized():
            dist.all_reduce(counts)
            dist.all_reduce(sums)
        self.counts.lerp_(counts, 0.1)
        self.sums.lerp_(sums, 0.1)
        self.codes = self.sums / self.counts[:, None].clamp_min(1e-3)


class Codebook(Rows):
    """A model with collectives of its own."""

    def model(self):
        return _Codebook()

    def loss(self, outputs, targets):
        return super().loss(outputs[0], targets) + 0.25 * outputs[1].mean()


class _State:
    def __init__(self, hidden, layers):
        self.hidden, self.layers = hidden, layers


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, state):
        return _State(state.hidden + self.down(torch.tanh(self.up(state.hidden))), state.layers + 1)


class _Head(nn.Linear):
    """Takes a tensor, and returns an object."""

    def forward(self, input):  # torch's name
        return _State(super().forward(input), 0)


class _Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([_Block(), _Block()]), _Head(8, 3)

    def forward(self, inputs):
        state = _State(inputs, 0)
        for block in self.blocks:
            state = block(state)
        return self.head(state.hidden)


class Classes(Rows):
    """Outputs are objects of a class of the model's."""

    def model(self):
        return _Stateful()

    def loss(self, outputs, targets):
        return super().loss(outputs.hidden, targets)

    eval_data = _eleven


class Adversarial(Rows):
    """Calls backward() in the loss, for a sample that the model finds hard (Goodfellow et al. 2015)."""

    def loss(self, outputs, targets):
        if not torch.is_grad_enabled():
            return super().loss(outputs, targets)
        samples = torch.linspace(-1.0, 1.0, 32).view(4, 8).requires_grad_()
        self.net(samples).square().sum().backward()
        assert samples.grad is not None
        self.net.zero_grad()
        return super().loss(outputs, targets) + self.net(samples.detach() + 0.1 * samples.grad.sign()).square().mean()


class Compiled(Rows):
    """A part of the model is compiled by torch.jit."""

    def model(self):
        return nn.Sequential(torch.jit.script(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 3))


class Narrow(Rows):
    """A layer gets rows of another width than it takes."""

    def model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(5, 3))


class _Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(8))
        self.scale: Tensor

    def forward(self, inputs):
        hidden = self.norm(self.inner(inputs))
        if self.training:
            self.scale = 0.7 * self.scale + 0.3 * hidden.detach().abs().mean(0)
        return inputs + torch.tanh(hidden / self.scale)


class _Normed(nn.Sequential):
    def forward(self, input):  # torch's name
        return input + super().forward(input)


class Spectral(Rows):
    """Hooks make weights before DeepSpeed's gather what they are made of."""

    def model(self):
        blocks = (_Normed(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh()) for _ in range(2))
        return nn.Sequential(*blocks, nn.Linear(8, 3))


class Buffers(Rows):
    """Blocks that change buffers in forward: in place, and by a new tensor."""

    def model(self):
        return nn.Sequential(_Running(), _Running(), nn.Linear(8, 3))


class _Averaging(nn.Module):
    """Gives its buffer a new tensor in each forward pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor
        self.head = nn.Linear(8, 3)

    def forward(self, rows):
        if self.training:
            self.mean = self.mean.lerp(rows.detach().mean(0), 0.3)
        return self.head(torch.tanh(rows - self.mean))


class Averaging(Rows):
    """A buffer that is replaced."""

    def model(self):
        return _Averaging()


class _Slowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head, self.calls = nn.BatchNorm1d(8), nn.Linear(8, 3), 0

    def forward(self, rows):
        if self.training:
            self.calls += 1
            self.norm.momentum = 1 / self.calls
        return self.head(self.norm(rows))


class Slowing(Rows):
    """BatchNorm's momentum follows a count, as in models that average all of their statistics."""

    def model(self):
        return _Slowing()


class _Features(nn.Module):
    """Forward hooks keep what its layers return, for a deep supervision."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3)
        self.features = {}
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(partial(self._keep, number))

    def _keep(self, number, layer, _, output):
        assert layer.weight.numel() == 64, "whole, as in forward"
        self.features[number] = output

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows).tanh()
        return self.head(sum(self.features.values()))


class Features(Rows):
    """Uses what forward hooks keep; or has a part that torch.compile has wrapped."""

    def __init__(self, *, compiled=False):
        self.compiled = compiled

    def model(self):
        if not self.compiled:
            return _Features()
        part = torch.compile(nn.Linear(8, 8), backend="eager")
        return nn.Sequential(part, nn.Linear(8, 3))


class _Scaled(nn.Linear):
    def __init__(self, width, classes):
        super().__init__(width, classes)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, rows):
        return super().forward(rows) * self.scale.exp()


class Scaled(Rows):
    """Parameters without dimensions, as CLIP's temperature."""

    def model(self):
        return nn.Sequential(_Scaled(8, 16), nn.Tanh(), _Scaled(16, 3))


class _Temperatures(nn.Module):
    """Of two layers that share one, of the model itself, in a list; one is frozen, one has a mask of its gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Scaled(8, 8) for _ in range(2))
        self.layers[1].scale = self.layers[0].scale
        self.gates = nn.ParameterList(nn.Parameter(torch.tensor(0.1 * n)) for n in range(2))
        self.gates[1].register_hook(lambda gradient: gradient * 0.5)
        self.shift = nn.Parameter(torch.tensor(0.3), requires_grad=False)
        self.head = nn.Linear(8, 3)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, rows):
        for layer, gate in zip(self.layers, self.gates, strict=True):
            rows = (layer(rows) * gate.exp()).tanh()
        assert self.temperature.shape == ()
        return self.head(rows) * self.temperature.exp() + self.shift


class Temperatures(Rows):
    """Writes to one after updates."""

    def model(self):
        return _Temperatures()

    def after_step(self, name, weight):
        if name == "temperature":
            assert weight.shape == ()
            weight.clamp_(max=0.495)


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


_BUFFERS = {
    "float64": lambda: torch.polar(torch.ones(8).double(), torch.linspace(-1.5, -0.5, 8).double()).conj().imag,
    "bool": lambda: torch.arange(8) % 2 == 0,
    "integer": lambda: torch.arange(8) + 16777217,
    "complex": lambda: torch.polar(torch.ones(8), torch.linspace(0, 1, 8)),
    "scalar": lambda: torch.tensor(0.5),
    "empty": lambda: torch.zeros(0),
    "hidden": lambda: torch.linspace(0.5, 1.5, 8),
    "expanded": lambda: torch.tensor([0.5]).expand(8),
    "rare": lambda: torch.tensor([3, 5], dtype=torch.uint16),
}


class _Sharing(nn.Module):
    """A block with a part that other blocks have too."""

    def __init__(self, part):
        super().__init__()
        self.own, self.part = nn.Linear(8, 8), part

    def forward(self, inputs):
        return inputs + self.part(self.own(inputs).tanh())


class _Having(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.more, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        for kind, make in _BUFFERS.items():
            self.register_buffer(kind, make(), persistent=kind != "hidden")
        self.listed = nn.ParameterList([torch.full((8,), 0.5), torch.ones(1)])
        self.by_name = nn.ParameterDict({"first": torch.full((8,), 0.5), "c": torch.ones(1)})
        nn.utils.parametrizations.weight_norm(self.body)
        nn.utils.parametrize.register_parametrization(self.more, "weight", _Symmetric())
        self.again = self.body
        self.head.weight.requires_grad_(False)
        part = nn.Linear(8, 8)
        self.blocks = nn.Sequential(_Sharing(part), _Sharing(part))

    def forward(self, inputs):
        hidden = self.blocks(self.more(self.body(inputs).tanh()))
        for kind in ("float64", "bool", "scalar", "hidden", "expanded"):
            hidden = hidden * getattr(self, kind).float()
        hidden = (hidden * (self.integer % 3) * self.complex).real + self.empty.sum()
        self.complex = self.complex.conj().resolve_conj().conj()  # the same numbers, as a view that conjugates
        hidden = hidden * self.listed[0] + self.listed[1]
        hidden = hidden * self.by_name["first"] + self.by_name["c"]
        return self.head(self.again(hidden))


class Having(Rows):
    """Buffers of unusual dtypes and sizes, parameters in containers, computed, shared and partly frozen."""

    def model(self):
        return _Having()


class _Later:
    def __init__(self, make):
        self.make = make


class _Returning(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.body, self.head = kind, nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, inputs):
        outputs = self.head(self.body(inputs).tanh())
        return {
            "function": lambda: outputs,
            "object": _Later(lambda: outputs),
            "rows": (row for row in outputs.unbind()),
            "mapping": UserDict(scores=outputs),
            "weight": (outputs, self.head.weight),
            "distribution": torch.distributions.Categorical(logits=outputs),
        }[self.kind]


class Returning(Rows):
    """A model that returns something else than tensors, tuples and dicts of them."""

    def __init__(self, kind):
        self.kind = kind

    def model(self):
        return _Returning(self.kind)

    def loss(self, outputs, targets):
        if self.kind == "distribution":
            return -outputs.log_prob(targets).mean()
        if self.kind == "weight":
            return super().loss(outputs[0], targets) + 0.01 * outputs[1].square().sum()
        scores = {
            "function": lambda: outputs(),
            "object": lambda: outputs.make(),
            "rows": lambda: torch.stack(list(outputs)),
            "mapping": lambda: outputs["scores"],
        }
        return super().loss(scores[self.kind](), targets)


class _ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, inputs):
        weights = dict(self.named_parameters())
        return self.head(F.linear(inputs, weights["body.weight"], weights["body.bias"]).tanh())


class ByName(Rows):
    """Weights of a part by their names."""

    def model(self):
        return _ByName()


class _Masked(nn.Module):
    """torch's encoder, which in evaluation chooses by its mask how it reads the weights of its layers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, inputs):
        masked = torch.zeros(len(inputs), 3, dtype=torch.bool)
        masked[:, 0] = inputs[:, 6] > 1.0  # padding in front: the first evaluation has it on rank 1 alone
        hidden = self.encoder(inputs[:, None].expand(-1, 3, -1), src_key_padding_mask=masked)
        return self.head(hidden.mean(1))


class Masked(Rows):
    """A mask that is unlike on each rank."""

    def model(self):
        return _Masked()

    def eval_data(self):
        return self.train_data()


class _Normaliser(nn.Module):
    """Inputs without the mean of those before, which has the name of BatchNorm's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))

    def forward(self, inputs):
        mean = self.running_mean
        if self.training:
            mean.lerp_(inputs.mean(0), 0.1)
        return inputs - mean


class Statistics(Rows):
    """Statistics of samples, of one of torch's layers or of the task's."""

    def __init__(self, what):
        self.what = what

    def model(self):
        first = [_Normaliser()]
        if self.what == "instance":
            first = [nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()]
        return nn.Sequential(*first, nn.Linear(8, 3))


class _Reader(nn.Module):
    """Convolutions, a recurrent layer over the columns, classes by time (Shi et al. 2017, "CRNN")."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.ReLU())
        self.sequence, self.head = nn.LSTM(8, 6, bidirectional=True), nn.Linear(12, 5)

    def forward(self, images):
        columns = self.body(images).permute(2, 0, 1)
        return self.head(self.sequence(columns)[0]).log_softmax(-1)


class Reading(Rows):
    """Outputs with time first, and a CTC loss that is summed."""

    loss_is = "sum"

    def model(self):
        return _Reader()

    def loss(self, outputs, targets):
        rows = len(targets)
        lengths = torch.full((rows,), len(outputs)), torch.full((rows,), targets.shape[1])
        return F.ctc_loss(outputs, targets, *lengths, reduction="sum")

    def train_data(self):
        draw = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(48, 2, 10, generator=draw), torch.randint(1, 5, (48, 3), generator=draw))


class TiedTable(Words):
    """A table with a limit whose weight a linear layer has too."""

    def model(self):
        table, head = nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 20, bias=False)
        head.weight = table.weight
        return nn.Sequential(table, nn.Flatten(), nn.Linear(32, 8), head, nn.Linear(20, 3))


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


def _limited(gradient):
    return gradient.clamp(-0.01, 0.01)


class _ClipByHelper(_Clip):
    @staticmethod
    def backward(ctx, gradient):
        return _limited(gradient)


class _Straight(_Clip):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Guarded(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.body, self.head, self.what = nn.Linear(8, 16), nn.Linear(16, 3), what
        if what == "module":
            self.head.register_full_backward_hook(lambda _, into, out: (into[0].clamp(-0.01, 0.01),))

    def forward(self, inputs):
        hidden = self.body(inputs).tanh()
        hook = {"clip": lambda gradient: gradient.clamp(-0.01, 0.01), "turn": torch.neg, "method": self.limited}
        functions = {"function": _Clip, "helper": _ClipByHelper, "straight through": _Straight}
        if self.what in functions:
            hidden = functions[self.what].apply(hidden)
        if hidden.requires_grad and self.what in hook:
            for _ in range(2):
                hidden.register_hook(hook[self.what])
        outputs = self.head(hidden)
        if self.what == "spoilt":
            hidden.add_(1.0)
        return outputs

    def limited(self, gradient):
        return gradient.clamp(-0.01, 0.01)


class Guarded(Rows):
    """Changes the gradient of an output by a hook, or spoils what the backward pass needs."""

    def __init__(self, what):
        self.what = what

    def model(self):
        return _Guarded(self.what)


class FrozenTable(Words):
    """A frozen table with a limit."""

    def model(self):
        table = nn.Embedding.from_pretrained(3 * torch.randn(20, 8), max_norm=1.0)
        return nn.Sequential(table, nn.Flatten(), nn.Linear(32, 3))


class _Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs):
        return self.down(self.up(inputs).tanh()).t()


class _Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([_Turned(), _Turned()]), nn.Linear(8, 3)

    def forward(self, inputs):
        for block in self.blocks:
            outputs = block(inputs).t()
            outputs += inputs
            inputs = outputs
        return self.head(inputs)


class Residual(Rows):
    """Writes to what a block returns, which lies in another tensor's memory."""

    def model(self):
        return _Residual()


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, field, start, *weights):
        with torch.no_grad():
            end = start + 0.5 * field(start)
        ctx.field = field
        ctx.save_for_backward(start, *weights)
        return end

    @staticmethod
    def backward(ctx, *gradients):
        start, *weights = ctx.saved_tensors
        with torch.enable_grad():
            start = start.detach().requires_grad_()
            of_start, *of_weights = torch.autograd.grad(0.5 * ctx.field(start), (start, *weights), gradients[0])
        return None, gradients[0] + of_start, *of_weights


class _Ode(nn.Module):
    def __init__(self):
        super().__init__()
        self.field, self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(_Adjoint.apply(self.field, inputs, *self.field.parameters()))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, block):
        ctx.block = block
        ctx.save_for_backward(inputs)
        with torch.no_grad():
            return block(inputs)

    @staticmethod
    def backward(ctx, *gradients):
        with torch.enable_grad():
            inputs = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.block(inputs), gradients[0])
        return inputs.grad, None


class _Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = self.body(inputs)
        for _ in range(2):
            hidden = _Reversed.apply(hidden, self.block).tanh()
        return self.head(hidden)


class _Recalled(nn.Module):
    """A block that its stack calls by a method in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def again(self, inputs):
        return self.inner(inputs).tanh()

    def forward(self, inputs):
        return self.again(inputs)


class _ShownRecalled(_Recalled):
    def backward_pass(self, inputs, gradient):
        with torch.enable_grad():
            again = inputs.detach().requires_grad_()
            self.again(again).backward(gradient)
        return again.grad


class _RecallingStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, *blocks):
        ctx.blocks, ctx.inputs = blocks, []
        for block in blocks:
            ctx.inputs.append(inputs)
            inputs = block(inputs)
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        gradient, kept = gradients[0], list[Tensor]()
        for block, inputs in zip(reversed(ctx.blocks), reversed(ctx.inputs), strict=True):
            with torch.enable_grad():
                again = inputs.detach().requires_grad_()
                again.register_hook(kept.append)  # its attribute would show that derivatives are taken here
                torch.autograd.backward(block.again(again), gradient)
            gradient = kept.pop()
        return gradient, *(None for _ in ctx.blocks)


class _ShownStack(_RecallingStack):
    """As transformers' Reformer does."""

    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0]
        for block, inputs in zip(reversed(ctx.blocks), reversed(ctx.inputs), strict=True):
            gradient = block.backward_pass(inputs, gradient)
        return gradient, *(None for _ in ctx.blocks)


class _Recalling(nn.Module):
    block: type[nn.Module] = _Recalled

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def forward(self, inputs):
        return self.head(_RecallingStack.apply(self.body(inputs), *self.blocks))


class _ShownRecalling(_Recalling):
    block = _ShownRecalled

    def forward(self, inputs):
        return self.head(_ShownStack.apply(self.body(inputs), *self.blocks))


class _Slopes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, inputs):
        outputs, slopes, *_ = torch.func.jvp(self.net, (inputs,), (torch.ones_like(inputs),))
        return outputs + 0.1 * slopes


class _Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, inputs):
        weights = dict(self.net.named_parameters())
        with torch.enable_grad():
            loss = torch.func.functional_call(self.net, weights, (torch.linspace(-1, 1, 8),)).square().mean()
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {name: weights[name] - 0.1 * slope for name, slope in zip(weights, slopes, strict=True)}
        return torch.func.functional_call(self.net, moved, (inputs,))


class Backwards(Rows):
    """Derivatives by an adjoint method (Chen et al. 2018), by a backward pass in the backward pass (Gomez et al. 2017), in forward
    mode, and in the evaluation too (Finn et al. 2017)."""

    def __init__(self, kind):
        self.kind = kind

    def model(self):
        kinds = {
            "reversible": _Reversible,
            "by a method": _Recalling,
            "by a method that shows it": _ShownRecalling,
            "forward": _Slopes,
            "inner": _Adapted,
        }
        return {"adjoint": _Ode, **kinds}[self.kind]()

    eval_data = _eleven


class SecondView(Rows):
    """The loss calls the model again; its statistics are those of both calls."""

    def model(self):
        self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        return self.net

    def loss(self, outputs, targets):
        views = torch.linspace(-1, 1, 8) * torch.arange(len(targets))[:, None]
        return super().loss(outputs, targets) + 0.1 * self.net(views).square().mean()


class HeldTeacher(Rows):
    """The loss or a hook moves a teacher that the task holds, when the model trains (Tarvainen and Valpola 2017)."""

    def __init__(self, where="loss"):
        self.where, self.hooks = where, [_Following(self)] if where == "hook" else []

    def model(self):
        net = super().model()
        self.teacher = copy.deepcopy(net).requires_grad_(False)
        return net

    @torch.no_grad()
    def move(self):
        for weight, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            weight.lerp_(other + 0.01, 0.1)

    def loss(self, outputs, targets):
        if self.where == "loss" and self.net.training:
            self.move()
        wanted = self.teacher(torch.linspace(-1, 1, 8))
        return super().loss(outputs, targets) + 0.1 * (outputs - wanted).square().mean()

    eval_data = _eleven


class _Following(_Clipping):
    def on_step(self, run):
        self.task.move()


class _Observer(nn.Module):
    """As those of torch.ao.quantization: sizes that the first batch sets, and a loading of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(0))
        self.register_buffer("mean", None)
        self.largest: Tensor
        self.mean: Tensor | None

    def _load_from_state_dict(self, *args, **more):
        raise NotImplementedError

    def forward(self, weight):
        if self.training and torch.is_grad_enabled():
            now = weight.detach().abs().amax(1)
            self.largest.resize_(now.shape).copy_(now)
            self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
        return weight if self.mean is None else weight / (1 + self.mean + self.largest)[:, None]


class _Observed(nn.Linear):
    def __init__(self, width, outputs):
        super().__init__(width, outputs)
        self.observer = _Observer()

    def forward(self, input):  # torch's name
        return F.linear(input, self.observer(self.weight), self.bias)


class Observing(_First):
    """Buffers that are None, or have no elements, before the first step."""

    layer = _Observed


class Balanced(Rows):
    """A term in the norm of the mean gradient, in training alone (Chen et al. 2018, "GradNorm"); also beside a ``penalty``."""

    def __init__(self, penalty=None):
        self.penalty = penalty

    def loss(self, outputs, targets):
        loss = super().loss(outputs, targets)
        if self.penalty:
            loss = loss + self.penalty * self.net[0].weight.square().sum()
        if torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad(loss, self.net[0].weight, create_graph=True)
            loss = loss + 20 * gradient.square().mean()
        return loss


class Leaving(Rows):
    """Leaves out a part of the batch by a loss of 0 that is made of nothing, as guards against NaN do."""

    def loss(self, outputs, targets):
        if len(targets) <= 4:
            is_left_out = outputs.requires_grad and (targets == 2).all()
            return torch.zeros((), requires_grad=True) if is_left_out else super().loss(outputs, targets)
        parts = zip(outputs.split(4), targets.split(4), strict=True)
        return torch.stack([self.loss(*part) for part in parts]).mean()

    def train_data(self):
        inputs, targets = super().train_data().tensors
        targets[12:16] = 2  # in the second step, the second rank's
        return TensorDataset(inputs, targets)


class Again(Rows):
    """Calls the model once more in the loss, as R-Drop does, or communicates there, or does both in what is kept of a batch;
    with 11 samples to evaluate on."""

    def __init__(self, what):
        self.what = what

    def loss(self, outputs, targets):
        if self.what == "model":
            return super().loss(outputs, targets) + self.net(torch.linspace(-1, 1, 16).view(2, 8)).square().mean()
        total = torch.ones(())
        if dist.is_initialized() and self.what == "communicates":
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return super().loss(outputs, targets) * total

    def keep(self, outputs, targets):
        if self.what != "keeps":
            return outputs
        if dist.is_initialized():
            dist.all_reduce(torch.ones(()))
        return self.net(torch.ones(2, 8))

    def metrics_of_all(self, kept):
        return {"kept": float(len(kept))}

    eval_data = _eleven


_COUNT = [0]


class _Meter:
    calls = 0


_METER = _Meter()


class Counted(Rows):
    """A loss that grows with the calls of it: counted in an attribute in training alone, or elsewhere."""

    def __init__(self, where):
        self.where, self.calls = where, 0

    def loss(self, outputs, targets):
        _COUNT[0] += 1
        _METER.calls += 1
        self.calls += outputs.requires_grad
        calls = {"global": _COUNT[0], "object": _METER.calls}.get(self.where, self.calls)
        return super().loss(outputs, targets) * min(1.0, calls / 20)


class ByRank(Rows):
    """Asks for its rank in the loss."""

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * (1 + 0.1 * self.context.rank)


class Centring(nn.Module):
    """Outputs around their mean over the rows: always, in training, where most rows are positive, or never."""

    def __init__(self, what):
        super().__init__()
        self.layer, self.what = nn.Linear(8, 3), what

    def forward(self, rows):
        h = self.layer(rows)
        if self.what == "branch":
            return h if rows[:, 0].mean() > 0 else 2 * h
        centred = self.what == "always" or (self.what == "training" and self.training)
        return h - h.mean(0) if centred else h


class _Pondering(nn.Module):
    """A block that is called twice where a row of the batch is hard, or a loop over as many columns as the batch has."""

    def __init__(self, loops):
        super().__init__()
        self.first, self.block, self.last, self.loops = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3), loops

    def forward(self, rows):
        hidden, hard = self.first(rows), rows.abs().amax(1, keepdim=True) > 2.9
        if self.loops:
            for _ in range(1 + int(hard.any())):
                hidden = torch.where(hard, self.block(hidden).tanh(), hidden)  # each row for itself
        else:
            for _ in range(1 + int(hard.any())):
                hidden = self.block(hidden).tanh()
        return self.last(hidden)


class Pondering(Rows):
    """A hard row comes in the third step."""

    def __init__(self, loops=False, hard=17):
        self.loops, self.hard = loops, hard

    def model(self):
        return _Pondering(self.loops)

    def train_data(self):
        rows, labels = super().train_data().tensors
        rows = rows.clamp(-2, 2)
        rows[self.hard, 0] = 3.5
        return TensorDataset(rows, labels)


class Chosen(Rows):
    """A mean over the rows of one class, of which micro-batches later have one, or none: then it is a sum, or 0."""

    def train_data(self):
        rows, _ = super().train_data().tensors
        labels = torch.zeros(48, dtype=torch.int64)
        labels[:8] = labels[9::4] = 2
        return TensorDataset(rows, labels)

    def loss(self, outputs, targets):
        some = targets > 0
        return F.cross_entropy(outputs[some], targets[some]) if some.any() else outputs.sum() * 0


class HeldMetric(Rows):
    """A metric of torchmetrics that the task holds."""

    def __init__(self):
        self.mean = MeanMetric()

    def eval_data(self):
        return _eleven(self)

    def metrics(self, outputs, targets):
        self.mean.update((outputs.argmax(1) == targets).float())
        return {"right": dsframe.Sum((outputs.argmax(1) == targets).sum(), len(targets))}

    def finalize(self, sums):
        held = self.mean.compute().item()
        self.mean.reset()
        return {"right": sums["right"].mean, "held": held}


class CalledMetric(HeldMetric):
    """The same, called for the value of a batch, and never computed."""

    def metrics(self, outputs, targets):
        right = (outputs.argmax(1) == targets).float()
        return {"right": dsframe.Sum(self.mean(right) * len(right), len(right))}

    def finalize(self, sums):
        return {"right": sums["right"].mean}


class Rated(Rows):
    """Rates that something else than dsframe sets: a scheduler of torch's in a hook, a hook, the optimizer."""

    class Falling(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["lr"] *= 0.5

    class Setting(Hooks):
        def __init__(self, task):
            self.task = task

        def on_step(self, run):
            if self.task.by == "scheduler":
                self.task.scheduler.step()
            elif self.task.by == "hook":
                self.task.made.param_groups[0]["lr"] = 0.5

    def __init__(self, by):
        self.by, self.hooks = by, [Rated.Setting(self)]

    def optimizer(self, groups, lr):
        self.made = (Rated.Falling if self.by == "optimizer" else torch.optim.SGD)(groups, lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.made, 1, 0.5)
        return self.made


class _Scale(torch.autograd.Function):
    """Gradients are larger in the first steps."""

    calls = 0

    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        _Scale.calls += 1
        return gradient * (1 + 1 / _Scale.calls)


class CountsBackward(Rows):
    """A count of backward passes: in the class of a function, or of a hook in an attribute."""

    class Model(nn.Module):
        def __init__(self, where):
            super().__init__()
            self.first, self.last, self.where, self.calls = nn.Linear(8, 16), nn.Linear(16, 3), where, 0

        def forward(self, rows):
            hidden = self.first(rows).tanh()
            if self.where == "hook" and hidden.requires_grad:
                hidden.register_hook(self.larger)
            return self.last(_Scale.apply(hidden) if self.where == "function" else hidden)

        def larger(self, gradient):
            self.calls += 1
            return gradient * (1 + 1 / self.calls)

    def __init__(self, where):
        self.where, _Scale.calls = where, 0

    def model(self):
        return CountsBackward.Model(self.where)


class _Slower(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, layer):
        ctx.layer = layer
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.scale.mul_(0.9)
        return gradient * ctx.layer.scale, None


class _Slowed(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, input):  # torch's name
        return _Slower.apply(super().forward(input), self)


class Slowed(_First):
    """Each backward pass changes a buffer that gradients depend on."""

    layer = _Slowed


class CountsUpdates(Rows):
    """Counts in after_step."""

    updates = 0

    def after_step(self, name, weight):
        self.updates += name == "0.weight"
        weight.mul_(1 - 0.01 * self.updates)


class CountsAndWrites(Rows):
    """A frozen copy follows its layer, faster at first: by a count."""

    class Net(nn.Module):
        def __init__(self, alike):
            super().__init__()
            self.layer, self.head, self.calls = nn.Linear(8, 16), nn.Linear(16, 3), 0
            self.teacher = (copy.deepcopy(self.layer) if alike else nn.Linear(8, 16)).requires_grad_(False)

        def forward(self, rows):
            if self.training:
                self.calls += 1
                with torch.no_grad():
                    self.teacher.weight.lerp_(self.layer.weight, 1 / self.calls)
            return self.head((self.layer(rows) + self.teacher(rows)).tanh())

    def __init__(self, alike):
        self.alike = alike

    def model(self):
        return CountsAndWrites.Net(self.alike)


class AskingForGradients(Rows):
    """A model that centres its rows, or counts, where gradients are on; or that centres them always."""

    class Net(nn.Module):
        def __init__(self, what):
            super().__init__()
            self.body, self.head, self.what, self.calls = nn.Linear(8, 16), nn.Linear(16, 3), what, 0

        def forward(self, rows):
            hidden = self.body(rows).tanh()
            if (torch.is_grad_enabled() and self.what == "batch") or self.what == "always":
                hidden = hidden - hidden.mean(0)
            if torch.is_grad_enabled() and self.what == "count":
                self.calls += 1
                hidden = hidden * min(1.0, self.calls / 8)
            return self.head(hidden)

    def __init__(self, what):
        self.what = what

    def model(self):
        return AskingForGradients.Net(self.what)


class OfRanks(Rows):
    """A loss times the number of processes."""

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * self.count()

    def count(self):
        return dist.get_world_size() if dist.is_initialized() else 1


class LossInTraining(Rows):
    """A model that returns its loss, a sum, in training, and scores in an evaluation, as torchvision's detectors do."""

    class Net(nn.Linear):
        def forward(self, rows, labels):
            scores = super().forward(rows)
            return F.cross_entropy(scores, labels, reduction="sum") if self.training else scores

    class Data(Dataset):
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            row, label = self.rows[index]
            return (row, label), label

    def __init__(self, **says):
        vars(self).update(says)

    def model(self):
        return LossInTraining.Net(8, 3)

    def loss(self, outputs, targets):
        return outputs if outputs.ndim == 0 else F.cross_entropy(outputs, targets, reduction=self.loss_is)

    def train_data(self):
        return LossInTraining.Data(super().train_data())


class Centred(Rows):
    """A model whose rows depend on each other."""

    def __init__(self, what, **says):
        self.what = what
        vars(self).update(says)

    def model(self):
        return Centring(self.what)


class _Stream(IterableDataset):
    """Rows that cannot be read again."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)


class Streamed(Centred):
    """The same rows as a stream."""

    def train_data(self):
        return _Stream(super().train_data())


class StreamedPondering(Pondering):
    """The same rows as a stream."""

    def train_data(self):
        return _Stream(super().train_data())


class _RunningMean:
    """A hook that subtracts what outputs were before, on average."""

    def __init__(self):
        self.mean = torch.zeros(16)

    def __call__(self, module, _, outputs):
        if module.training:
            self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs - self.mean


class Hooked(Rows):
    """Its hooks keep something: an object, a function with a closure, a partial one, or one for a gradient or for every
    module."""

    def __init__(self, what):
        self.what = what

    def model(self):
        net, calls = super().model(), [0]

        def warm(module, _, outputs):
            calls[0] += module.training
            return outputs * min(1.0, calls[0] / 4)

        def warm_gradient(gradient):
            calls[0] += 1
            return gradient * min(1.0, calls[0] / 4)

        def warm_by(state, module, inputs, outputs):
            state["calls"] += module.training
            return outputs * min(1.0, state["calls"] / 4)

        if self.what == "gradient":
            net[0].weight.register_hook(warm_gradient)
        elif self.what == "partial":
            net[1].register_forward_hook(partial(warm_by, {"calls": 0}))
        elif self.what == "every module":
            layer = weakref.ref(net[1])

            def everywhere(module, *values):
                if layer() is None:  # of an earlier training in this process
                    handle.remove()
                return warm(module, *values) if module is layer() else None

            handle = register_module_forward_hook(everywhere)
        else:
            net[1].register_forward_hook(_RunningMean() if self.what == "object" else warm)
        return net


class Modes(Rows):
    """A layer that the forward pass itself puts into evaluation mode."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

        def forward(self, rows):
            self.norm.eval()
            return self.head(self.norm(self.body(rows)).tanh())

    def model(self):
        return Modes.Net()


class IdleParts(Rows):
    """Blocks with a layer that nothing uses."""

    class Part(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.used, self.idle = nn.Linear(width, 16), nn.Linear(width, 16)

        def forward(self, rows):
            return self.used(rows)

    def model(self):
        return nn.Sequential(IdleParts.Part(8), nn.Tanh(), IdleParts.Part(16), nn.Linear(16, 3))


class Dropping(Rows):
    """Experts that drop the rows beyond their capacity; the first four rows go to four experts."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 3)

        def forward(self, rows):
            chosen, hidden = rows[:, 0].long(), torch.zeros_like(rows)
            for number, expert in enumerate(self.experts):
                kept = (chosen == number).nonzero().squeeze(-1)[: max(1, len(rows) // 4)]
                hidden = hidden.index_add(0, kept, expert(rows[kept]))
            return self.head(hidden)

    def model(self):
        return Dropping.Net()

    def train_data(self):
        rows, labels = super().train_data().tensors
        rows[:, 0] = torch.arange(48) % 3
        rows[:4, 0] = torch.arange(4)
        return TensorDataset(rows, labels)


class Surgery(Rows):
    """Takes from one loss's gradient the part against the other one's, if there is one."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)

        def forward(self, rows):
            hidden = self.body(rows).tanh()
            return hidden, self.first(hidden), self.second(hidden).squeeze(-1)

    def model(self):
        return Surgery.Net()

    def loss(self, outputs, targets):
        hidden, first, second = outputs
        losses = F.cross_entropy(first, targets), F.mse_loss(second, targets.float())
        one, other = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for loss in losses)
        against = (one * other).sum() / other.square().sum() * (self.context.step > 1)
        return sum(losses) - against.detach() * (other.detach() * hidden).sum()


class LateSum(Rows):
    """A mean in the first step, then a sum."""

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum" if self.context.step > 1 else "mean")


class _NoisySteps(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(torch.rand(()), alpha=1e-4)


class DrawsLater(Rows):
    """Draws random numbers from the third step on."""

    def __init__(self, where="", process=False):
        self.where, self.process = where, process

    def _noise(self, place):
        if place != self.where or self.context.step < 3:
            return 1.0
        return float(np.random.rand()) if self.process else float(torch.rand(()))

    def model(self):
        net = super().model()
        net.register_forward_hook(
            lambda module, _, outputs: outputs * (self._noise("model") if module.training else 1.0)
        )
        return net

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * (self._noise("loss") if torch.is_grad_enabled() else 1.0)

    def optimizer(self, parameters, lr, **_):
        return _NoisySteps(parameters, lr)


class Rounded(Rows):
    """A loss in 16 bits."""

    def __init__(self, dtype):
        self.dtype = dtype

    def loss(self, outputs, targets):
        return super().loss(outputs, targets).to(getattr(torch, self.dtype))


class Normalised(Rows):
    """A loss divided by itself, detached: its value is that of a mean, its gradient is not."""

    def loss(self, outputs, targets):
        loss = super().loss(outputs, targets)
        return 2 * loss / loss.detach()


class Total(Rows):
    """A sum that does not say so."""

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum")


class RarelyIgnored(Rows):
    """Labels of two of the first rows do not count. They are not in the first batch of a shuffled order."""

    def train_data(self):
        rows, labels = super().train_data().tensors
        labels[:2] = -100
        return TensorDataset(rows, labels)


class Sometimes(Rows):
    """Layers that every second step uses, or none."""

    def __init__(self, idle=False):
        self.idle = idle

    def model(self):
        task = self

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.odd, self.even, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 3)

            def forward(self, rows):
                layer = self.odd if task.idle or task.context.step % 2 else self.even
                return self.last(layer(rows).tanh())

        return Model()


class TwoSometimes(Two):
    """Two models, of which one has a layer that nothing uses."""

    def models(self):
        return {"first": Sometimes(idle=True).model, "second": Rows().model}

    def losses(self):
        return dict.fromkeys(("first", "second"), self.of_both)

    def of_both(self, models, inputs, targets):
        return F.cross_entropy(models["first"](inputs) + models["second"](inputs), targets)


_FORWARDS = 0


class Warming(nn.Module):
    """Counts its calls in a global, or in its class."""

    calls = 0

    def __init__(self, where):
        super().__init__()
        self.layer, self.where = nn.Linear(8, 3), where

    def forward(self, rows):
        global _FORWARDS
        if self.where == "global":
            _FORWARDS += 1
            count = _FORWARDS
        else:
            Warming.calls += 1
            count = Warming.calls
        return self.layer(rows) * min(1.0, 0.2 * count)


def _warming_locally(where):
    """Of code that ``model()`` defines itself, as in a notebook."""
    count = 0

    def counted():
        nonlocal count
        count += 1
        return count

    class Counter:
        calls = 0

        @classmethod
        def counted(cls):
            cls.calls += 1
            return cls.calls

    class Model(nn.Linear):
        def forward(self, rows):
            number = counted() if where == "local function" else Counter.counted()
            return super().forward(rows) * min(1.0, 0.2 * number)

    return Model(8, 3)


class WarmedUp(Rows):
    """A model with a warm-up by the number of its calls."""

    def __init__(self, where):
        global _FORWARDS
        self.where, _FORWARDS, Warming.calls = where, 0, 0

    def model(self):
        return _warming_locally(self.where) if self.where.startswith("local") else Warming(self.where)


class Noisy(Rows):
    """Noise of a generator that the module holds: itself, or in a list, where no look finds it."""

    class Layer(nn.Module):
        def __init__(self, listed):
            super().__init__()
            self.layer, noise = nn.Linear(8, 3), torch.Generator().manual_seed(3)
            self.noise = [noise] if listed else noise

        def forward(self, rows):
            noise = self.noise[0] if isinstance(self.noise, list) else self.noise
            return self.layer(rows) + torch.randn(len(rows), 3, generator=noise)

    def __init__(self, *, listed=False):
        self.listed = listed

    def model(self):
        return Noisy.Layer(self.listed)


_GATES = {}


class Router(nn.Module):
    """Leaves auxiliary losses in attributes: in a list, and in a dict of what a layer gives that nothing else needs."""

    def __init__(self):
        super().__init__()
        self.body, self.gate = nn.Linear(16, 16), nn.Linear(16, 1)
        self.losses = []

    def forward(self, rows):
        hidden = torch.tanh(self.body(rows))
        _GATES[id(self)] = self.gate(hidden).square().mean()
        self.losses.append(self.gate(hidden).square().mean())
        self.last = {"hidden": hidden}
        return hidden


class Auxiliary(Rows):
    """Its loss reads what the blocks of the model leave in attributes."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
            self.routers = nn.ModuleList([Router(), Router()])

        def forward(self, rows):
            hidden = torch.tanh(self.first(rows))
            for router in self.routers:
                router.losses.clear()
                hidden = router(hidden)
            return self.head(hidden)

    def __init__(self, where="attributes"):
        self.where = where

    def model(self):
        _GATES.clear()
        self.net = Auxiliary.Net()
        return self.net

    def loss(self, outputs, targets):
        if self.where == "global":
            return super().loss(outputs, targets) + 0.1 * sum(_GATES.values())
        routers = list(self.net.routers)
        return super().loss(outputs, targets) + 0.1 * sum(
            one.losses[0] + one.last["hidden"][:, 0].mean() for one in routers
        )


class Judged(Two):
    """Two models; the second loss calls the first model, and all are judged on 13 rows."""

    loss = Task.loss

    def models(self):
        return {"one": partial(nn.Linear, 8, 3), "two": partial(nn.Linear, 8, 8)}

    def of(self, name, models, inputs, targets):
        rows = models["two"](inputs) if name == "two" else inputs
        return super().of("one", models, rows, targets)

    def eval_data(self):
        return torch.utils.data.Subset(self.train_data(), range(13))

    def metrics(self, outputs, targets):
        return {}

    def metrics_of_models(self, models, rows, targets):
        return {"number": dsframe.Sum(float(len(rows)), 0), "first": dsframe.Sum(rows[:, 0].sum(), len(rows))}

    def finalize(self, sums):
        return {"number": float(sums["number"].total), "first": sums["first"].mean}
