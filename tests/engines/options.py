"""What test_options.py runs on two ranks: settings of DDP and FSDP do what they say, each engine beside the others.

    python -m tests.engines.options

One process group serves all engines, because a rendezvous is good for one only.
"""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from dsframe import engines
from dsframe.cluster import process_group
from dsframe.cluster import world as worlds
from dsframe.config import Facts, load
from dsframe.errors import EngineError
from dsframe.model import optimizers, schedules
from dsframe.model.micro_batch import MicroBatch
from dsframe.model.plan import Plan
from dsframe.tasks import Task
from dsframe.train import leave_at_once
from tests.communication import Communication
from tests.engines.snapshot import Snapshot

HERE, STEPS, ROWS = worlds.here(), 5, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(13), nn.Linear(13, 31), nn.Linear(31, 13)

    def forward(self, stream):
        return stream + self.narrow(torch.tanh(self.wide(self.norm(stream))))


class Idle(nn.Linear):
    """A unit that no forward pass comes to."""


class Parts(nn.Module):
    """Everything that is hard to cut: sizes that nothing divides, tied weights, a frozen one, and ones that are not used."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(29, 13)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].norm.weight.requires_grad_(False)
        self.head = nn.Linear(13, 29, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.first_rank_only, self.nobody = nn.Linear(13, 13), Idle(13, 5)
        self.register_buffer("mask", torch.ones(13, dtype=torch.bool))

    def forward(self, tokens):
        stream = self.table(tokens) * self.mask
        for block in self.blocks:
            stream = block(stream)
        if HERE.rank == 0:
            stream = stream + self.first_rank_only(stream)
        return self.head(stream * self.scale)


class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(29, 13), Block(), Block(), nn.Linear(13, 29))


class Wide(nn.Sequential):
    """Eight layers of 1 MiB, and two that are little beside them."""

    def __init__(self):
        same = [nn.Linear(512, 512, bias=False) for _ in range(8)]
        super().__init__(nn.Embedding(29, 512), *same, nn.Linear(512, 29))


class Next(Task):
    def __init__(self, make, *arguments):
        self.make, self.arguments = make, arguments

    def model(self):
        return self.make(*self.arguments)

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def make(task, engine, **settings):
    file = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "dsframe": {"engine": engine, engine: settings},
    }
    config = load(file).resolve(Facts(HERE.size, replicas=True))
    optimizer, rates = optimizers.read(config), schedules.constant(0.01)
    plan = Plan(config, HERE, task, optimizer, rates, config.batch(HERE.size), process_group.device_of(HERE))
    return engines.load(engine, config)(plan)


def batches(step):
    tokens = torch.randint(29, (2, HERE.size, ROWS // 2 // HERE.size, 7), generator=torch.Generator().manual_seed(step))
    for micro in tokens:
        yield micro[HERE.rank], micro[HERE.rank].roll(1)


def steps(engine, first=0):
    """Loss and gradient norm of each step."""
    found = []
    for step in range(first, first + STEPS):
        result = engine.train_step(MicroBatch.of(batches(step)))
        assert result.gradient_norm is not None
        loss = engine.sum_over_ranks(result.loss.double().reshape(1))
        found += [float(loss) / HERE.size, float(result.gradient_norm)]
    return found


def far(left, right):
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def traffic(engine):
    """Collectives of gradients in one step, and their bytes."""
    with Communication() as sent:
        engine.train_step(MicroBatch.of(batches(99)))
    kinds = [sent.by_kind[kind] for kind in ("all-reduce", "reduce-scatter") if kind in sent.by_kind]
    compared = int(engine.built.calls is not None)  # one more, for the modules that ranks have called
    return sum(one.calls for one in kinds) - compared, sum(one.payload_bytes for one in kinds)


def refusal(task, **settings):
    try:
        make(task, "fsdp", **settings)
    except EngineError as error:
        return str(error)
    raise AssertionError(f"nothing was refused: {settings}")


def check_fsdp():
    ddp = make(Next(Parts), "ddp")
    before, expected, after = Snapshot(ddp.state()), steps(ddp), Snapshot(ddp.state())
    for settings in (
        {},
        {"wrap": ["Block", "Embedding", "Idle"], "offload": "cpu", "reshard_after_forward": False},
        {"sharding": "hybrid", "shard_size": 1},
    ):
        fsdp = make(Next(Parts), "fsdp", **settings)
        model = fsdp.model
        assert far(steps(fsdp), expected) < 2e-6, settings
        assert dict(fsdp.state().aliases) == {"head.weight": "table.weight"}
        assert model.head.weight is model.table.weight
        own = Snapshot(fsdp.state())
        assert list(own.shapes) == list(after.shapes)
        for name in after.shapes:
            assert (own.parameter(name).weight - after.parameter(name).weight).abs().max() < 2e-6, name
        frozen = "blocks.1.norm.weight"
        assert own.parameter(frozen).weight.equal(before.parameter(frozen).weight)
        if "sharding" not in settings:
            held = [(p.numel(), p.to_local().numel(), p.shape[0]) for p in model.parameters()]
            assert all(
                local in (whole // rows * (rows // 2), whole // rows * -(-rows // 2)) for whole, local, rows in held
            )
    assert refusal(Next(Parts), wrap=["Blok"]).startswith(
        "fsdp.wrap: this model has no Blok with a forward(); it has Linear (8), "
    )


def check_ddp():
    def plain(**settings):
        engine = make(Next(Plain), "ddp", **settings)
        return engine, steps(engine)

    engine, expected = plain()
    calls, payload = traffic(engine)
    assert calls == 1
    wide = make(Next(Wide), "ddp")
    steps(wide)  # in steps 1, 2, 4, ... ranks also compare which parameters the loss uses
    assert traffic(wide)[0] == 4, "most leave while the backward pass runs"
    for kind in ("fp16", "bf16"):
        engine, losses = plain(communication=kind)
        assert 1e-7 < far(losses, expected) < 2e-3, kind
        assert traffic(engine) == (1, payload / 2), kind


def main():
    torch.set_num_threads(1)
    process_group.open_process_group(HERE, process_group.device_of(HERE))
    with mock.patch.object(process_group, "open_process_group"):
        check_fsdp()
        check_ddp()
    dist.barrier()
    if HERE.is_main:
        print("all options do what they say")
    leave_at_once(0)


if __name__ == "__main__":
    main()
