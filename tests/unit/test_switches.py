"""The switches of ``dsframe.model``: what they do to a model in memory, and what they say where they cannot."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import random
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dsframe.config import load
from dsframe.config.rules.model import compiler
from dsframe.engines import fsdp_units
from dsframe.errors import ConfigError, EngineError, TaskError
from dsframe.model import switches
from dsframe.tasks import layers
from dsframe.tasks.language import gpt
from dsframe.tasks.vision import cnn
from tests.files import ds_config
from tests.unit.test_values import Scales, Settings

CPU = torch.device("cpu")


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows):
        return self.second(self.first(rows))


def language_model():
    return layers.assemble(gpt(layers=3, heads=2, width=32, context=16), seed=0)


def tokens(rows=4):
    return torch.randint(256, (rows, 16), generator=torch.Generator().manual_seed(0))


def switched(model, **settings):
    file = ds_config(4, task={"name": "a.b:C"}, model=settings)
    switches.apply(model, load(file), CPU)
    return model


def saved_bytes(run):
    """Bytes that the forward pass keeps for the backward pass, each storage once, without parameters."""
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter) and tensor.grad_fn is not None:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


def gradients(model, inputs):
    torch.manual_seed(1)
    model.zero_grad()
    model(inputs).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(model, other, inputs):
    """To the last bit."""
    expected, found = gradients(model, inputs), gradients(other, inputs)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_recomputation_keeps_less_and_changes_nothing():
    plain = language_model()
    frugal = switched(copy.deepcopy(plain), activation_checkpointing=True)
    assert list(frugal.state_dict()) == list(plain.state_dict())
    assert [type(block).__name__ for block in switches.units(frugal)] == ["Block"] * 3
    assert_same_gradients(plain, frugal, tokens())
    assert saved_bytes(lambda: frugal(tokens())) < 0.4 * saved_bytes(lambda: plain(tokens()))
    with torch.no_grad():
        assert torch.equal(frugal(tokens()), plain(tokens()))


@pytest.mark.parametrize(
    ("wanted", "units"),
    [
        ({"every": 2}, ["2", "4"]),
        ({"modules": ["Block"], "every": 3}, ["2"]),
        ({"modules": ["*.expand", "*.contract"], "every": 2}, ["2.expand", "3.expand", "4.expand"]),
        (["*.norm_1", "3.*"], ["2.norm_1", "3.norm_1", "3.query_key_value", "3.projection", "3.norm_2"]),
    ],
)
def test_some_of_the_blocks_or_parts_of_them_are_recomputed(wanted, units):
    plain = language_model()
    frugal = switched(copy.deepcopy(plain), activation_checkpointing=wanted)
    names = [name for name, module in frugal.named_modules() if module in switches.units(frugal)]
    assert names[: len(units)] == units
    assert_same_gradients(plain, frugal, tokens())


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, images):
        return nn.functional.dropout(self.norm(self.convolution(images)), 0.5, self.training)


def test_recomputation_draws_the_same_and_counts_a_batch_once():
    plain = nn.Sequential(Normed(), Normed())
    frugal = switched(copy.deepcopy(plain), activation_checkpointing=True)
    assert_same_gradients(plain, frugal, torch.randn(4, 2, 5, 5))
    for name, value in plain.state_dict().items():
        assert torch.equal(frugal.state_dict()[name], value), name


class Moving(nn.Linear):
    """Draws outside of torch's generators, and counts."""

    def __init__(self):
        super().__init__(3, 3)
        self.numbers, self.calls = torch.Generator().manual_seed(1), 0

    def forward(self, rows):
        self.calls += 1
        if random.random() < 0.2:
            return rows
        drawn = np.random.rand() + torch.rand((), generator=self.numbers)
        return super().forward(rows).tanh() * drawn / self.calls


def test_recomputation_moves_no_state_of_the_blocks():
    plain = nn.Sequential(Moving(), Moving())
    frugal = switched(copy.deepcopy(plain), activation_checkpointing=["Moving"])
    rows = torch.randn(4, 3)

    def trained(model):
        random.seed(3)
        np.random.seed(3)
        found = [gradients(model, rows) for _ in range(4)]
        own = [(block.calls, block.numbers.get_state().tolist()) for block in model]
        return (
            [{name: value.tolist() for name, value in one.items()} for one in found],
            own,
            random.random(),
            np.random.rand(),
        )

    assert trained(plain) == trained(frugal)


LEVEL, COUNT, HISTORY = torch.ones(3), 0, []


class Keeping(nn.Linear):
    """Keeps a state in attributes, in a class or in globals, which only ``move`` changes."""

    passes = 0

    def __init__(self, move):
        super().__init__(3, 3)
        self.move = move
        self.level, self.large = torch.ones(3), torch.ones(100_000)
        self.list = self.again = []
        self.table, self.numbers, self.set = {"calls": 0}, np.ones(3, np.float32), set()
        self.queue = deque([1.0], maxlen=2)
        self.counter, self.holder = itertools.count(1), Holder()

    def forward(self, rows):
        return super().forward(rows * self.move(self, rows.detach().mean(0))).tanh()


@dataclasses.dataclass
class Holder:
    """An object of the user's."""

    level: float = 1.0


def replaced(block, mean):
    block.level = 0.5 * block.level + mean
    return block.level


def in_place(block, mean):
    return block.level.lerp_(mean, 0.5).clone()


def large(block, mean):
    return block.large.add_(mean.mean())[:3].clone()


def made(block, mean):
    if not hasattr(block, "late"):
        block.late = mean
        return 2 * mean
    return block.late


def a_buffer_made(block, mean):
    if not hasattr(block, "late"):
        block.register_buffer("late", mean)
    return block.late


def listed(block, mean):
    block.list.append(mean)
    return sum(block.list)


def in_two_places(block, mean):
    block.again.append(block.level.add_(mean))
    return sum(block.list)


def in_a_list(block, mean):
    block.list[:] = block.list or [torch.ones(3)]
    return block.list[0].add_(mean).clone()


def counted(block, mean):
    block.table["calls"] += 1
    return 1 / block.table["calls"]


def array(block, mean):
    block.numbers *= 1.1
    return torch.tensor(block.numbers)


def queued(block, mean):
    block.queue.append(block.queue[-1] + 1)
    return sum(block.queue)


def in_a_set(block, mean):
    block.set.add(len(block.set))
    return len(block.set)


def iterated(block, mean):
    return next(block.counter)


def held(block, mean):
    block.holder.level += 1
    return block.holder.level


def in_a_class(block, mean):
    Keeping.passes += 1
    return Keeping.passes


def in_globals(block, mean):
    global COUNT
    COUNT += 1
    HISTORY.append(LEVEL.add_(1).clone())
    return HISTORY[-1] / COUNT


MOVES = [replaced, in_place, large, made, a_buffer_made, listed, in_a_list, counted, array, queued]
MOVES += [in_two_places, in_a_set, iterated, held, in_a_class, in_globals]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_recomputation_moves_no_state_in_attributes_or_globals(move, monkeypatch):
    def trained(model):
        monkeypatch.setattr(Keeping, "passes", 0)
        for name, value in {"LEVEL": torch.ones(3), "COUNT": 0, "HISTORY": []}.items():
            monkeypatch.setitem(globals(), name, value)
        return [{name: value.tolist() for name, value in gradients(model, rows).items()} for _ in range(4)]

    plain, rows = nn.Sequential(Keeping(move), Keeping(move)), torch.randn(4, 3)
    frugal = switched(copy.deepcopy(plain), activation_checkpointing=["Keeping"])
    assert trained(plain) == trained(frugal)


def test_a_block_that_is_recomputed_twice_begins_where_it_began():
    block = switched(nn.Sequential(Keeping(in_place)), activation_checkpointing=["Keeping"])
    output = block(torch.randn(4, 3)).sum()
    first, again = (torch.autograd.grad(output, block[0].weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


class Reading(nn.Linear):
    """Reads and changes values of unusual classes."""

    def __init__(self):
        super().__init__(3, 3)
        self.settings, self.frozen = Settings(gain=2.0), Frozen([])
        self.trained, self.scales = {self.weight}, Scales(3)
        self.ring = []
        self.ring.append(self.ring)
        self.total, self.shared = 0.0, [torch.zeros(3)] * 2
        self.shown = None

    def forward(self, rows):
        self.total = self.total + rows.square().mean()
        self.total += 1.0
        self.frozen.history.append(1.0)
        self.shared[0].add_(1.0)
        self.shown = rows.softmax(-1)
        gain = self.settings.gain * (self.weight in self.trained) * len(self.scales) * len(self.ring)
        return super().forward(rows).tanh() * gain / len(self.frozen.history) * self.shared[1].clone() * self.total


@dataclasses.dataclass(frozen=True)
class Frozen:
    history: list


def test_recomputation_copies_what_changes_alone():
    torch.manual_seed(0)
    plain = nn.Sequential(Reading(), Reading())
    torch.manual_seed(0)
    frugal, rows = (
        switched(nn.Sequential(Reading(), Reading()), activation_checkpointing=["Reading"]),
        torch.randn(4, 3),
    )
    for _ in range(3):
        assert_same_gradients(plain, frugal, rows)
        for block in (*plain, *frugal):
            block.total = block.total.detach()


def test_recomputation_keeps_no_step_before():
    """What a block keeps for a log has the graph of its step."""
    block, seen = switched(nn.Sequential(Shown(3, 3)), activation_checkpointing=["Shown"]), []
    for _ in range(6):
        rows = torch.randn(4, 3, requires_grad=True)
        seen.append(weakref.ref(rows))
        hidden = block(rows * 1.0)
        hidden.sum().backward()
    del rows, hidden
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= 1


class Shown(nn.Linear):
    level = None

    def forward(self, rows):
        if self.level is not None and self.level.ndim > 3:
            return rows
        self.level = rows.square().mean()
        return super().forward(rows).tanh()


class Late(nn.Linear):
    calls = 0

    def forward(self, rows):
        self.calls += 1
        return super().forward(rows) * (random.random() if self.calls > 20 else 1.0)


def test_a_block_that_begins_to_draw_is_refused():
    """Its passes are looked at at first, and then further and further apart."""
    block = switched(nn.Sequential(Late(3, 3)), activation_checkpointing=["Late"])
    for _ in range(32):  # the first to be seen may be another thread's
        gradients(block, torch.ones(1, 3))
    with pytest.raises(TaskError, match="a recomputed Late draws with NumPy or random only in some steps"):
        gradients(block, torch.ones(1, 3))


def test_a_thread_that_draws_while_a_block_runs_is_no_reason_to_refuse():
    block = switched(nn.Sequential(Late(3, 3)), activation_checkpointing=["Late"])
    for number in range(60):
        block[0].calls = 20 if number == 31 else -1000  # it draws in pass 32 alone
        gradients(block, torch.ones(1, 3))


class Elsewhere(nn.Linear):
    """Reads a state that it does not keep as plain values, or that the model moves before the backward pass."""

    def __init__(self, where):
        super().__init__(3, 3)
        self.where, self.kept, self.level = where, SimpleNamespace(calls=0), torch.ones(1)

    def forward(self, rows):
        if self.where == "an object":
            self.kept.calls += 1
        return super().forward(rows).tanh() * self.level / max(1, self.kept.calls)


@pytest.mark.parametrize("where", ["an object", "the model", ""])
def test_a_block_that_would_compute_other_numbers_again_is_refused(where):
    block = switched(nn.Sequential(Elsewhere(where)), activation_checkpointing=["Elsewhere"])
    if where == "the model":
        block[0].level = torch.ones(4096, 1)
    output = block(torch.ones(4096, 3))
    if where == "the model":
        block[0].level = torch.linspace(1.0, 2.0, 4096).round()[:, None]  # of the second half of the rows
    refused = pytest.raises(TaskError, match="a recomputed Elsewhere returns other numbers when it computes again")
    with refused if where else contextlib.nullcontext():
        output.sum().backward()
    for rows in () if where else (torch.ones(0, 3), torch.full((1, 3), torch.nan)):
        block(rows).sum().backward()


def test_channels_last_reaches_every_convolution_and_leaves_weights_alone():
    plain = layers.assemble(cnn(3, 16, 10), seed=0)
    fast = switched(copy.deepcopy(plain), channels_last=True)
    layouts = []
    for module in fast.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda _, inputs, output: layouts.append(output.is_contiguous(memory_format=torch.channels_last))
            )
    images = torch.randn(2, 3, 16, 16)
    expected, found = gradients(plain, images), gradients(fast, images)
    assert layouts == [True, True, True]
    torch.testing.assert_close(fast(images), plain(images))
    assert all(gradient.is_contiguous() for gradient in found.values()), "Horovod refuses others"
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolution_gets_batches_in_channels_last(kind):
    """A single image stays what it is: it has no such layout."""
    model, given = kind(2, 2, 3), []
    switches.channels_last(model, model)
    model.register_forward_hook(lambda _, inputs, output: given.extend(inputs))
    for images in (torch.randn(2, 2, 4, 4), torch.randn(2, 4, 4)):
        model(images)
    assert given[0].is_contiguous(memory_format=torch.channels_last)
    assert given[1].shape == (2, 4, 4)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_pool_s_gradient_has_the_layout_of_its_output(layout):
    pool, seen = nn.AvgPool2d(2), []
    switches.channels_last(pool, nn.Conv2d(2, 2, 3))
    pooled = pool(torch.randn(2, 2, 4, 4, requires_grad=True).to(memory_format=layout))
    pooled.register_hook(lambda gradient: seen.append(gradient.is_contiguous(memory_format=layout)))
    pooled.flatten(1).square().sum().backward()
    assert seen == [True]


def block(name, width):
    """A module of a class with this name, with 2 x width numbers."""
    module = type(name, (nn.Module,), {})()
    module.part = nn.Linear(width, 2, bias=False)
    return module


def test_blocks_are_the_repeated_class_with_most_numbers():
    many, few = ([block(name, width) for _ in range(count)] for name, width, count in (("M", 3, 3), ("F", 4, 2)))
    model = nn.Sequential(block("Once", 10), *many, *few)
    assert switches.repeated(model) == "M"
    few[0].part.weight.ds_numel = 100  # of which ZeRO-3 has left nothing here
    assert switches.repeated(model) == "F"


def test_a_pattern_names_the_outermost():
    parts = {"head_1": nn.ReLU(), "head_2": nn.ReLU(), "a": nn.Sequential(nn.Sequential(nn.ReLU()))}
    model = nn.ModuleDict(parts)
    assert switches.picked(model, ["head_*"], "") == ["head_1", "head_2"]
    assert switches.picked(model, ["a.0", "a.0.0"], "") == ["a.0"]


def test_every_second_block_is_counted_in_the_whole_model():
    whole = language_model()
    part = nn.ModuleDict({name: whole.get_submodule(name) for name in "34"})
    file = ds_config(4, task={"name": "a.b:C"}, model={"activation_checkpointing": {"every": 2}})
    switches.apply(part, load(file), CPU, whole)
    assert switches.units(part) == [part["4"]]


def test_embeddings_that_are_sparse_are_made_dense():
    model = nn.ModuleList(kind(3, 2, sparse=True) for kind in (nn.Embedding, nn.EmbeddingBag))
    with pytest.warns(UserWarning, match="sparse=True"):
        switches.dense(model)
    assert not any(part.sparse for part in model)


def test_a_part_that_is_compiled_by_itself_is_a_unit(monkeypatch):
    """The whole model is none. Blocks are those that the file names."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(switches, "compiler", lambda: "g++")
    model = nn.Sequential(nn.Linear(2, 2))
    for module in model.modules():
        switches.compile_(module, CPU)
    assert switches.units(model) == [model[0]]
    named = switched(language_model(), compile="blocks", activation_checkpointing=["*.norm_1"])
    assert {type(unit) for unit in switches.units(named)} == {nn.LayerNorm}


def test_weights_of_another_layout_are_made_plain():
    model = switched(layers.assemble(cnn(3, 16, 10), seed=0).to(memory_format=torch.channels_last))
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"dsframe.model.compile: .* needs a C\+\+ compiler.*; install g\+\+"):
        switched(language_model(), compile=True)
    monkeypatch.setenv("CXX", "/bin/sh")
    assert compiler() == "/bin/sh"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_checkpointing": ["Bloc"]}, "no module of class Bloc; there are .*Block \\(3\\)"),
        ({"activation_checkpointing": ["*.norm_1", "3"]}, "no module of class 3"),
        ({"activation_checkpointing": ["*.attn"]}, r"no module of the model is called \*\.attn.*\*\.expand"),
        ({"channels_last": True}, "affects 2-D convolutions only; this model has none"),
        ({"activation_checkpointing": True}, "has no repeated block"),
        ({"compile": "blocks"}, "has no repeated block"),
    ],
)
def test_what_the_model_does_not_have_is_said(settings, message):
    model = Pair() if "repeated" in message else language_model()
    with pytest.raises(ConfigError, match=message):
        switched(model, **settings)


def test_fsdp_gathers_the_blocks_that_others_recompute():
    model = nn.ModuleDict(
        {"blocks": nn.ModuleList([Pair(), Pair()]), "heads": nn.ModuleList(nn.Linear(2, 1) for _ in range(3))}
    )
    assert {type(unit) for unit in fsdp_units.named(model, [])} == {Pair}
    with pytest.raises(EngineError, match="this model has no Blok"):
        fsdp_units.named(model, ["Blok"])
    assert {type(unit) for unit in fsdp_units.named(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [])} == {nn.Linear}
    assert fsdp_units.named(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), []) == []
    no_forward = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.ones(2))]) for _ in range(2))
    assert fsdp_units.named(nn.Sequential(no_forward), []) == []
    within = fsdp_units.named(model, ["Pair", "Linear"])  # a unit leaves out what one in it has
    places = {module: place for place, module in enumerate(within)}
    assert all(
        places[part] < places[pair] for pair in model["blocks"] for part in [*pair.modules()][1:] if part in places
    )


def test_fsdp_gathers_no_blocks_that_share_a_part():
    part = nn.Linear(2, 2)
    sharing, twice = nn.Sequential(Pair(), Pair()), nn.Sequential(*[Pair()] * 2)
    sharing[0].part = sharing[1].part = part
    assert fsdp_units.named(sharing, ["Pair"]) == []
    assert fsdp_units.named(twice, ["Pair"]) == [twice[0]]
