"""``dsframe plan``: against numbers that others have published, and against arithmetic that can be done by hand."""

import json
import re

import pytest
import torch

from dsframe import tasks
from dsframe.cli import main
from dsframe.config import load
from dsframe.config.resolve.memory import moments
from dsframe.errors import TaskError
from dsframe.model import switches
from dsframe.tasks.meta import example
from dsframe.tools.plan import choose
from dsframe.tools.plan.device import Device, gpu, this_machine
from dsframe.tools.plan.footprint import predict
from dsframe.tools.plan.meta import model_of
from dsframe.tools.plan.model import Affine, Model, trace, traced
from tests.files import ds_config, write_json, zero
from tests.lines import Line

GPU, CPU = gpu(80e9), Device("any", float("inf"), on_cpu=True)
ADAM = {"type": "Adam", "params": {"lr": 1e-4}}


def plan(folder, file, capsys, *arguments):
    path = folder / "file.json"
    write_json(path, file)
    assert main(["plan", "--config", str(path), "--format", "json", *arguments]) in (0, 1)
    return json.loads(capsys.readouterr().out)


# Rajbhandari et al. 2020, arXiv 1910.02054: figure 1 and table 1, GB a device with Adam in fp16 (K = 12), and 24 GB for GPT-2's
# 1.5 billion parameters (section 3.1); as printed there, cut or rounded to the digits that are given.
ZERO_TABLE = [
    (7.5e9, 64, (31.4, 16.6, 1.88)),
    (7.5e9, 1024, (30.1, 15.1, 0.12)),
    (128e9, 1024, (513, 257, 2)),
    (1e12, 1024, (4011, 2013, 15.6)),
    (1.5e9, 1, (24, 24, 24)),
]


@pytest.mark.parametrize(
    ("optimizer", "count"),
    [({"type": "Lamb"}, 2), ({"type": "AdamW"}, 2), ({"type": "Lion"}, 1), ({"type": "SGD"}, 0),
     ({"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}, 1)],
)  # fmt: skip
def test_numbers_that_an_optimizer_keeps_for_each_parameter(optimizer, count):
    assert moments(load(ds_config(8, optimizer)).deepspeed) == count


def test_the_table_of_the_zero_paper(tmp_path, capsys):
    file = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM}
    worlds = sorted({ranks for _, ranks, _ in ZERO_TABLE})
    found = {}
    for size in sorted({size for size, _, _ in ZERO_TABLE}):
        for stage in (0, 1, 2, 3):
            kind = "fp16" if stage else "bf16"  # which fills as much; fp16 at stage 0 is refused
            staged = file | {kind: {"enabled": True}, "zero_optimization": {"stage": stage}}
            arguments = ["-np", ",".join(map(str, worlds)), "--parameters", f"{size / 1e9}B", "--gpu-memory", "32GB"]
            for world in plan(tmp_path, staged, capsys, *arguments)["worlds"]:
                found[size, world["world_size"], stage] = world["as_written"]["memory_bytes"]["states"] / 1e9
    assert found[7.5e9, 64, 0] == pytest.approx(120)
    for size, ranks, row in ZERO_TABLE:
        for stage, printed in enumerate(row, start=1):
            assert found[size, ranks, stage] == pytest.approx(printed, rel=0.006, abs=0.006), (size, ranks, stage)


@pytest.mark.parametrize(
    ("task", "layer"),
    [({"name": "language", "layers": 2}, "2."), ({"name": "vision", "dataset": "synthetic"}, "0.")],
    ids=["layers", "whole"],
)
def test_frozen_groups_have_neither_gradients_nor_moments(task, layer):
    """Layers that are the same but for that are told apart."""
    settings = {"task": task, "parameter_groups": [{"match": [f"{layer}*"], "freeze": True}]}
    config = load(ds_config(2, **settings))
    built = tasks.build(config.settings.task, 0)
    sizes = {name: parameter.numel() for name, parameter in built.model().named_parameters()}
    frozen = sum(size for name, size in sizes.items() if name.startswith(layer))
    known, whole = traced(config, built), trace(built, torch.float32)
    assert (known.frozen, known.parameters) == (frozen, sum(sizes.values()) - frozen)
    assert (whole.frozen, whole.parameters) == (0, sum(sizes.values()))


@pytest.mark.parametrize("again", [False, True])
def test_what_a_block_keeps_is_what_torch_keeps(again):
    """Activations counted without memory, and by torch's own hooks on real tensors."""
    config = load(ds_config(1, task={"name": "language", "layers": 2}, model={"activation_checkpointing": again}))
    task = tasks.build(config.settings.task, 0)
    known = trace(task, torch.float32)
    network = task.model()
    switches.apply(network, config, torch.device("cpu"))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept.setdefault(storage.data_ptr(), (storage, [*tensor.shape[-1:]] == [task.hidden_size]))
        return tensor

    rows = 3
    tokens = torch.zeros(rows, 128, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        task.loss(network(tokens), tokens)
    counted = known.recomputed if again else known
    for sizes, wide in ((counted.saved, False), (counted.saved_wide, True)):
        real = sum(storage.nbytes() for storage, is_wide in kept.values() if is_wide >= wide)
        assert sizes.at(rows) == pytest.approx(real, rel=0.03)


def test_autocast_keeps_copies_of_weights_in_16_bits():
    sections = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    config = load(ds_config(1, sections=sections, task={"name": "language", "layers": 2}))
    task = tasks.build(config.settings.task, 0)
    mixed, short = traced(config, task), trace(task, torch.bfloat16)
    for one, other in ((mixed, short), (mixed.recomputed, short.recomputed)):
        assert (one.bytes_each, one.saved.fixed - other.saved.fixed) == (4, 2 * one.parameters)


def test_the_base_of_an_adapter_is_frozen():
    llama = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    task = {"name": "causal-language-model", "model": llama | {"num_hidden_layers": 1}, "context": 64}
    config = load(ds_config(1, task=task, adapter={"type": "lora", "r": 2, "target_modules": ["q_proj"]}))
    known = traced(config, tasks.build(config.settings.task, 0))
    assert known.parameters == 2 * 2 * 32 < known.frozen


def test_several_models_have_no_plan():
    task = tasks.Task()
    task.models = lambda: {"one": torch.nn.Identity}
    with pytest.raises(TaskError, match="Task has several models"):
        model_of(task, torch.float32)


class Prepared(Line):
    times = 0

    def prepare(self, say):
        self.times += 1


def test_data_that_a_task_prepares_are_there_before_it_is_planned(tmp_path, monkeypatch):
    monkeypatch.setenv("DSFRAME_DATA", str(tmp_path))
    task = Prepared()
    example(task)
    assert task.times == 1
    example(task, prepared=True)
    assert task.times == 1, "a run has prepared them"


# Layers, heads, width; samples a step; processes, memory of a device; what is to come first; whether the file fits as it is.
ADVICE = [
    ((4, 8, 512), 32, 1, "80GB", "one process", True),
    ((32, 32, 4096), 32, 1, "24GB", "ZeRO-2, optimizer on the CPU, blocks computed twice", False),
    ((4, 8, 512), 64, 8, "80GB", "DDP", True),
    ((10, 80, 10240), 256, 8, "80GB", "ZeRO-2", False),
    ((20, 128, 16384), 512, 8, "80GB", "ZeRO-3, optimizer on the CPU", False),
    ((20, 128, 16384), 512, 1, "3GB", None, False),
    ((4, 96, 12288), 1, 1, "12GB", "ZeRO-3, all on the CPU", False),
]


@pytest.mark.parametrize(("shape", "samples", "ranks", "memory", "first", "fits"), ADVICE)
def test_advice(
    shape, samples, ranks, memory, first, fits, here,
    capsys,
):  # fmt: skip
    """What experts do: nothing where the model fits; shards, then the host's memory; each file can be loaded."""
    layers, heads, width = shape
    task = {"name": "language", "layers": layers, "heads": heads, "width": width, "context": 2048}
    file = {
        "train_batch_size": samples,
        "bf16": {"enabled": True},
        "optimizer": ADAM,
        "zero_optimization": {"stage": 1},
    }
    file["dsframe"] = {"task": task | {"tie_embeddings": False}}
    (world,) = plan(here, file, capsys, "-np", str(ranks), "--gpu-memory", memory)["worlds"]
    assert world["as_written"]["fits"] == fits
    fitting = [strategy for strategy in world["strategies"] if strategy["fits"]]
    assert [strategy["name"] for strategy in fitting[:1]] == ([first] if first else [])
    for strategy in fitting[:3]:
        load(strategy["file"])
    if layers <= 4 or first is None:
        main(["plan", "--config", "file.json", "-np", str(ranks), "--gpu-memory", memory])
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith("nothing fits: ") and "; take" in line for line in lines) == (first is None)


def test_the_plan_knows_what_is_recomputed_and_what_waits_on_the_host():
    """Of a list of layers and of a model in one piece; all blocks keep less than every second one."""
    llama = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    for task in (
        {"name": "language", "layers": 4, "heads": 4, "width": 32, "context": 64},
        {"name": "causal-language-model", "model": {**llama, "num_attention_heads": 4}, "context": 64},
    ):
        activations = []
        for switch in ({}, {"activation_checkpointing": {"every": 2}}, {"activation_checkpointing": {"every": 1}}):
            config = load(ds_config(64, task=task, model=switch))
            known = traced(config, tasks.build(config.settings.task, 1))
            activations.append(predict(config, "ddp", known, GPU, 1).memory.activations)
        assert activations == sorted(set(activations), reverse=True)
        assert known.block < known.parameters / 2, "ZeRO-3 gathers a recomputed block, not the model"


@pytest.mark.parametrize("beginning", ["own", "text"])
def test_the_plan_agrees_with_itself_on_what_init_writes(beginning, here, capsys, monkeypatch):
    """It said "as written: yes" and then "nothing fits": a ConfigError of a variant was swallowed."""
    assert main(["init", "first", "--from", beginning]) == 0
    monkeypatch.chdir(here / "first")
    capsys.readouterr()
    assert main(["plan", "--config", "config.json", "-np", "2", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"as written .* yes ", line) for line in lines), lines
    assert not any(line.startswith("nothing fits") for line in lines)
    assert any(re.match(r"DDP .* yes ", line) for line in lines), lines


def test_a_plan_of_no_task_says_what_it_planned(tmp_path, capsys):
    path = tmp_path / "file.json"
    write_json(path, ds_config(8, ADAM))
    main(["plan", "--config", str(path)])
    assert f'{path}: note: no "task" in "dsframe": unless a program gives its own' in capsys.readouterr().out


MODEL = Model(1000, 4, 100, largest=50, block=200, buffer_bytes=8, saved=Affine(0, 100), saved_wide=Affine(0, 20),
              scratch=Affine(0, 10), inputs=Affine(0, 4))  # fmt: skip
ONE_BY_ONE = {"train_micro_batch_size_per_gpu": 1}
ON_DRIVE = {"device": "nvme", "nvme_path": "/x"}
MODULES = {"overlap_comm": True, "reduce_bucket_size": 100}
MODULES |= {"stage3_max_live_parameters": 10, "stage3_prefetch_bucket_size": 10}
SPLIT = {"tensor_parallel": {"autotp_size": 2}}
COMPILED = {"dsframe": {"model": {"compile": "blocks"}}}
OFFLOADED = {"reduce_bucket_size": 100, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("engine", "file", "what", "size"),
    [
        ("ddp", {}, "buffers", 4 * 10 + 8),
        ("ddp", ONE_BY_ONE, "buffers", 10 + 8 + 4000),  # the first of several micro-batches has gradients of its own
        ("ddp", {"dsframe": {"eval_micro_batch_size": 100}}, "activations", 2 * 10 * 100),
        ("fsdp", {}, "gradients", 1000),
        ("fsdp", ONE_BY_ONE, "gradients", 4000),
        ("deepspeed", zero(1), "buffers", 48 + 4000),  # a bucket holds the gradients
        ("deepspeed", zero(2), "buffers", 48 + 8000),
        ("deepspeed", zero(2) | {"communication_data_type": "fp16"}, "buffers", 48 + 4000 + 2000),
        ("deepspeed", zero(2, reduce_bucket_size=100), "buffers", 48 + 400 + (1000 - 4 * 104)),  # a shard at the update
        ("deepspeed", zero(2, **OFFLOADED), "buffers", 48 + 400 + 400),
        (
            "deepspeed",
            zero(2, offload_optimizer=ON_DRIVE),
            "host",
            (12 + 4 + 4) * 250,
        ),  # stage 2 takes the CPU for NVMe
        ("deepspeed", zero(3, **MODULES), "buffers", 48 + 400 + (1000 - 4 * 104) + 2 * 4 * 50),
        ("deepspeed", zero(3, **MODULES) | COMPILED, "buffers", 48 + 400 + (1000 - 4 * 104) + 2 * 4 * 200),
        (
            "deepspeed",
            zero(3, **MODULES) | SPLIT,
            "buffers",
            2 * 500 * 4,
        ),  # layers are split when all are on the device
        ("deepspeed", zero(3, offload_param={"device": "cpu"}), "host", 1000 + 100),
        ("deepspeed", zero(3, offload_param=ON_DRIVE), "host", 0),
        ("deepspeed", ONE_BY_ONE | {"pipeline": {"stages": 2}}, "activations", 2 * (100 / 2 + 4)),
    ],
)
def test_the_memory_of_a_rank_by_hand(engine, file, what, size):
    """Four samples of each of four ranks."""
    config = load(ds_config(16, ADAM, sections=file))
    assert getattr(predict(config, engine, MODEL, GPU, 4).memory, what) == size


@pytest.mark.parametrize("device", [GPU, CPU])
def test_the_copy_of_a_save_in_the_background_counts(device):
    """On the host of a GPU, and in a CPU's own memory: weights and two moments in fp32, a rank's share of them."""
    held = []
    for asynchronous in (False, True):
        config = load(ds_config(16, ADAM, sections=zero(3), checkpoints={"asynchronous": asynchronous}))
        memory = predict(config, "deepspeed", MODEL, device, 4).memory
        held.append(memory.total + memory.host)
    assert held[1] - held[0] == 12 * 1000 / 4


def test_the_host_of_a_gpu_may_be_too_small():
    config = load(ds_config(16, ADAM, sections=zero(2, **OFFLOADED)))
    found = predict(config, "deepspeed", MODEL, Device("GPU", 1e12, 2500.0), 4)
    assert (found.fullness, found.fits, found.tight) == (2, False, False)


def test_what_fits_tightly_comes_after_what_fits_and_files_do_not_split_the_model():
    config = load(ds_config(16, ADAM, sections={"tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 1}}))
    model = Model(10_000_000, 4)
    plans = [choose.plan(config, model, Device("GPU", size), 4) for size in (1e9, 165e6)]
    roomy, tight = ([strategy.name for strategy in each.strategies] for each in plans)
    assert roomy[:6] == ["DDP", "Horovod", "FSDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert roomy[6:] == [f"ZeRO-{what} on the CPU" for what in ("2, optimizer", "3, optimizer", "3, all")]
    missing = [found for found in (each.prediction for each in plans[1].strategies) if not found.fits]
    assert [found.fullness for found in missing] == sorted(found.fullness for found in missing)
    assert missing[0].fullness < missing[-1].fullness
    assert tight[:3] == ["FSDP", "ZeRO-2, optimizer on the CPU", "DDP"]
    assert not any(strategy.file.keys() & {"tensor_parallel", "pipeline"} for strategy in plans[0].strategies[3:])
    assert [choose._divisors(number) for number in (24, 1024)] == [[1, 2, 4, 8, 24], [1, 2, 4, 8, 16, 1024]]


def test_a_strategy_keeps_the_global_batch_and_the_files_other_keys():
    config = load(ds_config(18, ADAM, sections={"pipeline": {"stages": 2}}, model={"compile": "blocks"}))
    refused = choose.plan(config, Model(1000, 4), GPU, 4).refused
    assert "18 samples a step cannot be divided among 4 processes" in refused["DDP"]
    assert choose._recomputing(config)["dsframe"]["model"] == {"compile": "blocks", "activation_checkpointing": True}


def test_memory_is_shared_among_the_processes_of_a_machine(monkeypatch):
    one, two = this_machine(1), this_machine(2)
    assert two.memory_bytes == one.memory_bytes / 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (70, 80))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    device = this_machine(2)
    assert (device.memory_bytes, device.base_bytes) == (80, 10)
    assert device.host_memory_bytes == this_machine(8).host_memory_bytes * 2


def test_the_answer_is_of_all_numbers_of_processes(tmp_path, capsys):
    path = tmp_path / "file.json"
    hub = {"name": "a:B", "options": {"hub_token": "hf_secret"}}
    write_json(path, ds_config(8, ADAM, sections=zero(1), task=hub))
    words = ["plan", "--config", str(path), "--parameters", "1B", "--gpu-memory", "16GB", "-np"]
    assert [main([*words, counts]) for counts in ("8", "1,8", "1")] == [0, 1, 1]
    lines = capsys.readouterr().out.splitlines()
    assert "hf_secret" not in json.dumps(plan(tmp_path, json.loads(path.read_text()), capsys, *words[3:], "8"))
    assert re.match(r"as written .* yes +12\.1 ", lines[5]), lines
    with pytest.raises(SystemExit):
        main([*words, "0,1"])
