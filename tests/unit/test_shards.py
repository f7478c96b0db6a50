"""Which elements a rank holds of a sharded parameter, in FSDP and in ZeRO-3, and what it does with whole ones."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dsframe.engines.deepspeed import stage_3, state
from dsframe.engines.deepspeed.stage_3 import SHARDS, InTurn
from dsframe.engines.fsdp import FsdpShards, _ShardSlot
from dsframe.model.state import LossScaleState

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


class Piece:
    """One rank's rows, as ``fully_shard`` cuts them; the mesh has replicas in its first dimension."""

    def __init__(self, whole, rank, size):
        chunks = torch.chunk(whole, size)
        self.shape, self._local = whole.shape, chunks[rank] if rank < len(chunks) else whole[:0]
        places = {0: SimpleNamespace(size=2, rank=1), 1: SimpleNamespace(size=size, rank=rank)}
        self.device_mesh = SimpleNamespace(
            ndim=2, size=lambda at: places[at].size, get_local_rank=lambda at: places[at].rank
        )

    def to_local(self):
        return self._local.contiguous()


@given(SHAPES, st.integers(1, 5))
def test_rows_of_all_ranks_are_the_parameter(shape, size):
    whole, flat = torch.arange(1.0 * torch.Size(shape).numel()).view(shape), []
    for rank in range(size):
        piece = Piece(whole, rank, size)
        slot = _ShardSlot("a", tuple(shape), None)
        first, count = slot.span(piece)
        assert torch.equal(slot.flat(piece), whole.flatten()[first : first + count])
        flat.append(slot.flat(piece))
    assert torch.equal(torch.cat(flat), whole.flatten())


@given(SHAPES, st.integers(1, 5))
def test_ranges_of_all_ranks_are_the_parameter(shape, size):
    """Of ZeRO-3, which pads the last ones."""
    total = torch.Size(shape).numel()
    each = -(-total // size)
    parameter, pieces = torch.zeros(shape), []
    for rank in range(size):
        optimizer = SimpleNamespace(
            grad_position={7: [0, 5, each]},
            get_param_id=lambda parameter: 7,
            _get_param_partition_rank=lambda parameter, rank=rank: rank,
        )
        piece = state._piece_stage_3(optimizer, "a", parameter)
        assert (piece.name, piece.start) == ("a", 5)
        assert piece.size >= 0
        assert piece.first <= total
        pieces += range(piece.first, piece.first + piece.size)
    assert pieces == list(range(total))


@pytest.mark.parametrize("kind", ["scaler", "config"])
def test_a_loss_scale_is_put_back_as_it_was(kind):
    """Where DeepSpeed keeps it: one of its two wrappers has no hysteresis."""

    def engine():
        numbers = {"cur_scale": 1.0, "cur_hysteresis": 1, "cur_iter": 0, "last_overflow_iter": -1}
        if kind == "scaler":
            return SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=SimpleNamespace(dynamic=True, **numbers)))
        config = SimpleNamespace(dynamic_loss_scale=True, **numbers)
        return SimpleNamespace(optimizer=SimpleNamespace(loss_scale_config=config))

    given_state = LossScaleState(64.0, 2 if kind == "scaler" else 1, 9, 4)
    again = engine()
    state._put_loss_scale(again, given_state)
    assert state._loss_scale(again) == given_state
    state._put_loss_scale(again, None)
    assert state._loss_scale(again) == given_state


@pytest.mark.parametrize("kind", ["flat", "each", "own"])
def test_masters_of_zero_0_are_found_and_rounded_into_the_model(kind):
    """DeepSpeed's two wrappers for 16 bits, and none."""
    dtype = torch.float32 if kind == "own" else torch.bfloat16
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(dtype)
    model[1].bias.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = SimpleNamespace(param_groups=[{"params": trained}])
    if kind == "flat":
        flat = torch.cat([parameter.detach().flatten() for parameter in trained]).float()
        rounded = flat.to(dtype)
        start = 0
        for parameter in trained:
            parameter.data = rounded[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        optimizer = SimpleNamespace(fp16_groups=[trained], fp32_groups_flat=[flat], fp16_groups_flat=[rounded])
    elif kind == "each":
        masters = [nn.Parameter(parameter.detach().float()) for parameter in trained]
        optimizer = SimpleNamespace(fp16_groups=[trained], fp32_groups=[masters])
    slots, frozen = state._stage_0(SimpleNamespace(optimizer=optimizer), model)
    assert [slot.name for slot in slots] == ["0.weight", "0.bias", "1.weight"]
    assert [slot.name for slot in frozen] == ["1.bias"]
    with torch.no_grad():
        for number, slot in enumerate(slots):
            slot.cut(slot.master).fill_(number)
    state._round_masters_into_model(optimizer)
    assert [sorted(set(parameter.flatten().tolist())) for parameter in trained] == [[0.0], [1.0], [2.0]]


def sharded(whole, rank, ranks, status="AVAILABLE"):
    """A gathered weight as ZeRO-3 has it, with this rank's shard, padded."""
    weight = nn.Parameter(whole.clone())
    each = -(-whole.numel() // ranks)
    weight.ds_numel, weight.ds_status = whole.numel(), SimpleNamespace(name=status)
    weight.ds_process_group = SimpleNamespace(rank=lambda: rank)
    weight.ds_tensor = torch.full((each,), -1.0)
    weight.ds_tensor.ds_numel = each
    weight.ds_active_sub_modules = set()
    return weight


def test_a_gathered_weight_is_written_to_its_shards():
    whole = torch.arange(5.0)
    shards = []
    for rank in range(2):
        weight = sharded(whole, rank, 2)
        SHARDS.keep(weight)
        shards += weight.ds_tensor.tolist()
    assert shards == [0.0, 1.0, 2.0, 3.0, 4.0, -1.0]


def test_only_weights_that_no_running_module_uses_are_released():
    idle, running = sharded(torch.ones(2), 0, 1), sharded(torch.ones(2), 0, 1)
    missing = sharded(torch.ones(2), 0, 1, status="NOT_AVAILABLE")
    running.ds_active_sub_modules = {"block"}
    released = []
    for weight in (idle, running, missing):
        weight.partition = lambda param_list, has_been_updated: released.append((param_list, has_been_updated))
    stage_3.release([running, missing, idle])
    assert [[id(weight) for weight in weights] for weights, _ in released] == [[id(idle)]]
    assert [updated for _, updated in released] == [False]
    assert [SHARDS.is_whole(weight) for weight in (idle, missing)] == [True, False]


def test_a_copied_shard_is_gathered_again():
    source, target = sharded(torch.ones(2), 0, 1), sharded(torch.zeros(2), 0, 1)
    source.ds_tensor.fill_(3.0)
    released = []
    target.partition = lambda: released.append(True)
    stage_3.copy_shard(target, source)
    assert (target.ds_tensor.tolist(), released) == ([3.0, 3.0], [True])


def test_parameters_are_made_ready_one_by_one():
    model, order = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), []
    for parameter in InTurn(model, lambda parameter: order.append(("ready", id(parameter)))).parameters():
        order.append(("taken", id(parameter)))
    assert order == [(what, id(parameter)) for parameter in model.parameters() for what in ("ready", "taken")]


def test_complete_parameters_that_this_torch_does_not_show_are_not_examined():
    """Where FSDP keeps them is private to torch: another release must not refuse each model."""
    model = nn.Linear(1, 1)
    assert FsdpShards.others(model) == dict(model.named_parameters())
