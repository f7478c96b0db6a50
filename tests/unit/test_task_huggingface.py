"""Hugging Face models as tasks: their names, their loss, their tokenizers; local folders, and never the network."""

import gzip
import importlib.util
import json
import math
import os
import shutil
import socket
import unicodedata

import numpy as np
import pytest
import torch

import dsframe
from dsframe import cli
from dsframe.checkpoint import pretrained, store
from dsframe.config import load
from dsframe.config.schema.settings import CausalLanguageModelTask as TextSettings
from dsframe.config.schema.settings import ImageClassificationTask as ImageSettings
from dsframe.data import Loader
from dsframe.data.text import read_corpus
from dsframe.errors import CheckpointError, DataError, TaskError
from dsframe.host.restored import restored
from dsframe.run import execute
from dsframe.tasks import _transformers, build, experts, huggingface
from dsframe.tasks.huggingface import ImageClassificationTask
from dsframe.tasks.task import TaskContext
from dsframe.tools import export
from dsframe.training.predictions import rows_of
from tests.files import ds_config, read_json, write_json
from tests.lines import Line
from tests.text_files import LLAMA
from tests.text_files import tokenizer as text_tokenizer
from tests.threads import Room

VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """A cache of its own, and no way to the network."""
    monkeypatch.setenv("DSFRAME_DATA", str(tmp_path / "cache"))

    def refuse(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def language(seed=1, **fields):
    section = {"name": "causal-language-model", "model": LLAMA, "context": 16, "corpus": "synthetic", **fields}
    return build(TextSettings.model_validate(section), seed)


def classifier(**fields):
    section = {"name": "image-classification", "model": VIT, "dataset": "synthetic", "image_size": 16, "samples": 64}
    return build(ImageSettings.model_validate({**section, **fields}), seed=1)


def made(task, seed=0):
    torch.manual_seed(seed)
    return task.model()


def test_the_loss_is_their_own():
    task = language(model={**LLAMA, "max_position_embeddings": 16})
    model = made(task)
    windows = torch.randint(256, (3, 17))
    theirs = model(windows, labels=windows).loss
    inputs, targets = windows[:, :-1], windows[:, 1:]
    outputs = model(inputs)
    torch.testing.assert_close(task.loss(outputs, targets), theirs)
    metrics = task.metrics(outputs, targets)
    assert metrics["loss"].mean == pytest.approx(theirs.item())
    assert metrics["bits_per_token"].mean == pytest.approx(theirs.item() / math.log(2))
    assert metrics["accuracy"].count == 48
    assert list(outputs) == ["logits"], "nothing is kept for generation"
    assert (task.hidden_size, task.units_per_sample, task.unit) == (32, 16, "tokens")


def test_a_cache_is_no_prediction():
    kind = _transformers.transformers().modeling_outputs.CausalLMOutputWithPast
    outputs = kind(logits=torch.ones(2, 3), past_key_values=((torch.ones(1),),))
    assert rows_of(dsframe.Task(), outputs, None, 2) == [{"logits": [1.0] * 3}] * 2


def mixture():
    settings = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    return language(model={**LLAMA, "model_type": "mixtral", **settings})


def test_a_mixture_of_experts_pays_for_uneven_use():
    """In training; an evaluation is of the language model. Each expert's share of the tokens is logged."""
    task = mixture()
    model = made(task)
    windows = torch.randint(256, (2, 17))
    outputs, targets = model(windows[:, :-1]), windows[:, 1:]
    weighted = task.pretrained_config.router_aux_loss_coef * outputs.aux_loss
    alone = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())
    loss, loads = task.loss(outputs, targets)
    torch.testing.assert_close(loss, alone + weighted)
    assert list(loads) == [f"expert_load/{index}" for index in range(4)]
    assert sum(load.mean for load in loads.values()) == pytest.approx(1.0)
    with torch.no_grad():
        torch.testing.assert_close(task.loss(outputs, targets), alone)
        assert task.metrics(outputs, targets)["loss"].mean == pytest.approx(alone.item())


@pytest.mark.parametrize(("size", "kind"), [(48, "grouped_mm"), (50, "eager")])
def test_experts_of_odd_sizes_are_computed_one_by_one(size, kind):
    """torch's grouped product would raise in the first step; outputs and gradients are there with both."""
    task = language(model={**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "intermediate_size": size})
    model = made(task)
    assert model.config._experts_implementation == kind
    task.loss(model(torch.arange(12)[None]), torch.arange(12)[None]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("padded", [False, True])
def test_the_balance_of_experts_is_that_of_the_global_batch(padded):
    """Losses and gradients: where ranks have other numbers of tokens, too."""
    torch.manual_seed(0)
    layers = [torch.randn(24, 4, requires_grad=True) for _ in range(3)]
    mask = torch.ones(4, 6, dtype=torch.int64)
    if padded:
        mask[0, 2:] = mask[3, 5:] = 0

    def weighted(ranks):
        rank = ranks.plan.world.rank
        own, rows = [layer.split(12)[rank] for layer in layers], mask.split(2)[rank]
        weight = float(rows.sum())
        return weight * experts.balance(own, 2, rows if padded else None, weight, ranks)[0]

    loss = sum(Room(2).run(weighted)) / mask.sum()
    module = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    expected = module.load_balancing_loss_func(tuple(layers), 4, 2, mask if padded else None)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, layers), torch.autograd.grad(expected, layers))


def save(task, folder, seed=5):
    model = made(task, seed)
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder):
    """A word-level tokenizer of the synthetic corpus' letters."""
    tokenizers, transformers = importlib.import_module("tokenizers"), _transformers.transformers()
    letters = {letter: index for index, letter in enumerate(["?", *" abcdefghijklmnopqrstuvwxyz"])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?").save_pretrained(folder)
    return len(letters)


def test_a_folders_tokenizer_makes_the_tokens(tmp_path):
    size = save_tokenizer(tmp_path)
    task = language(tokenizer=str(tmp_path))
    assert task.pretrained_config.vocab_size == size
    inputs, targets = task.train_data().batch(torch.arange(4), 0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.max()) < size
    assert not inputs.equal(language(2, tokenizer=str(tmp_path)).train_data().batch(torch.arange(4), 0)[0])
    with pytest.raises(TaskError, match=r"vocab_size 9 is too small: the tokenizer has 28 tokens"):
        language(model={**LLAMA, "vocab_size": 9}, tokenizer=str(tmp_path))
    (tmp_path / "short").write_text("abc")
    with pytest.raises(DataError, match=r"the text has 3 tokens, too few for one window of 16"):
        language(tokenizer=str(tmp_path), corpus=str(tmp_path / "short")).train_data()


def test_a_tokenizer_that_draws_is_refused(tmp_path):
    text_tokenizer(tmp_path)
    drawn = read_json(tmp_path / "tokenizer.json")
    drawn["model"]["dropout"] = 0.1
    write_json(tmp_path / "tokenizer.json", drawn)
    with pytest.raises(TaskError, match=r"draws tokens by chance \(BPE dropout 0.1\)"):
        language(tokenizer=str(tmp_path))


def test_a_corpus_is_text(tmp_path):
    save_tokenizer(tmp_path)
    letters = "ab " * 200
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text(letters + "\n" + letters)
    marked.write_bytes(b"\xef\xbb\xbf" + letters.encode() + b"\r\n" + letters.encode())
    one, other = (
        language(tokenizer=str(tmp_path), corpus=str(file)).train_data().batch(torch.arange(8), 0)[0]
        for file in (plain, marked)
    )
    assert one.equal(other)
    one, other = (bytes(read_corpus(str(file)).tolist()) for file in (plain, marked))
    assert one == other.replace(b"\r\n", b"\n"), "bytes as tokens"
    for packed in (gzip.compress(letters.encode()), letters.encode("utf-16")):
        marked.write_bytes(packed)
        with pytest.raises(DataError, match=r"marked\.txt: has NUL bytes, so it is not text; unpack it"):
            read_corpus(str(marked))
    marked.write_bytes(letters.encode() + "é".encode("latin-1"))
    with pytest.raises(DataError, match=r"marked\.txt: not UTF-8"):
        language(tokenizer=str(tmp_path), corpus=str(marked)).train_data()


def test_images_are_classified_by_their_loss(tmp_path):
    task = classifier()
    model = made(task)
    images, labels = next(Loader(task.train_data(), seed=0, micro_batch_size=8).stream())
    outputs = model(images)
    torch.testing.assert_close(task.loss(outputs, labels), model(images, labels=labels).loss)
    assert outputs.logits.shape == (8, 10)
    metrics = task.metrics(outputs, labels)
    assert (metrics["accuracy"].count, metrics["loss"].mean) == (8, pytest.approx(task.loss(outputs, labels).item()))
    assert not task.batch_dependent
    save(task, tmp_path)
    other = classifier(model=str(tmp_path), classes=7)
    again = made(other)
    assert again.classifier.weight.shape == (7, 32)
    encoder = [name for name, _ in again.named_parameters() if not name.startswith("classifier")]
    kept = dict(made(classifier(model=str(tmp_path))).named_parameters())
    assert all(torch.equal(dict(again.named_parameters())[name], kept[name]) for name in encoder)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | {"num_hidden_layers": 3})
    with pytest.raises(TaskError, match=r"has no weights, or of another shape, for vit\..*layer.*2"):
        classifier(model=str(tmp_path)).model()


def test_batch_norm_is_found():
    resnet = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    task = classifier(model=resnet)
    assert task.batch_dependent
    assert not hasattr(task.pretrained_config, "image_size"), "it has no such setting"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": {"hidden_size": 3}}, r"task.model: no model_type; such as llama"),
        ({"model": {"model_type": "lama"}}, r'model_type "lama": not known to transformers .*did you mean "llama"\?'),
        ({"model": {**LLAMA, "hiden_size": 3}}, r'hiden_size: no setting of LlamaConfig; did you mean "hidden_size"\?'),
        (
            {"model": {**LLAMA, "hidden_size": 33}},
            r"task.model: .*33\) is not a multiple of the number of attention heads",
        ),
        (
            {"model": {**LLAMA, "vocab_size": 100}},
            r"vocab_size 100 is too small: without a tokenizer there are 256 tokens",
        ),
        (
            {"model": {**LLAMA, "max_position_embeddings": 8}},
            r"16 tokens, but the model's max_position_embeddings is 8",
        ),
        (
            {"model": {"model_type": "bert"}},
            r'in model_type "bert" tokens see those behind them.*"is_decoder": true',
        ),
        ({"model": {"model_type": "xlnet"}}, r"tokens see those behind them, their targets$"),
        (
            {"model": "some/model"},
            r"some/model is not a local folder with a model; of the Hugging Face hub: hub:some/model",
        ),
    ],
)
def test_models_that_cannot_be_are_refused(fields, message):
    with pytest.raises(TaskError, match=message):
        language(**fields)


def test_folders_that_hold_no_model_are_refused(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(TaskError, match=r"config.json is neither a file nor a folder"):
        language(model=str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(TaskError, match=r"has no config.json; name the folder that save_pretrained wrote"):
        language(model=str(tmp_path))
    write_json(tmp_path / "config.json", LLAMA)
    with pytest.raises(TaskError, match=r"no \.safetensors file"):
        language(model=str(tmp_path), context=8).model()
    (tmp_path / "pytorch_model.bin").write_bytes(b"never unpickled")
    with pytest.raises(TaskError, match=r"pytorch_model.bin is pickled, a format that can contain code; .* convert it"):
        language(model=str(tmp_path), context=8).model()
    with pytest.raises(TaskError, match=r"has no tokenizer.json; without a tokenizer a token is a byte"):
        language(tokenizer=str(tmp_path))
    folder = tmp_path / "smaller"
    save(language(), folder)
    settings = {**LLAMA, "vocab_size": 256, "num_hidden_layers": 3}
    write_json(folder / "config.json", settings)
    with pytest.raises(TaskError, match=r"has no weights, or of another shape, for model.layers.2"):
        language(model=str(folder)).model()
    write_json(folder / "config.json", {**settings, "num_hidden_layers": 2, "intermediate_size": 64})
    with pytest.raises(TaskError, match=r"has no weights, or of another shape, for model.layers.0.mlp"):
        language(model=str(folder)).model()
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    write_json(folder / "config.json", {**settings, "quantization_config": four})
    with pytest.raises(TaskError, match=r"are quantised \(quantization_config\); name a folder"):
        language(model=str(folder))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(TaskError, match=r"has an adapter next to the model; move it"):
        language(model=str(folder))


@pytest.mark.parametrize(("rank", "quiet"), [(0, False), (0, True), (1, False)])
def test_weights_of_a_folder_that_the_model_has_not_are_said_once(rank, quiet, tmp_path, capsys):
    """As transformers prints: two layers are read as one where the configuration says so."""
    model = save(language(model={**LLAMA, "num_hidden_layers": 2}), tmp_path / "two")
    write_json(tmp_path / "two" / "config.json", {**model.config.to_dict(), "num_hidden_layers": 1})
    task = language(model=str(tmp_path / "two"))
    task.context = TaskContext(rank=rank, quiet=quiet)
    task.model()
    said = "has weights that this model does not have: model.layers.1.input_layernorm.weight, "
    printed = capsys.readouterr().err
    assert printed.count(said) == (rank == 0 and not quiet)
    assert (" and 6 more" in printed) == (rank == 0 and not quiet)


@pytest.mark.parametrize("tied", [False, True])
def test_nothing_is_said_of_a_folder_whose_weights_are_all_read(tied, tmp_path, capsys):
    save(language(model={**LLAMA, "tie_word_embeddings": tied}), tmp_path / "all")
    language(model=str(tmp_path / "all")).model()
    assert "this model does not have" not in capsys.readouterr().err


def test_encoders_that_do_not_see_ahead_are_language_models():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
    model = language(model={"model_type": "bert", "is_decoder": True, **sizes}).model().eval()
    rows = torch.tensor([[5, 6, 7], [5, 6, 8]])
    first, second = model(input_ids=rows).logits
    assert torch.allclose(first[:2], second[:2], atol=1e-6)
    assert language(model={"model_type": "bart", "d_model": 16}).pretrained_config.model_type == "bart"


def test_folders_with_damaged_weights_are_refused(tmp_path):
    """Of several files, one is cut off, one is missing."""
    whole = tmp_path / "whole"
    made(language(), 5).save_pretrained(whole, max_shard_size="20KB")
    files = sorted(whole.glob("*.safetensors"))
    assert len(files) > 2
    for what, harm in {
        "truncated or damaged: copy it again": lambda file: file.write_bytes(file.read_bytes()[:-10]),
        "names 'model-00002.*no such file next to it": lambda file: file.unlink(),
    }.items():
        folder = tmp_path / what[:9]
        shutil.copytree(whole, folder)
        harm(folder / files[1].name)
        with pytest.raises(TaskError, match=what):
            language(model=str(folder)).model()


def test_a_folders_weights_keep_their_16_bits(tmp_path):
    """Where the training has the same; else fp32 as ever, also where one tensor is wider."""
    kept = made(language(), 5).to(torch.bfloat16)
    kept.save_pretrained(tmp_path, max_shard_size="20KB")
    task = language(model=str(tmp_path))
    wide = made(task)
    assert wide.training
    assert all(torch.equal(a.float(), b) for a, b in zip(kept.parameters(), wide.parameters(), strict=True))
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    task.context = TaskContext(torch.bfloat16)
    model = made(task)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(made(language()).buffers(), model.buffers(), strict=True))
    kept.model.norm.float()
    kept.save_pretrained(tmp_path, max_shard_size="20KB")
    assert {parameter.dtype for parameter in made(task).parameters()} == {torch.float32}


def test_images_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(TaskError, match=r"cannot take images of 3 x 16 x 16"):
        classifier(model={**VIT, "num_channels": 1})
    with pytest.raises(TaskError, match=r"transformers has no AutoModelForImageClassification"):
        classifier(model=LLAMA)


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    _transformers.transformers.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r'transformers is not installed; pip install "dsframe\[transformers\]"'):
        language()
    _transformers.transformers.cache_clear()


def test_a_checkpoint_leaves_as_a_folder_that_from_pretrained_reads(tmp_path, capsys):
    """Tied weights are there once, a mixture's experts have the names that transformers gives them on disk."""
    save_tokenizer(tmp_path / "words")
    model = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "tie_word_embeddings": True}
    task = language(model=model, samples=64, tokenizer=str(tmp_path / "words"))
    file = ds_config(4, "AdamW", 1e-3, engine="single", steps=1, eval_samples=4, run_dir=str(tmp_path / "run"))
    dsframe.fit(task, file)
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        command = ["export", str(tmp_path / "run"), "--to", "huggingface", "--shard-size", "20KB", "--out", str(out)]
        assert cli.main([*command, "--dtype", dtype]) == 0, capsys.readouterr().err
        reader = _transformers.transformers().AutoModelForCausalLM
        found, told = reader.from_pretrained(out, local_files_only=True, output_loading_info=True)
        assert not any(told.values()), told
        assert found.dtype == getattr(torch, dtype)
        assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
        weights, theirs = export.read(store.locate(tmp_path / "run")[0], dtype), found.state_dict()
        assert weights.keys() == theirs.keys()
        assert all(torch.equal(weights[name], theirs[name]) for name in weights)
        tokens = _transformers.tokenizer(str(out), {})[0]
        assert tokens("dog")["input_ids"] == task.tokenizer("dog")["input_ids"]
    file = tmp_path / "words" / "tokenizer.json"
    for change in (lambda: file.write_text(file.read_text() + "\n"), file.unlink):
        shutil.rmtree(out)
        change()
        capsys.readouterr()
        assert cli.main(command) == 0
        said = capsys.readouterr().err
        assert "no tokenizer is written: " in said
        assert ("has changed since the training" in said) == file.exists()
    assert (out / "config.json").is_file()


def test_only_what_transformers_knows_leaves_so(tmp_path, capsys):
    dsframe.fit(Line(), ds_config(4, "AdamW", 1e-3, engine="single", steps=1, run_dir=str(tmp_path / "run")))
    assert cli.main(["export", str(tmp_path / "run"), "--to", "huggingface"]) == CheckpointError.exit_code
    assert "does not say that its model is of transformers: write pretrained()" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name[0] == "."] == []
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path / "run"), "--to", "huggingface", "--shard-size", "5 GiB"])


def test_a_folder_is_planned_without_reading_its_weights(tmp_path, capsys):
    """transformers loads nothing on the meta device: the plan of each model folder was an error. And beside an adapter."""
    language().model().save_pretrained(tmp_path / "model")
    task = {"name": "causal-language-model", "model": str(tmp_path / "model"), "context": 16, "corpus": "synthetic"}
    whole = sum(parameter.numel() for parameter in language().model().parameters())
    for adapter, count in ((None, whole), ({"r": 2, "target_modules": ["q_proj"]}, 2 * 2 * 2 * LLAMA["hidden_size"])):
        settings = {"task": task} | ({"adapter": adapter} if adapter else {})
        file = write_json(tmp_path / "file.json", ds_config(2, "AdamW", 1e-3, **settings))
        assert cli.main(["plan", "--config", str(file), "-np", "2"]) == 0
        assert f"{count} parameters" in capsys.readouterr().out


def pictures(folder, *classes):
    """One for each class and split; returns that of the last one."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    ramps = [image.linear_gradient("L"), image.new("L", (256, 256), 40), image.radial_gradient("L")]
    for split in ("train", "val"):
        for name in classes:
            place = folder / split / name / "0.png"
            place.parent.mkdir(parents=True)
            image.merge("RGB", ramps).save(place)
    return place


def test_classes_keep_the_numbers_of_the_folder_that_knows_them(tmp_path):
    given = ["dog", "ca\u0301t", *"zyxwvutsr"]  # the accent is a letter of its own, as some systems write it
    names = [unicodedata.normalize("NFC", name) for name in given]
    pictures(tmp_path / "d", *names)
    known = tmp_path / "m"
    config = _transformers.transformers().ViTConfig(
        **{key: value for key, value in VIT.items() if key != "model_type"},
        image_size=16, id2label=dict(enumerate(given)), label2id={name: index for index, name in enumerate(given)},
    )  # fmt: skip
    _transformers.transformers().ViTForImageClassification(config).save_pretrained(known)
    look = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    write_json(known / "preprocessor_config.json", {**look, "image_mean": 0.5, "image_std": 0.25})
    data = {"dataset": "image-folder", "data_dir": str(tmp_path / "d"), "samples": None}
    for model, ordered in ((str(known), names), (VIT, sorted(names))):
        task = classifier(model=model, **data)
        exported = json.loads(task.pretrained()["config"])
        assert [*exported["id2label"].values()] == sorted(exported["label2id"], key=exported["label2id"].get) == ordered
        assert [ordered[label] for _, label in task.eval_data().samples] == ordered
        assert (task.images.mean == (0.5,) * 3) == (model == str(known))
    cropped = {"do_center_crop": True, "size": {"shortest_edge": 18}, "crop_size": look["size"]}
    write_json(known / "preprocessor_config.json", look | cropped)
    own = classifier(model=str(known), **{**data, "image_size": None})
    assert own.images.size == 16, "as its preprocessor_config.json says"
    pictures(tmp_path / "other", *(others := sorted(["bird", *names[1:]])))
    unlike = f"classes are {', '.join(sorted(names))}, those of the data {', '.join(others)}: as many, so the "
    for folder, said in (("d", []), ("other", [unlike])):
        lines = []
        classifier(model=str(known), **{**data, "data_dir": str(tmp_path / folder)}).prepare(lines.append)
        assert len(lines) == len(said)
        assert all(text in line for text, line in zip(said, lines, strict=True))


def test_what_transformers_reads_beside_the_weights_is_of_the_training(tmp_path):
    known, words = tmp_path / "m", tmp_path / "words"
    text_tokenizer(words)
    save(language(model={**LLAMA, "vocab_size": 400, "eos_token_id": 7}), known)
    (known / "generation_config.json").write_text('{"eos_token_id": [7, 8], "temperature": 0.5}')
    (tmp_path / "t.jinja").write_text("hello")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    files = {"train": str(tmp_path / "a.jsonl"), "chat_template": str(tmp_path / "t.jinja"), "format": "conversations"}
    section = {
        "name": "causal-language-model",
        "model": str(known),
        "tokenizer": str(words),
        "context": 16,
        "data": files,
    }
    told = build(TextSettings.model_validate(section), seed=1).pretrained()
    names = dict.fromkeys(_transformers.parameter_names(json.loads(told["config"])))
    files = pretrained.beside_weights({"pretrained": told, "parameters": names, "aliases": {}}, print)
    assert files["chat_template.jinja"] == b"hello"
    ends = [json.loads(told[name])["eos_token_id"] for name in ("config", "generation_config")]
    assert ends == [0, 0], "those of the tokenizer that the file names"
    for file in words.iterdir():
        shutil.copy(file, known)
    own = language(model=str(known)).pretrained()
    assert json.loads(own["generation_config"]) == {"eos_token_id": [7, 8, 0], "temperature": 0.5}, (
        "and the tokenizer's"
    )
    longer = _transformers.transformers().AutoTokenizer.from_pretrained(words)
    longer.add_tokens(["<new>"])
    longer.save_pretrained(tmp_path / "longer")
    grown = language(model=str(known), tokenizer=str(tmp_path / "longer"), resize_embeddings=True).pretrained()
    assert grown["generation_config"] == own["generation_config"], "it has all tokens of the folder's"


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("ViT", {"image_mean": 0.5, "image_std": None}, ""),
        ("ViT", {"do_normalize": False, "size": {"height": 16, "width": 16}}, ""),
        ("ViT", {"do_resize": False, "size": {"height": 16, "width": 16}}, "has size, which"),
        ("ConvNext", {"size": {"shortest_edge": 16}, "crop_pct": 0.875}, ""),
        ("ConvNext", {"size": {"shortest_edge": 16}, "crop_pct": 0.6}, ""),
        ("ViT", {"size": {"height": 16, "width": 16}, "resample": 3}, ""),
        ("DeiT", {"size": {"height": 20, "width": 24}, "crop_size": {"height": 16, "width": 16}}, ""),
        ("CLIP", {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}, ""),
        ("Levit", {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}, "has size, which"),
        ("EfficientNet", {}, "has include_top, which the training does not do"),
        ("ViT", {"rescale_factor": 1 / 127.5}, "has rescale_factor, which"),
        ("ViT", {"do_rescale": False}, "has rescale_factor, which"),
    ],
)
def test_an_export_has_the_look_of_the_training(name, fields, said, tmp_path):
    picture, library = pictures(tmp_path / "d", "b", "a"), _transformers.transformers()
    known = tmp_path / "m"
    config = {key: value for key, value in VIT.items() if key != "model_type"}
    library.ViTForImageClassification(library.ViTConfig(**config, image_size=16)).save_pretrained(known)
    getattr(library, f"{name}ImageProcessor")().save_pretrained(known)
    file = known / "preprocessor_config.json"
    write_json(file, read_json(file) | fields)
    task = classifier(model=str(known), dataset="image-folder", data_dir=str(tmp_path / "d"), samples=None)
    lines = []
    task.prepare(lines.append)
    assert (said in lines[0]) if said else not lines
    (tmp_path / "preprocessor_config.json").write_text(task.pretrained()["preprocessor_config"])
    image, own = pytest.importorskip("PIL.Image"), task.eval_data()[0][0]
    for folder in (tmp_path, known) if "size" in fields and not said else (tmp_path,):
        processor = library.AutoImageProcessor.from_pretrained(folder, backend="pil")
        theirs = processor(image.open(picture), return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(theirs, own, rtol=0, atol=1e-5)


def test_large_images_of_a_convnext_are_not_cut():
    look = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}}
    assert huggingface._resized(look, 384) == (384, 384)


def test_an_export_says_which_image_processor_gives_the_pixels_of_the_training(tmp_path, capsys):
    """Transformers' default one resizes with torchvision, which rounds otherwise: a pixel was 1 of 255 off."""
    pictures(tmp_path / "d", "b", "a")
    task = {"name": "image-classification", "model": VIT, "dataset": "image-folder", "data_dir": str(tmp_path / "d")}
    file = ds_config(2, "SGD", 0.1, engine="single", steps=1, run_dir=str(tmp_path / "run"))
    file["dsframe"]["task"] = {**task, "image_size": 16}
    execute(load(file))
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path / "run"), "--to", "huggingface", "--out", str(tmp_path / "out")]) == 0
    assert 'image processor with backend="pil", which gives the pixels of the training' in capsys.readouterr().err
    processor = _transformers.transformers().AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    assert processor.size["shortest_edge"] == 18


@pytest.mark.parametrize("sides", [(33, 64), (64, 33), (41, 90), (50, 40), (16, 16)])
def test_the_processor_of_an_export_cuts_out_what_was_evaluated(sides, tmp_path):
    """Torchvision rounds where the centre begins: it was a pixel off where the border is odd."""
    pictures(tmp_path / "d", "b", "a")
    picture = next((tmp_path / "d" / "val").rglob("*.png"))
    image, library = pytest.importorskip("PIL.Image"), _transformers.transformers()
    pixels = np.random.default_rng(0).integers(0, 256, (*sides, 3), dtype=np.uint8)
    image.fromarray(pixels).save(picture)
    task = classifier(dataset="image-folder", data_dir=str(tmp_path / "d"), samples=None)
    (tmp_path / "preprocessor_config.json").write_text(task.pretrained()["preprocessor_config"])
    processor = library.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    theirs = processor(image.open(picture), return_tensors="pt")["pixel_values"][0]
    held_out = task.eval_data()
    number = [path for path, _ in held_out.samples].index(picture)
    torch.testing.assert_close(theirs, held_out[number][0], rtol=0, atol=1e-5)


def test_a_kind_of_which_transformers_has_two_classifiers_is_built(tmp_path):
    """DeiT and LeViT: with and without a teacher's output. It was a traceback; the folder's own is taken."""
    sizes = {key: value for key, value in VIT.items() if key != "model_type"}
    task = classifier(model={"model_type": "deit", **sizes})
    assert type(task.model()).__name__ == "DeiTForImageClassification"
    library, known = _transformers.transformers(), tmp_path / "m"
    config = library.DeiTConfig(**sizes, image_size=16, num_labels=10)
    library.DeiTForImageClassificationWithTeacher(config).save_pretrained(known)
    assert type(classifier(model=str(known)).model()).__name__ == "DeiTForImageClassificationWithTeacher"


def test_each_file_of_a_tokenizer_is_of_its_identity(tmp_path):
    words = text_tokenizer(tmp_path / "words")
    (words / "additional_chat_templates").mkdir()
    (words / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (words / "tekken.json").write_text("{}")  # of Mistral's tokenizers
    _, before = _transformers.tokenizer(str(words), {}) or (None, "")
    files = [file for file in words.rglob("*") if file.is_file()]
    assert len(files) >= 4
    for file in files:
        content = file.read_text()
        file.write_text(content + "\n")
        _, after = _transformers.tokenizer(str(words), {}) or (None, "")
        assert after != before, file
        file.write_text(content)
    found = {before}
    for config in ({"model_type": "llama"}, {"model_type": "gpt2"}, {"tokenizer_class": "GPT2Tokenizer"}):
        write_json(words / "config.json", config)
        found.add(_transformers.tokenizer(str(words), {})[1])
    assert len(found) == 4, "what transformers chooses the class by"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    write_json(words / "tokenizer_config.json", own)
    with pytest.raises(TaskError, match="it needs code that lies in the folder"):
        _transformers.tokenizer(str(words), {})


class Wrapped(ImageClassificationTask):
    """A model of transformers as a part of another module: its names have a prefix."""

    def model(self):
        return Wrapper(super().model())


class Wrapper(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *inputs, **named):
        return self.net(*inputs, **named)


@pytest.mark.parametrize("kind", [ImageClassificationTask, Wrapped])
def test_a_checkpoint_has_a_config_json_where_its_names_are_theirs(kind, tmp_path, capsys):
    section = {"name": "image-classification", "model": VIT, "dataset": "synthetic", "image_size": 16, "samples": 64}
    settings = {"engine": "single", "steps": 1, "run_dir": str(tmp_path / "run")}
    file = ds_config(4, "AdamW", 1e-3, **settings)
    dsframe.fit(kind(ImageSettings.model_validate(section), 0), file)
    (checkpoint,) = store.locate(tmp_path / "run")
    assert (checkpoint / "config.json").is_file() == (kind is ImageClassificationTask)
    told = "checkpoints have no config.json for from_pretrained: ViTForImageClassification has classifier.bias, and the"
    assert (told in capsys.readouterr().err) == (kind is Wrapped)


@pytest.mark.parametrize("tied", [True, False])
def test_names_of_shared_parameters_are_theirs_too(tied):
    task = language(model={**LLAMA, "tie_word_embeddings": tied, "dtype": "bfloat16"})
    config = json.loads(task.pretrained()["config"])
    names = {name for name, _ in made(task).named_parameters(remove_duplicate=False)}
    assert _transformers.parameter_names(config) == names
    assert _transformers.parameter_names({**config, "architectures": ["Unknown"]}) == set()
    facts = {"pretrained": {**task.pretrained(), "generation_config": "{}"}, "parameters": dict.fromkeys(names)}
    assert pretrained.beside_weights({**facts, "aliases": {}, "adapter": {}}, print) == {}
    for aliases, kept in (({}, False), ({"lm_head.weight": "model.embed_tokens.weight"}, tied)):
        files = pretrained.beside_weights({**facts, "aliases": aliases}, print)
        written = json.loads(files["config.json"])
        assert files["generation_config.json"] == b"{}"
        assert (written["tie_word_embeddings"], written["dtype"]) == (kept, "float32")


def test_weights_that_are_tied_no_more_are_both_written(tmp_path):
    task = language(model={**LLAMA, "tie_word_embeddings": True})
    weights = made(task).state_dict()
    weights |= {"lm_head.weight": torch.zeros_like(weights["lm_head.weight"])}
    _transformers.write(json.loads(task.pretrained()["config"]), weights, "float32", tmp_path, "5GB")
    written = _transformers.load(tmp_path)
    assert written.model.embed_tokens.weight.any()
    assert not written.lm_head.weight.any()


def test_a_program_finds_transformers_as_it_was(monkeypatch):
    """During a run it is offline and silent; what else the program imports then does not become so."""
    from huggingface_hub import constants
    from transformers.utils import logging

    def state():
        return constants.HF_HUB_OFFLINE, logging.get_verbosity(), logging.is_progress_bar_enabled()

    silent = state()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    before = state()
    _transformers.transformers.cache_clear()
    for _ in range(2):
        with restored():
            _transformers.transformers()
            assert state() == (True, logging.ERROR, False)
            assert "HF_HUB_OFFLINE" not in os.environ
        assert state() == before
    logging.set_verbosity(silent[1])
    if not silent[2]:
        logging.disable_progress_bar()
