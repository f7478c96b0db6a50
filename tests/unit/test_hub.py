"""Models of the Hugging Face hub: out of its cache, by the library that made it, and what is said where they cannot be had."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from dsframe.config import load
from dsframe.errors import ConfigError, TaskError
from dsframe.model import adapter
from dsframe.tasks import _transformers, build, hub
from tests.files import ds_config
from tests.processes import run_program
from tests.text_files import LLAMA, tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODES = {"me/rows": "EntryNotFound", "gated": "GatedRepo", "secret": "RepoNotFound", "old": "RevisionNotFound"}


def cached(home, name, vocabulary=400):
    """A model of transformers with its tokenizer, where huggingface_hub has what it has downloaded."""
    place = home / "hub" / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    folder = place / "snapshots" / COMMIT
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    torch.manual_seed(0)
    of_llama = _transformers.transformers()
    of_llama.LlamaForCausalLM(of_llama.LlamaConfig(**settings, vocab_size=vocabulary)).save_pretrained(folder)
    return tokenizer(folder)


ROWS = b'{"text": "one"}\n{"text": "two"}\n'
OF_ROWS = {
    "/api/datasets/me/rows/tree/": [{"type": "file", "path": "rows.jsonl", "size": len(ROWS), "oid": "1"}],
    "/api/datasets/me/rows": {"id": "me/rows", "sha": COMMIT, "siblings": [{"rfilename": "rows.jsonl"}]},
}


class Hub(BaseHTTPRequestHandler):
    """Has a data set, and refuses models as the hub does."""

    def do_GET(self):
        known = {"/rows.jsonl": ROWS} | {path: json.dumps(value).encode() for path, value in OF_ROWS.items()}
        if body := next((body for path, body in known.items() if path in self.path), b""):
            self.send_response(200)
            for name, value in {"ETag": '"1"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
            return
        kind = next((kind for kind in CODES if f"/{kind}" in self.path), "secret")
        self.send_response(403 if kind == "gated" else 404)
        self.send_header("X-Error-Code", CODES[kind])
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815  # the name of a method of http.server

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


PROGRAM = """
import sys
from dsframe.errors import TaskError
from dsframe.tasks import hub
for address in sys.argv[1:]:
    try:
        print(hub.snapshot(address))
    except TaskError as error:
        print(error)
"""


def asked(addresses, home, **variables):
    """What a program says of each model, in a process of its own: the library reads its variables once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(home), **variables}
    return run_program([sys.executable, "-c", PROGRAM, *addresses], env=environment).stdout.splitlines()


def test_the_cache_is_read_and_errors_have_a_remedy(tmp_path, endpoint):
    folder = cached(tmp_path, "me/tiny")
    names = ["hub:me/tiny", "hub:me/tiny@main", f"hub:me/tiny@{COMMIT}", "hub:me/other@v2"]
    *found, missing = asked(names, tmp_path, HF_HUB_OFFLINE="1")
    assert found == [str(folder)] * 3
    assert "hf download me/other --revision v2" in missing
    said = {
        "hub:me/gated": "accept its terms at https://huggingface.co/me/gated, then: hf auth login",
        "hub:me/secret": "there is none, or it is private",
        "hub:me/old@v2": "it has no revision v2",
        "hub:a/b/c": "this is not a name",
    }
    lines = asked(list(said), tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    assert len(lines) == len(said)
    for line, words in zip(lines, said.values(), strict=True):
        assert words in line


DATA = """
import os, sys
from pathlib import Path
from dsframe.data import documents
from dsframe.tasks import _transformers
_transformers.transformers()
def read(name):
    try:
        print([row.value["text"] for row in documents.rows(Path(documents.local(name, "data")), ["text"])])
    except documents.DataError as error:
        print(error)

for name in sys.argv[1:]:
    read(name)
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # where there is none
read(sys.argv[1])
"""


def test_a_data_set_of_the_hub_is_downloaded_though_transformers_is_offline(tmp_path, endpoint):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    online = environment | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint}
    command = [sys.executable, "-c", DATA, "hub:me/rows", "hub:me/rows@train[:1]", "hub:me/rows:other", "hub:me/gone"]
    rows, part, other, missing, again = run_program(command, env=online, cwd=tmp_path).stdout.splitlines()
    assert (rows, part) == ("['one', 'two']", "['one']")
    assert other.startswith("hub:me/rows:other: cannot be downloaded (ValueError: BuilderConfig 'other' not found")
    assert missing.startswith("hub:me/gone: cannot be downloaded (DatasetNotFoundError: Dataset 'me/gone'")
    assert again == rows, "it is not asked for again"


def settings(**section):
    task = {"name": "causal-language-model", "context": 16, "corpus": "synthetic", **section}
    file = ds_config(1, engine="single", steps=1, task=task)
    return load(file).settings


def test_a_model_of_the_hub_is_trained_and_its_commit_recorded(tmp_path, monkeypatch):
    folder = cached(tmp_path, "me/tiny")
    monkeypatch.setattr(hub, "snapshot", lambda address: folder)
    task = build(settings(model="hub:me/tiny").task, 0)
    assert task.pretrained()["origin"] == ["me/tiny", COMMIT]
    assert task.pretrained()["tokenizer"] == str(folder)
    assert next(task.model().parameters()).shape == (400, 32)
    assert hub.origin(str(folder)) == ("me/tiny", COMMIT)
    assert hub.origin(str(tmp_path)) is None


def test_a_model_grows_to_its_tokenizer(tmp_path):
    folder = cached(tmp_path, "me/tiny", vocabulary=300)
    with pytest.raises(TaskError, match=r'vocab_size 300 is too small: .* tokens; write "resize_emb'):
        build(settings(model=str(folder)).task, 0)
    task = build(settings(model=str(folder), resize_embeddings=True).task, 0)
    tokens = len(task.tokenizer)
    larger = build(settings(model=str(cached(tmp_path, "me/large", 600)), resize_embeddings=True).task, 0)
    assert 300 < tokens < larger.pretrained_config.vocab_size == 600
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(task.model())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        first, second = (model.get_parameter(name) for model in models)
        assert first.shape == (tokens, 32)
        assert torch.equal(first, second)
    assert json.loads(task.pretrained()["config"])["vocab_size"] == tokens
    with torch.device("meta"):
        assert task.model().get_parameter("lm_head.weight").shape == (tokens, 32)


def test_an_adapter_trains_the_rows_of_new_tokens(tmp_path):
    folder = cached(tmp_path, "me/tiny", vocabulary=300)
    section = {"name": "causal-language-model", "context": 16, "corpus": "synthetic", "model": str(folder)}
    file = ds_config(1, engine="single", steps=1, adapter={"r": 2})
    file["dsframe"]["task"] = {**section, "resize_embeddings": True}
    config = load(file)
    model = build(config.settings.task, 0).model()
    with pytest.raises(ConfigError, match="add to modules_to_save: embed_tokens, lm_head"):
        adapter.add(config, model)
    file["dsframe"]["adapter"]["modules_to_save"] = ["embed_tokens", "lm_head"]
    adapter.add(load(file), model)
