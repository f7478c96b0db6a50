"""Model folders from somebody else: nothing in them runs, leads out of them or makes training wait; one line says what is wrong."""

import json
import os

import pytest

from dsframe.errors import TaskError
from tests.files import read_json, write_json

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from dsframe.tasks import _transformers  # noqa: E402

CODE = "raise SystemExit('code of the folder has run')\n"


@pytest.fixture
def folder(tmp_path):
    config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "m", max_shard_size="1KB")
    return tmp_path / "m"


def edit(path, **changes):
    write_json(path, {**json.loads(path.read_text() if path.exists() else "{}"), **changes})


def shard(value):
    def change(folder):
        index = folder / "model.safetensors.index.json"
        weight_map = read_json(index)["weight_map"]
        edit(index, weight_map={**weight_map, next(iter(weight_map)): value})

    return change


def code(file, auto):
    def change(folder):
        (folder / "evil.py").write_text(CODE)
        edit(folder / "config.json", model_type="evil")
        edit(folder / file, auto_map={auto: "evil.Evil"})

    return change


def pipe(folder):
    os.mkfifo(folder / "x.safetensors")


def loop(folder):
    (folder / "tokenizer.json").symlink_to("tokenizer.json")


def load(folder):
    config = _transformers.configure("AutoModelForCausalLM", str(folder), {})
    _transformers.build("AutoModelForCausalLM", config, str(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shard("../../../etc/passwd"), "names '../../../etc/passwd', and there is no such file next to it"),
        (shard(5), "names 5, and"),
        (lambda folder: edit(folder / "model.safetensors.index.json", weight_map=7), "m: "),
        (lambda folder: edit(folder / "config.json", n_embd="a"), "config.json: "),
        (code("config.json", "AutoConfig"), "which dsframe does not run"),
        (pipe, "x.safetensors is neither a file nor a folder"),
        (loop, "tokenizer.json is neither a file nor a folder"),
    ],
)
def test_a_model_folder(change, words, folder):
    change(folder)
    with pytest.raises(TaskError, match=words):
        load(folder)


def test_a_tokenizers_code_is_not_run(folder):
    edit(folder / "tokenizer_config.json", tokenizer_class="Evil")
    code("tokenizer_config.json", "AutoTokenizer")(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TaskError, match="which dsframe does not run"):
        _transformers.tokenizer(None, str(folder))
