"""The catalogue of codes: complete, true of each example, and printed by ``dsframe explain``."""

import json
import sys
from pathlib import Path

import pytest

from dsframe import errors
from dsframe.cli import main
from dsframe.config.codes import CODES, EXITS
from tests.processes import run_program

STARTS = [name for name, code in CODES.items() if code.command.startswith("train ")]
CHECKS = [name for name in CODES if name not in STARTS]
TASK = """
import dsframe, torch

class Mine(dsframe.Task):
    def model(self): return torch.nn.Linear(2, 2)
    def loss(self, outputs, targets): return outputs.sum()
    def train_data(self): return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8))
"""
START = """
import json, sys
from dsframe.config import load
from dsframe.errors import ConfigError
from dsframe.run import execute

said = {}
for name, arguments in json.load(sys.stdin).items():
    try:
        execute(load(f"{name}.json", overrides=arguments))
    except ConfigError as error:
        said[name] = error.printed
print(json.dumps(said))
"""


def classes():
    return [errors.DsframeError, *errors.DsframeError.__subclasses__()]


def test_every_class_of_error_has_its_exit_code_explained():
    assert len(classes()) == 10
    for kind in classes():
        assert EXITS[kind.exit_code].code == kind.code
    own = {found.code for found in EXITS.values() if found.code}
    assert own == {kind.code for kind in classes()}
    assert not own & set(CODES)


@pytest.mark.parametrize("name", CHECKS)
def test_each_example_gets_its_code(name, here, capsys):
    Path("FILE").write_text(CODES[name].example)
    main(CODES[name].command.split())
    said = "".join(capsys.readouterr())
    lines = [line for line in said.splitlines() if line.endswith(f"[{name}]")]
    assert lines, said
    assert all(any(f"{label}: " in line for label in ("error", "warning", "note")) for line in lines)


def test_each_example_of_a_start_gets_its_code(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    options = {}
    for name in STARTS:
        words = CODES[name].command.split()
        assert words[:5] == ["train", "--config", "FILE", "--engine", "single"]
        options[name] = ["dsframe.engine=single", *(f"dsframe.run_dir={words[6]}" for _ in words[5:6])]
        (tmp_path / f"{name}.json").write_text(CODES[name].example)
    done = run_program([sys.executable, "-c", START], input=json.dumps(options), cwd=tmp_path, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert {name: text[text.rindex("[") :] for name, text in said.items()} == {name: f"[{name}]" for name in STARTS}


def test_explain_one(capsys):
    assert main(["explain", "unknown-key"]) == 0
    text = capsys.readouterr().out
    code = CODES["unknown-key"]
    assert text.startswith("unknown-key\n")
    assert "Why: " in text
    assert "What to write: " in text
    assert code.example in text
    assert main(["explain", "[unknown-key]"]) == 0
    assert capsys.readouterr().out == text
