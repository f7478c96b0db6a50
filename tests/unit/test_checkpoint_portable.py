"""The format's tensors, random generators, and what ranks tell each other."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor, nn

from dsframe import tasks
from dsframe.checkpoint import export, generators, portable, store
from dsframe.checkpoint.portable import Checkpoint
from dsframe.checkpoint.resume import refuse
from dsframe.checkpoint.store import Store
from dsframe.cluster.exchange import all_gather_tensor, all_gather_text, failures
from dsframe.config import load
from dsframe.config.rules import report
from dsframe.data import Loader
from dsframe.engines import state_replica
from dsframe.engines.deepspeed import state_flat
from dsframe.errors import CheckpointError, ConfigError, WorldError
from dsframe.model.state import (
    EngineState,
    LossScaleState,
    ParameterState,
    aliases,
    compare,
    narrowed,
    persistent_buffers,
    split,
)
from dsframe.tools import export as export_command


def states(sizes: dict[str, tuple[int, ...]]) -> list[ParameterState]:
    generator = torch.Generator().manual_seed(5)
    return [
        ParameterState(
            name,
            torch.randn(size, generator=generator),
            {"exp_avg": torch.randn(size, generator=generator), "exp_avg_sq": torch.rand(size, generator=generator)},
            {"step": 42.0},
        )
        for name, size in sizes.items()
    ]


SIZES = {"a.weight": (40, 30), "a.bias": (40,), "scalar": (), "b.weight": (3, 5, 7), "c": (1000,), "empty": (0,)}


def write(folder: Path, ranks: int, part_bytes: int) -> Path:
    """A checkpoint of SIZES by ``ranks`` writers, one after another."""
    whole, parts = Store(folder), {}
    partial = whole.begin(42)
    writers = []
    for rank in range(ranks):
        buffers = {"running": torch.arange(3), "mean": torch.ones(2, dtype=torch.bfloat16)}
        state = EngineState(40, LossScaleState(512.0, 2, 42, 3), buffers, {"tied": "a.weight"}, states(SIZES))
        writer, failure = portable.write_state(
            state, partial, rank, ranks, None if rank else portable.BUFFERS, part_bytes
        )
        assert failure == ""
        parts |= writer.files
        writers.append(writer)
    assert all(writer.parameters == writers[0].parameters for writer in writers)
    files = {name: {"bytes": entry.bytes, "xxh3_128": entry.xxh3_128} for name, entry in parts.items()}
    manifest = {"format": store.FORMAT, "step": 42, "updates": 40, "files": files, "parameters": writers[0].parameters}
    manifest["aliases"] = {"tied": "a.weight"}
    return whole.commit(
        42, {**manifest, "loss_scale": {"scale": 512.0, "hysteresis_left": 2, "steps": 42, "last_overflow": 3}}
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("part_bytes", [1, 5000, 1 << 30])
def test_what_is_written_is_read(tmp_path: Path, ranks: int, part_bytes: int) -> None:
    path = write(tmp_path, ranks, part_bytes)
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
    assert torch.equal(checkpoint.buffers()["running"], torch.arange(3))
    assert checkpoint.buffers()["mean"].dtype == torch.bfloat16
    assert [name for name, _ in checkpoint.weights()] == [*sorted(SIZES), "mean", "running"]
    checkpoint.close()


def test_parts_are_bounded_and_the_work_is_shared(tmp_path: Path) -> None:
    path = write(tmp_path, 2, 5000)
    sizes = {file.name: sum(t.nbytes for t in load_file(file).values()) for file in path.glob("part-*.safetensors")}
    one = max(state.bytes for state in states(SIZES))
    assert max(sizes.values()) <= max(5000, one)
    by_rank = [sum(size for name, size in sizes.items() if name.startswith(f"part-0000{rank}")) for rank in (0, 1)]
    assert abs(by_rank[0] - by_rank[1]) <= one


def test_every_kind_of_tensor_is_what_safetensors_reads(tmp_path: Path) -> None:
    numbers = torch.arange(24)
    tensors = {"odd": torch.ones(3, dtype=torch.bool), "freqs_cis": torch.polar(torch.ones(3, 2), torch.rand(3, 2))}
    tensors |= {f"{kind} as it is": torch.ones(5, dtype=kind) for kind in (torch.uint16, torch.uint32, torch.uint64)}
    tensors |= {f"{kind}": numbers.to(kind).reshape(2, 3, 4) for kind in portable.DTYPES}
    tensors |= {"view": numbers.reshape(4, 6)[1:].t(), "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}
    entry = portable.write_tensors(tmp_path / "all", tensors)
    found = load_file(tmp_path / "all")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
    content = (tmp_path / "all").read_bytes()
    length = int.from_bytes(content[:8], "little")
    for name, place in json.loads(content[8 : 8 + length]).items():  # aligned, for who maps the file
        assert (8 + length + place["data_offsets"][0]) % tensors[name].element_size() == 0, name
    assert (entry.bytes, entry.xxh3_128) == (len(content), xxhash.xxh3_128_hexdigest(content))
    with pytest.raises(CheckpointError, match=r"z: checkpoints do not support torch\.complex128"):
        portable.write_tensors(tmp_path / "other", {"z": torch.zeros(1, dtype=torch.complex128)})


def test_after_a_failed_write_the_rank_still_takes_part(tmp_path: Path) -> None:
    seen = []

    def stream() -> Any:
        for one in states(SIZES):
            seen.append(one.name)
            yield one

    gone = tmp_path / "gone"
    _, failure = portable.write_state(EngineState(1, None, {}, {}, stream()), gone, 0, 1, None, part_bytes=1)
    assert "gone" in failure or "No such file" in failure
    assert seen == list(SIZES)


def test_each_rank_gets_its_own_buffers_back(tmp_path: Path) -> None:
    mine = [{"mean": torch.tensor(float(rank)), "count": torch.tensor([7])} for rank in range(2)]
    assert portable.digest_of(mine[0]) != portable.digest_of(mine[1])
    whole, files = Store(tmp_path), {}
    partial = whole.begin(1)
    for rank, name in ((0, portable.BUFFERS), (1, portable.buffers_name(1))):
        writer, _ = portable.write_state(EngineState(1, None, mine[rank], {}, []), partial, rank, 2, name)
        files |= {name: {"bytes": entry.bytes, "xxh3_128": entry.xxh3_128} for name, entry in writer.files.items()}
    path = whole.commit(1, {"format": store.FORMAT, "step": 1, "files": files, "parameters": {}})
    assert [float(Checkpoint(path, rank).buffers()["mean"]) for rank in range(3)] == [0.0, 1.0, 0.0]


def test_a_file_without_the_tensor_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 1 << 30)
    checkpoint = Checkpoint(path)
    checkpoint.manifest["parameters"]["c"]["moments"] = ["momentum_buffer"]
    with pytest.raises(CheckpointError, match="c: "):
        checkpoint.parameter("c")
    checkpoint.manifest["parameters"]["c"]["file"] = "../other.safetensors"
    with pytest.raises(CheckpointError, match="is not one of its files"):
        checkpoint.parameter("c")
    checkpoint.close()


def test_every_random_generator_goes_on_where_it_was() -> None:
    def numbers() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.random(), random.gauss(0, 1)

    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        np.random.randn()  # leaves a second one cached
        random.gauss(0, 1)
        kept = generators.capture(torch.device("cpu"))
        first = numbers()
        torch.manual_seed(9)
        np.random.seed(9)
        random.seed(9)
        generators.restore(kept, torch.device("cpu"))
        assert numbers() == first
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@dataclass
class Room:
    """Ranks as threads."""

    size: int

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.values: list[Tensor] = [torch.zeros(0)] * self.size

    def run(self, action: Callable[[Any], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            def sum_over_ranks(values: Tensor) -> Tensor:
                self.values[rank] = values
                self.barrier.wait(10)
                total = torch.stack(self.values).sum(0)
                self.barrier.wait(10)
                return total

            plan = SimpleNamespace(world=SimpleNamespace(rank=rank, size=self.size), device=torch.device("cpu"))
            results[rank] = action(SimpleNamespace(plan=plan, sum_over_ranks=sum_over_ranks))

        threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.mark.parametrize("texts", [["", ""], ["a", ""], ["", "é€𝄞" * 50, "x" * 4001], ["\x00\xff", "abcd"]])
def test_all_ranks_hear_all(texts: list[str]) -> None:
    heard = Room(len(texts)).run(lambda ranks: all_gather_text(ranks, texts[ranks.plan.world.rank]))
    assert heard == [texts] * len(texts)


def test_all_ranks_get_all_tensors() -> None:
    """Of other shapes and dtypes, to the bit; one without elements takes the dtype of the others."""
    own = [torch.tensor([[1, -2], [3, 2**40]]), torch.tensor([]), torch.tensor([[7, 8]])]
    heard = Room(3).run(lambda ranks: all_gather_tensor(ranks, own[ranks.plan.world.rank]))
    for found in heard:
        assert [one.dtype for one in found] == [torch.int64] * 3
        assert [one.tolist() for one in found] == [one.tolist() for one in own]
    scalars = [torch.tensor(True), torch.tensor(False)]
    assert Room(2).run(lambda ranks: all_gather_tensor(ranks, scalars[ranks.plan.world.rank])) == [scalars] * 2


def test_a_failure_of_one_is_known_to_all() -> None:
    said = Room(3).run(lambda ranks: failures(ranks, "disk full" if ranks.plan.world.rank == 1 else ""))
    assert said == [["rank 1: disk full"]] * 3


def test_another_model_is_named() -> None:
    own, saved = {"a": (2, 3), "b": (4,), "new": (1,)}, {"a": (3, 2), "b": (4,), "old": (1,)}
    with pytest.raises(CheckpointError) as raised:
        compare("parameter", own, saved)
    assert str(raised.value) == (
        "the checkpoint belongs to another model (parameters differ): new is new; old is gone; "
        "a has shape [2, 3], saved [3, 2]"
    )
    many = {f"layer.{i}": (1,) for i in range(9)}
    with pytest.raises(CheckpointError, match="and 6 more"):
        compare("parameter", many, {})


def test_optimizer_entries_are_tensors_and_numbers() -> None:
    held = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "momentum_buffer": None, "count": 7}
    moments, scalars = split(held, (2,))
    assert list(moments) == ["exp_avg"]
    assert scalars == {"step": 3.0, "count": 7.0}


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_leave_in_one_file(tmp_path: Path, to: str, dtype: str) -> None:
    write(tmp_path, 2, 5000)
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


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 5000)
    (path / "part-00000-000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"damaged: part-00000-000\.safetensors: No such file"):
        export.export(tmp_path)


def test_shared_parameters_have_further_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.append(model[0])
    assert aliases(model) == {"2.weight": "0.weight", "2.bias": "0.bias"}


def test_only_persistent_buffers_are_kept() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.register_buffer("own", torch.zeros(1))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert sorted(persistent_buffers(model)) == ["0.num_batches_tracked", "0.running_mean", "0.running_var", "own"]


TINY: dict[str, dict[str, Any]] = {
    "vision": {"name": "vision", "dataset": "synthetic", "samples": 64},
    "language": {"name": "language", "layers": 1, "width": 8, "heads": 2, "context": 8, "corpus": "synthetic"},
    "causal-language-model": {
        "name": "causal-language-model",
        "model": {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2},
        "context": 8,
        "corpus": "synthetic",
        "samples": 64,
    },
    "image-classification": {
        "name": "image-classification",
        "model": {"model_type": "resnet", "embedding_size": 4, "hidden_sizes": [8], "depths": [1]},
        "dataset": "synthetic",
        "image_size": 16,
        "samples": 64,
    },
}


@pytest.mark.parametrize("name", report.METRICS)
def test_the_metrics_that_the_check_knows_are_the_tasks(name: str) -> None:
    settings = load({"train_batch_size": 4, "dsframe": {"task": TINY[name]}}).settings.task
    task = tasks.build(settings, 0)
    inputs, targets = next(Loader(task.train_data(), seed=0, micro_batch_size=4).stream())
    assert set(task.metrics(task.model()(inputs), targets)) == set(report.METRICS[name])


def test_what_only_the_task_and_the_disk_can_tell(tmp_path: Path) -> None:
    config = load({"train_batch_size": 4, "dsframe": {"checkpoints": {"every_steps": 1, "keep_best": "loss:min"}}})
    refuse(config, "auto", evaluates=True)
    with pytest.raises(ConfigError, match="the task has no eval_data, so no checkpoint can be the best"):
        refuse(config, "auto", evaluates=False)
    with pytest.raises(CheckpointError, match=r"--resume must be .*: atuo does not exist"):
        refuse(config, "atuo", evaluates=True)
    write(tmp_path, 1, 5000)
    refuse(config, str(tmp_path), evaluates=True)


def test_state_about_a_weight_without_dimensions_is_tensors_on_every_engine(tmp_path: Path) -> None:
    """CLIP's logit_scale: Adam's moments of it are 0-d as its step is, and ZeRO keeps all of them in flat tensors."""
    own, flat = nn.ParameterDict({"scale": torch.tensor(2.65), "w": torch.ones(3)}), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam(own.values(), lr=0.1)
    for number in (1.0, 2.0):
        for one in own.values():
            one.grad = torch.full_like(one, number)
        optimizer.step()
    slots = [state_replica.ParameterView(name, tuple(one.shape), one) for name, one in own.items()]
    saved = {one.name: one for one in state_replica.read(slots, [], optimizer)}
    assert sorted(saved["scale"].moments) == ["exp_avg", "exp_avg_sq"]
    assert saved["scale"].scalars == {"step": 2.0}

    def fill(of: Any) -> None:
        sharing = torch.optim.Adam([flat], lr=0.1)
        pieces = [state_flat.Piece("scale", 0, 1, 0), state_flat.Piece("w", 1, 3, 0)]
        state_flat.fill(sharing, flat, pieces, of)
        assert sharing.state[flat]["step"] == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert sharing.state[flat][key].tolist() == pytest.approx([float(saved["scale"].moments[key])] * 4)

    fill(SimpleNamespace(part=lambda name, *span: narrowed(saved[name], *span)))
    folder = Store(tmp_path)
    writer, _ = portable.write_state(EngineState(2, None, {}, {}, saved.values()), folder.begin(2), 0, 1, None)
    entry = writer.parameters["scale"]
    entry["scalars"] |= {key: float(saved["scale"].moments[key]) for key in entry["moments"]}
    entry["moments"] = []  # as written before this was so
    files = {name: {"bytes": entry.bytes, "xxh3_128": entry.xxh3_128} for name, entry in writer.files.items()}
    manifest = {"format": store.FORMAT, "step": 2, "files": files, "parameters": writer.parameters}
    checkpoint = Checkpoint(folder.commit(2, manifest))
    assert checkpoint.parameter("scale").scalars == {"step": 2.0}
    fill(checkpoint)
    checkpoint.close()


def test_numbers_of_torchs_optimizers_stay_numbers() -> None:
    weight = nn.Parameter(torch.tensor(1.0))
    for kind in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.RAdam, torch.optim.Rprop, torch.optim.Adagrad):
        optimizer, wide = kind([weight], lr=0.1), nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [wide]})
        weight.grad, wide.grad = torch.ones(()), torch.ones(2)
        optimizer.step()
        bare, full = split(optimizer.state[weight], ()), split(optimizer.state[wide], (2,))
        assert [list(of) for of in bare] == [list(of) for of in full], kind.__name__


def test_ranks_that_are_elsewhere_are_no_lengths() -> None:
    """Another exchange's numbers were taken for the length of a text, and gigabytes were allocated."""

    def exchange(ranks: Any) -> str:
        if ranks.plan.world.rank == 1:
            ranks.sum_over_ranks(torch.tensor([4e9, 3e9], dtype=torch.float64))  # words of a digest
            return ""
        with pytest.raises(WorldError, match="exchange different things"):
            all_gather_text(ranks, "text")
        return "refused"

    assert Room(2).run(exchange) == ["refused", ""]
    assert Room(2).run(lambda ranks: all_gather_text(ranks, "é" * ranks.plan.world.rank)) == [["", "é"]] * 2
