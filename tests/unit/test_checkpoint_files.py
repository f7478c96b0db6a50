"""The format's tensors, and random generators."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dsframe.checkpoint import layout, store
from dsframe.checkpoint import writer as writer_module
from dsframe.checkpoint.byte_files import damage_of
from dsframe.checkpoint.reader import Checkpoint
from dsframe.checkpoint.resume import refuse
from dsframe.checkpoint.saver import write_small
from dsframe.checkpoint.staging import Staging
from dsframe.checkpoint.store import Store
from dsframe.checkpoint.tensor_file import write_tensors
from dsframe.checkpoint.writer import Writer
from dsframe.config import load
from dsframe.errors import CheckpointError, ConfigError
from dsframe.host import generators
from dsframe.model.persistent import aliases, compare, persistent_buffers
from dsframe.model.state import (
    WEIGHT,
    EngineState,
    LossScaleState,
    ParameterShard,
    ParameterState,
    ShardedParameters,
    TensorShard,
    full_precision,
    narrowed,
    split,
)
from dsframe.tools import export
from dsframe.tools import export as export_command
from tests.files import ds_config, read_json
from tests.threads import Room


def states(sizes):
    generator = torch.Generator().manual_seed(5)
    return [
        ParameterState(
            name,
            torch.randn(size, generator=generator),
            {key: torch.rand(size, generator=generator) for key in ("exp_avg", "exp_avg_sq")[: 1 + (name != "c")]},
            {"step": 42.0},
        )
        for name, size in sizes.items()
    ]


SIZES = {"a.weight": (40, 30), "a.bias": (40,), "scalar": (), "b.weight": (3, 5, 7), "c": (1000,), "empty": (0,)}


def shard(parameter, rank, ranks):
    """A rank's range of a parameter, as ZeRO-3 cuts."""
    count = parameter.weight.numel()
    each = -(-count // ranks)
    first, last = min(rank * each, count), min((rank + 1) * each, count)
    tensors = {WEIGHT: parameter.weight, **parameter.moments}
    ranges = {key: range_of(t.shape, first, t.flatten()[first:last]) for key, t in tensors.items()}
    return ParameterShard(parameter.name, ranges, parameter.scalars)


def range_of(shape, first, flat):
    return TensorShard(tuple(shape), full_precision(flat.dtype), first, flat.numel(), lambda: flat)


BUFFERS = {"running": torch.arange(3), "mean": torch.ones(2, dtype=torch.bfloat16)}


def state_of(rank, ranks, holds="ranges"):
    """SIZES on one rank, which ``holds`` ranges, everything, or gets each from an iterator."""
    parameters = iter(states(SIZES))
    if holds == "ranges":
        parameters = ShardedParameters([shard(each, rank, ranks) for each in parameters], [])
    elif holds == "everything":
        parameters = ShardedParameters([shard(each, 0, 1) for each in parameters], [])
    return EngineState(40, LossScaleState(512.0, 2, 42, 3), BUFFERS, {"tied": "a.weight"}, parameters)


def write(folder, ranks, file_bytes=1 << 30, holds="ranges", staged=False, state_of=state_of):
    """A checkpoint of SIZES by ``ranks`` writers."""
    whole = Store(folder)
    partial = whole.begin(42)

    def run(room):
        rank = room.plan.world.rank
        staging = Staging() if staged else None
        writer = Writer(room, state_of(rank, ranks, holds), partial, staging=staging, layout=layout.Layout(file_bytes))
        assert writer.take(state_of(rank, ranks, holds), lambda: None) == ""
        writer.flush(lambda: None)
        return writer

    writers = Room(ranks).run(run)
    assert all(writer.manifest == writers[0].manifest for writer in writers)
    words = [{"runs": writer.runs, "random": {}} for writer in writers]
    files = write_small(partial, writers[0], words, {})
    aliases = dict(state_of(0, ranks, holds).aliases)
    manifest = {"format": store.FORMAT, "step": 42, "updates": 40, "files": files, "aliases": aliases}
    scale = {"scale": 512.0, "hysteresis_left": 2, "steps": 42, "last_overflow": 3}
    return whole.commit(42, {**manifest, **writers[0].manifest, "loss_scale": scale})


@pytest.mark.parametrize("holds", ["ranges", "everything", "iterator"])
@pytest.mark.parametrize(("ranks", "file_bytes"), [(1, 1 << 30), (2, 5000), (3, 1), (7, 1 << 30)])
def test_what_is_written_is_read(tmp_path, ranks, file_bytes, holds, monkeypatch):
    monkeypatch.setattr(layout, "PIECE_BYTES", 1000)  # what all hold several write
    path = write(tmp_path, ranks, file_bytes, holds, staged=ranks > 2)
    assert store.verify(path) == []
    checkpoint = Checkpoint(path)
    assert (checkpoint.step, checkpoint.updates) == (42, 40)
    assert checkpoint.loss_scale == LossScaleState(512.0, 2, 42, 3)
    assert checkpoint.shapes == SIZES
    for expected in states(SIZES):
        found = checkpoint.parameter(expected.name)
        assert torch.equal(found.weight, expected.weight)
        assert found.moments.keys() == expected.moments.keys()
        assert all(torch.equal(found.moments[key], expected.moments[key]) for key in expected.moments)
        assert found.scalars == {"step": 42.0}
        for first in range(0, expected.weight.numel(), 97):
            size = min(150, expected.weight.numel() - first)
            part = checkpoint.part(expected.name, first, size)
            assert torch.equal(part.weight, expected.weight.flatten()[first : first + size])
            assert torch.equal(part.moments["exp_avg"], expected.moments["exp_avg"].flatten()[first : first + size])
        found.weight.zero_()  # whoever reads may write
        assert torch.equal(Checkpoint(path).parameter(expected.name).weight, expected.weight)
    assert [checkpoint.keeps(key) for key in ("exp_avg", "exp_avg_sq", "momentum")] == [True, True, False]
    assert {name: buffer.tolist() for name, buffer in checkpoint.buffers().items()} == {
        name: buffer.tolist() for name, buffer in BUFFERS.items()
    }
    assert [name for name, _ in checkpoint.weights()] == [*sorted(SIZES), "mean", "running"]
    checkpoint.close()


def test_the_files_are_the_same_whoever_wrote_them_and_others_read_them(tmp_path):
    written = [
        write(tmp_path / f"{ranks}{holds}", ranks, 5000, holds) for ranks, holds in ((1, "iterator"), (3, "ranges"))
    ]
    files = [{file.name: file.read_bytes() for file in path.glob("*.safetensors")} for path in written]
    assert files[0] == files[1]
    assert len(files[0]) > 4
    index = read_json(written[0] / "model.safetensors.index.json")["weight_map"]
    assert index.keys() == SIZES.keys() | BUFFERS.keys()
    every = {name: file.name for file in written[1].glob("model-*") for name in load_file(file)}
    assert every == index
    moments = {name: t for file in written[1].glob("optimizer-*") for name, t in load_file(file).items()}
    for each in states(SIZES):
        assert torch.equal(moments[f"exp_avg/{each.name}"], each.moments["exp_avg"])


def test_the_work_is_dealt_to_those_that_hold_the_same(monkeypatch):
    monkeypatch.setattr(layout, "PIECE_BYTES", 1000)

    def run(room):
        dealt, _ = layout.Layout().agree(room, replace(state_of(0, 1, "everything"), buffers={}))
        return sum(piece.bytes for own in dealt.pieces.values() for piece in own)

    of_ranks = Room(3).run(run)
    assert sum(of_ranks) == sum(each.bytes for each in states(SIZES))
    assert max(of_ranks) - min(of_ranks) <= 2000


@pytest.mark.parametrize("ranges", [[(0, 3), (4, 2)], [(0, 4), (3, 3)], [(0, 3), (3, 2)], [(0, 0), (0, 0)]])
def test_shards_that_do_not_make_the_whole_are_refused(ranges):
    def run(room):
        first, size = ranges[room.plan.world.rank]
        own = [ParameterShard("w", {WEIGHT: range_of([2, 3], first, torch.zeros(size))}, {})]
        with pytest.raises(CheckpointError, match=r"do not make weight/w of shape \[2, 3\]") as raised:
            layout.Layout().agree(room, EngineState(1, None, {}, {}, ShardedParameters(own, [])))
        return str(raised.value)

    assert len(set(Room(2).run(run))) == 1


def test_what_changes_between_two_saves_is_laid_out_anew():
    """Moments that appear, ranges that move on one rank alone, and buffers that come to differ between ranks."""
    weight, moment = torch.arange(8.0), torch.ones(8)
    of_each_save = [
        ({WEIGHT: weight}, 4, 0.0),
        ({WEIGHT: weight}, 4, 0.0),
        ({WEIGHT: weight, "exp_avg": moment}, 4, 0.0),
        ({WEIGHT: weight, "exp_avg": moment}, 6, 0.0),
        ({WEIGHT: weight, "exp_avg": moment}, 6, 1.0),
        ({WEIGHT: weight, "exp_avg": moment}, 8, 1.0),
        ({WEIGHT: weight, "exp_avg": moment}, 9, 1.0),  # of nothing, on the second rank alone
    ]

    def run(room):
        rank, kept, plans = room.plan.world.rank, layout.Layout(), []
        for step, (tensors, cut, other) in enumerate(of_each_save):
            first, last = (0, cut) if rank == 0 else (cut, 8)
            own = {key: range_of([8], first, tensor[first:last]) for key, tensor in tensors.items()}
            shards = ShardedParameters([ParameterShard("w", own, {"step": float(step)})], [])
            state = EngineState(step, None, {"mean": torch.tensor(rank * other)}, {}, shards)
            plan, scalars = kept.agree(room, state)
            assert (plan, scalars) == (layout.Layout().agree(room, state)[0], {"w": {"step": float(step)}})
            plans.append(plan)
        return plans

    for plans in Room(2).run(run):
        assert plans[0] is plans[1]
        assert [plan is before for before, plan in itertools.pairwise(plans)] == [True, *[False] * 5]


def test_numbers_are_those_of_the_first_rank_that_lists_the_parameter():
    """A rank without elements of it may have none."""

    def run(room):
        main = room.plan.world.is_main
        own = {WEIGHT: range_of([2], 0, torch.zeros(2 if main else 0))}
        shards = ShardedParameters([ParameterShard("w", own, {"step": 3.0} if main else {})], [])
        return layout.Layout().agree(room, EngineState(1, None, {}, {}, shards))[1]

    assert Room(2).run(run) == [{"w": {"step": 3.0}}] * 2


def test_a_tensor_that_has_to_be_gathered_is_read_by_all_and_converted_in_windows(tmp_path, monkeypatch):
    """Of 16 bits on a rank, fp32 in the file; each rank reads every one, in order, whether it writes it or not."""
    monkeypatch.setattr(writer_module, "WINDOW_BYTES", 64)
    wholes = {f"p{number}": torch.randn(100).bfloat16() for number in range(4)}

    def run(room):
        read = []

        def of(name):
            gather = lambda: read.append(name) or wholes[name]  # noqa: E731
            return ParameterShard(name, {WEIGHT: TensorShard((100,), torch.float32, 0, 100, gather, in_order=True)}, {})

        state = EngineState(1, None, {}, {}, ShardedParameters([of(name) for name in wholes], []))
        writer = Writer(room, state, tmp_path)
        assert writer.take(state, lambda: None) == ""
        writer.flush(lambda: None)
        return read

    assert Room(3).run(run) == [list(wholes)] * 3
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], whole.float()) for name, whole in wholes.items())


def test_every_kind_of_tensor_is_what_safetensors_reads(tmp_path):
    numbers = torch.arange(24)
    tensors = {"odd": torch.ones(3, dtype=torch.bool), "freqs_cis": torch.polar(torch.ones(3, 2), torch.rand(3, 2))}
    tensors |= {f"{kind} as it is": torch.ones(5, dtype=kind) for kind in (torch.uint16, torch.uint32, torch.uint64)}
    tensors |= {f"{kind}": numbers.to(kind).reshape(2, 3, 4) for kind in layout.DTYPES}
    tensors |= {
        "view": numbers.reshape(4, 6)[1:].t(),
        "every other": numbers[::2],
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
    }
    entry = write_tensors(tmp_path / "all", tensors)
    found = load_file(tmp_path / "all")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.clone().flatten().view(torch.uint8)), name
    content = (tmp_path / "all").read_bytes()
    length = int.from_bytes(content[:8], "little")
    for name, place in json.loads(content[8 : 8 + length]).items():  # aligned, for who maps the file
        assert (8 + length + place["data_offsets"][0]) % tensors[name].element_size() == 0, name
    assert damage_of(tmp_path / "all", asdict(entry), slice(None)) == ""
    with pytest.raises(CheckpointError, match=r"^wide: checkpoints do not support torch\.complex128$"):
        write_tensors(tmp_path / "wide", {"wide": torch.ones(1, dtype=torch.complex128)})


def test_after_a_failed_write_the_rank_still_takes_part(tmp_path):
    seen = []

    def stream():
        for each in states(SIZES):
            seen.append(each.name)
            yield each

    state = EngineState(1, None, {}, {}, states(SIZES))

    def take(rank):
        rank.plan.world.local_size = 0
        writer, alive = Writer(rank, state, tmp_path / "gone"), []
        assert writer._files._several_hosts
        failure = writer.take(replace(state, parameters=stream()), lambda: alive.append(1))
        assert len(alive) > len(SIZES)
        writer._files.put = Mock(side_effect=[None, None, None, OSError(28, "full"), *itertools.repeat(None, 99)])
        assert writer.take(state, lambda: None) == "full", "though the rest could be written"
        return failure

    (failure,) = Room(1).run(take)
    assert "gone" in failure
    assert "No such file" in failure
    assert seen == list(SIZES)


def test_each_rank_gets_its_own_buffers_back(tmp_path):
    def of_rank(rank, *_):
        return EngineState(40, None, {"mean": torch.tensor(float(rank % 2)), "count": torch.tensor([7])}, {}, [])

    path = write(tmp_path, 3, state_of=of_rank)
    assert store.verify(path) == []
    assert load_file(path / "buffers.safetensors").keys() == {"rank-00001/mean", "rank-00001/count"}
    assert [float(Checkpoint(path, rank).buffers()["mean"]) for rank in range(3)] == [0.0, 1.0, 0.0]


def test_every_random_generator_goes_on_where_it_was():
    def numbers():
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.random(), random.gauss(0, 1)

    np.random.randn()  # leaves a second one cached
    random.gauss(0, 1)
    kept = generators.capture(torch.device("cpu"))
    first = numbers()
    generators.restore(kept, torch.device("cpu"))
    assert numbers() == first


def test_another_model_is_named():
    own, saved = {"a": (2, 3), "b": (4,), "new": (1,)}, {"a": (3, 2), "b": (4,), "old": (1,)}
    with pytest.raises(CheckpointError) as raised:
        compare("parameter", own, saved)
    assert str(raised.value) == (
        "the checkpoint belongs to another model (parameters differ): new is new; old is gone; "
        "a has shape [2, 3], saved [3, 2]"
    )


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_leave_in_one_file(tmp_path, to, dtype):
    write(tmp_path, 2)
    out = tmp_path / "out.bin"
    assert export_command.main([str(tmp_path), "--to", to, "--dtype", dtype, "--out", str(out)]) == 0
    found = load_file(out) if to == "safetensors" else torch.load(out, weights_only=True)
    assert set(found) == {*SIZES, "mean", "running", "tied"}
    for one in states(SIZES):
        assert torch.equal(found[one.name], one.weight.to(getattr(torch, dtype)))
    assert torch.equal(found["tied"], found["a.weight"])
    assert found["running"].dtype == torch.int64
    with pytest.raises(CheckpointError, match="exists already"):
        export.export(tmp_path, to, dtype, out)


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    (write(tmp_path, 1) / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"damaged: optimizer\.safetensors: No such file"):
        export.export(tmp_path)


def test_parameters_and_buffers_of_shared_modules_have_further_names():
    """A strict ``load_state_dict`` of an export asks for each of them."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.append(model[0])
    model[0].register_buffer("again", model[0].running_mean)
    model[0].register_buffer("unsaved", model[0].running_mean, persistent=False)
    further, kept = aliases(model), {*persistent_buffers(model), *dict(model.named_parameters())}
    assert {*further, *kept} == set(model.state_dict())
    assert set(further.values()) <= kept
    assert (further["1.running_var"], further["1.bias"]) == ("0.running_var", "0.bias")


def test_what_only_the_task_and_the_disk_can_tell(tmp_path):
    config = load(ds_config(4, checkpoints={"every_steps": 1, "keep_best": "loss:min"}))
    refuse(config, "auto", evaluates=True)
    with pytest.raises(ConfigError, match="the task has no eval_data, so no checkpoint can be the best"):
        refuse(config, "auto", evaluates=False)
    with pytest.raises(CheckpointError, match=r"--resume must be .*: atuo does not exist"):
        refuse(config, "atuo", evaluates=True)
    write(tmp_path, 1)
    refuse(config, str(tmp_path), evaluates=True)


def test_state_about_a_weight_without_dimensions_has_a_range():
    """CLIP's logit_scale: ZeRO keeps it and its moments in flat tensors."""
    part = narrowed(ParameterState("scale", torch.tensor(2.5), {"exp_avg": torch.tensor(0.5)}, {"step": 2.0}), 0, 1)
    assert (part.weight.tolist(), part.moments["exp_avg"].tolist(), part.scalars) == ([2.5], [0.5], {"step": 2.0})


def test_numbers_of_torchs_optimizers_stay_numbers():
    weight = nn.Parameter(torch.tensor(1.0))
    for kind in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.RAdam, torch.optim.Rprop, torch.optim.Adagrad):
        optimizer, wide = kind([weight], lr=0.1), nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [wide]})
        weight.grad, wide.grad = torch.ones(()), torch.ones(2)
        optimizer.step()
        bare, full = split(optimizer.state[weight], ()), split(optimizer.state[wide], (2,))
        assert [list(of) for of in bare] == [list(of) for of in full], kind.__name__
