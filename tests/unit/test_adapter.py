"""An adapter trains as peft's by hand does, lies alone in checkpoints, and goes to peft and comes from it.

On other engines: tests/engines/test_groups.py.
"""

import re
import shutil
from functools import partial

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import dsframe
from dsframe import engines, tasks
from dsframe.checkpoint import store
from dsframe.cluster.exchange import all_gather_text
from dsframe.config import load
from dsframe.data import Loader, as_source
from dsframe.errors import CheckpointError, ConfigError
from dsframe.host import generators
from dsframe.model import adapter as model_adapter
from dsframe.tools import export
from dsframe.tools.compare import losses
from tests import text_files
from tests.files import ds_config, read_json, write_json
from tests.threads import Room

LLAMA = {**text_files.LLAMA, "intermediate_size": 64, "vocab_size": 256, "tie_word_embeddings": True}
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
STEPS = 20
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft 0.21.2 asks transformers 5.23


def file(run, adapter=LORA, model=LLAMA, **more):
    task = {"name": "causal-language-model", "corpus": "synthetic", "context": 16, "samples": 256, "model": model}
    settings = {"engine": "single", "steps": STEPS, "run_dir": str(run), "inherit": "torch", "log_every_steps": 1}
    settings |= {"task": task, "adapter": adapter, "eval_samples": 64, **more}
    return ds_config(8, {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, **settings)


def fit(given, **more):
    config = load(given)
    return dsframe.fit(tasks.build(config.settings.task, 0), given, **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    fit(file(run, checkpoints={"every_steps": 10, "keep_last": 9}))
    return run


def test_losses_are_those_of_peft_by_hand(trained):
    config = load(trained / "config.json")
    task = tasks.build(config.settings.task, 0)
    generators.seed(0)
    found = by_hand(peft.get_peft_model(task.model(), peft.LoraConfig(**LORA)), task)
    assert list(losses(trained).values()) == pytest.approx(found, rel=1e-6)
    assert found[-1] < found[0]


def by_hand(model, task):
    """The losses of a plain loop."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.1)
    loader = Loader(as_source(task.train_data(), 0), seed=0, micro_batch_size=8)
    found = []
    for step in range(STEPS):
        inputs, targets = next(iter(loader.micro_batches(step)))
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def test_a_base_in_4_bits_is_that_of_its_rounded_weights(tmp_path):
    """Beside peft and torch by hand, with the weights that bitsandbytes rounds to in fp32."""
    from bitsandbytes import functional

    run = tmp_path / "run"
    fit(file(run, adapter={**LORA, "base_format": "nf4"}))
    config = load(run / "config.json")
    task = tasks.build(config.settings.task, 0)
    generators.seed(0)
    plain = task.model()
    logits = plain.get_output_embeddings()
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear) and module is not logits:
            module.weight.data = functional.dequantize_4bit(
                *functional.quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=True)
            )
    expected = by_hand(peft.get_peft_model(plain, peft.LoraConfig(**LORA)), task)
    assert list(losses(run).values()) == pytest.approx(expected, rel=1e-5)
    manifest = store.read_manifest(store.locate(run)[0])
    assert all(".lora_" in name for name in manifest["parameters"])


def test_a_restart_goes_on_to_the_bit(trained, tmp_path):
    half = trained / "checkpoints" / "step-00000010"
    fit(file(tmp_path / "on"), resume=str(half))
    first, on = losses(trained), losses(tmp_path / "on")
    assert on == {step: first[step] for step in range(11, STEPS + 1)}


def test_another_base_is_refused(trained, tmp_path):
    half = str(trained / "checkpoints" / "step-00000010")
    other = {**LLAMA, "intermediate_size": 96}
    with pytest.raises(CheckpointError, match="task settings"):
        fit(file(tmp_path / "on", model=other), resume=half)
    # The same settings, and other numbers in the folder.
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        tasks.build(load(trained / "config.json").settings.task, 0).model().save_pretrained(folder)
    place = tmp_path / "model"
    place.symlink_to(folders[0])
    fit(file(tmp_path / "run", model=str(place), steps=2))
    assert dsframe.load_model(tmp_path / "run")
    place.unlink()
    place.symlink_to(folders[1])
    with pytest.raises(CheckpointError, match=r"adapter's base was .* the adapter was trained with them"):
        fit(file(tmp_path / "run", model=str(place), steps=4), resume="auto")
    with pytest.raises(CheckpointError, match="has an adapter that was trained with another base model"):
        dsframe.load_model(tmp_path / "run")


def test_an_adapter_that_counts_otherwise_is_refused(trained, here):
    """The same names and shapes: only peft's settings show it."""
    run = here / "run"
    shutil.copytree(trained, run)
    given = read_json(run / "config.json")
    given["dsframe"]["adapter"]["lora_alpha"] = 64
    write_json(run / "config.json", given)
    with pytest.raises(CheckpointError, match=r"another adapter: adapter\.lora_alpha was 16\.0, is 64"):
        dsframe.load_model(run)
    assert export.main([str(trained), "--to", "peft", "--out", "peft"]) == 0
    fit(file(here / "on", {"folder": "peft"}, steps=1))
    place = here / "peft" / "adapter_config.json"
    settings = read_json(place)
    write_json(place, {**settings, "use_rslora": True})
    with pytest.raises(CheckpointError, match=r"another adapter: adapter\.use_rslora was false, is true"):
        fit(file(here / "on", {"folder": "peft"}, steps=2), resume="auto")
    settings["alora_invocation_tokens"] = [1, 2]
    write_json(place, settings)
    with pytest.raises(ConfigError, match="has alora_invocation_tokens, which peft computes outside of the layers"):
        fit(file(here / "other", {"folder": "peft"}, steps=1))


def test_training_goes_on_from_pefts_folder(trained, here, capsys):
    assert export.main([str(trained), "--to", "peft", "--out", "peft"]) == 0
    summary = fit(file(here / "run", {"folder": "peft"}, steps=1))
    first = store.read_manifest(trained / "checkpoints" / "step-00000020")["evaluation"]["loss"]
    assert summary.metrics["loss"] == pytest.approx(first, abs=0.05)
    assert summary.metrics["loss"] != first
    with pytest.raises(CheckpointError, match="has only an adapter"):
        export.main([str(trained), "--out", "weights"])
    assert "dsframe: 896 parameters of an adapter (lora) train, 26,784 are frozen" in capsys.readouterr().err
    place, other = here / "peft" / "adapter_config.json", file(here / "other", {"folder": "peft"}, steps=1)
    settings = read_json(place)
    for wrong, said in (
        ({"init_lora_weights": "pissa_niter_4"}, "with which peft loads another base each time"),
        ({"peft_type": "NOVEL"}, "cannot be read"),
        ({"init_lora_weights": "loftq", "loftq_config": {}}, "peft refuses it|cannot be read"),  # something is missing
    ):
        write_json(place, settings | wrong)
        with pytest.raises(ConfigError, match=said):
            fit(other)
    write_json(place, settings)
    saved = load_file(here / "peft" / "adapter_model.safetensors")
    first = next(iter(saved))
    for others in ({first: saved[first][:-1].clone()}, {}):  # of another shape, and gone
        save_file({**dict(list(saved.items())[1:]), **others}, here / "peft" / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=rf"is an adapter of another model: {re.escape(first)} differs"):
            fit(other)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"target_modules": ["q_proj", "v_prj"]}, 'target_modules: the model has no module "v_prj"; write "v_proj"'),
        ({"modules_to_save": ["classifier"]}, 'modules_to_save: the model has no module "classifier"'),
        ({"folder": "/nowhere", "r": 4}, r"dsframe\.adapter\.r: the adapter of the folder says it"),
    ],
)
def test_mistakes(adapter, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        fit(file(tmp_path / "run", adapter))
    assert not list(tmp_path.rglob("step-*"))


def test_4_bits_are_refused_where_they_cannot_be(tmp_path):
    given = file(tmp_path / "run", adapter={**LORA, "base_format": "nf4"})
    config = load({**given, "dsframe": {**given["dsframe"], "engine": "fsdp"}})
    refused, _ = engines.examine(config, "fsdp")
    assert [(one.path, one.message) for one in refused] == [
        ("dsframe.adapter.base_format", "a base in 4 bits is not supported by engine fsdp")
    ]


class Mixed(nn.Module):
    """Linear layers of every kind: two that share a weight, a frozen one, one that trains, one that gives logits."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.frozen, self.trained, self.head = (nn.Linear(64, 64) for _ in range(5))
        self.again.weight = self.first.weight
        self.requires_grad_(False)
        self.trained.weight.requires_grad_(True)

    def get_output_embeddings(self):
        return self.head


def test_4_bits_are_for_frozen_weights_of_one_layer(tmp_path):
    config, model = load(file(tmp_path, adapter={**LORA, "base_format": "nf4"})), Mixed()
    bias = model.frozen.bias
    model_adapter.quantise(config, model, torch.float32)
    assert [name for name, layer in model.named_children() if type(layer) is not nn.Linear] == ["frozen"]
    assert torch.equal(model.frozen.bias, bias)


def test_the_base_is_what_is_frozen_and_no_part_of_the_adapter():
    own = ("a.lora_A.default.weight", "a.lora_embedding_A.default", "a.modules_to_save.default.bias")
    assert all(model_adapter.is_adapters(name) for name in own)
    assert not any(map(model_adapter.is_adapters, ("default.weight", "a.default.weight", "a.lora_A.weight")))


def test_ranks_share_the_work_of_a_digest_of_the_base(tmp_path):
    """Without a part of it, a base with other numbers there would be taken."""
    config, models = load(file(tmp_path)), [Mixed() for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    whole = model_adapter.digest_of(models[2])

    def settled(ranks):
        rank = ranks.plan.world.rank
        exchange = partial(all_gather_text, ranks)
        return model_adapter.settle_adapter(config, models[rank], "", (rank, 2), exchange, lambda _: None).digest

    assert Room(2).run(settled) == [whole] * 2


def test_a_new_head_is_trained_whole(here):
    """``modules_to_save``."""
    given = file(here / "run", {**LORA, "modules_to_save": ["model.norm"]}, steps=3)
    fit(given)
    (path,) = store.locate(here / "run")
    names = list(store.read_manifest(path)["parameters"])
    assert "model.norm.modules_to_save.default.weight" in names
    assert len(names) == 9
    assert export.main([str(path), "--to", "peft", "--out", "peft"]) == 0
    assert "base_model.model.model.norm.weight" in load_file(here / "peft" / "adapter_model.safetensors")


def test_what_a_group_freezes_of_the_adapter_is_saved(here):
    """It was taken for the base: an export for peft had half of the matrices."""
    groups = [{"match": ["*.lora_A.*"], "freeze": True}]
    fit(file(here / "run", parameter_groups=groups, steps=2))
    assert export.main(["run", "--to", "peft", "--out", "peft"]) == 0
    assert len(load_file(here / "peft" / "adapter_model.safetensors")) == 8
    assert dsframe.load_model(here / "run")


def test_the_new_heads_of_any_classifier_are_trained_whole():
    sizes = {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 8, 16], "num_labels": 16}
    swift = transformers.SwiftFormerForImageClassification(transformers.SwiftFormerConfig(**sizes))
    assert model_adapter._heads(swift) == ["head", "dist_head"]
    assert model_adapter._heads(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))) == []


def test_a_checkpoint_without_an_adapter_has_no_base():
    model_adapter.compare({"training": {}}, "digest", "here")


def test_others_load_an_adapter_by_the_class_of_its_model():
    model = type("LlamaForQuestionAnswering", (nn.Module,), {})()
    assert model_adapter._task_type(model) == "QUESTION_ANS"
