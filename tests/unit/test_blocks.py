"""The first and the last lines of a run: labelled, dim labels in a terminal alone, the best evaluation."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from torch import nn

from dsframe.model.parts import parts_of
from dsframe.run_dir import blocks

EVALUATIONS = [
    {"step": 10, "evaluation": {"loss": 0.5, "accuracy": 0.7}},
    {"step": 15, "loss": 0.4},
    {"step": 20, "evaluation": {"loss": 0.3, "accuracy": 0.9}},
    {"step": 30, "evaluation": {"loss": 0.4, "accuracy": 0.8, "odd": None}},
]


def test_the_best_evaluation():
    assert blocks.best_of(EVALUATIONS, None) == ("loss", 0.3, 20)
    assert blocks.best_of(EVALUATIONS, "accuracy:max") == ("accuracy", 0.9, 20)
    assert blocks.best_of(EVALUATIONS, "accuracy:min") == ("accuracy", 0.7, 10)
    assert blocks.best_of(EVALUATIONS[:2], None) is None, "of a single one nothing is the best"
    assert blocks.best_of(EVALUATIONS, "odd:max") is None


def test_lines_have_a_label_and_nothing_for_what_is_not_known():
    rows = [("model", "Net"), ("best", ""), ("engine", "PyTorch")]
    assert blocks.lines(rows, colour=False) == ["  model       Net", "  engine      PyTorch"]
    assert blocks.lines(rows, colour=True)[0] == "  \x1b[2mmodel     \x1b[0m  Net"


def test_the_parts_of_a_model():
    body = [nn.Linear(9, 9) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(1000, 9), *body, nn.ReLU(), nn.Linear(9, 1000, bias=False))
    model[5].weight = model[0].weight
    assert blocks.model_table(parts_of(model)) == ["0       Embedding   9,000", "1 to 3  3 x Linear    270"]
    body[0].requires_grad_(False)
    assert blocks.model_table(parts_of(model))[1:] == [
        "1       Linear         90         frozen",
        "2 to 3  2 x Linear    180    180 trained",
    ]
    assert blocks.model_table(parts_of(nn.Linear(2, 2))) == []
    many = blocks.model_table(parts_of(nn.Sequential(*(nn.Linear(1, size) for size in range(1, 31)))))
    assert (len(many), many[-1]) == (11, "and 20 more")


PROGRAM = """
import torch, dsframe
class Line(dsframe.Task):
    def model(self): return torch.nn.Linear(2, 1)
    def loss(self, outputs, targets): return (outputs - targets).square().mean()
    def train_data(self): return torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
    eval_data = train_data
file = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
dsframe.fit(Line(), file | {"dsframe": {"engine": "single", "steps": 20, "eval_every_steps": 10, "run_dir": "run"}})
"""


def test_in_a_terminal_lines_stay_above_the_moving_one(tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 4096):
                said += part
        except OSError:  # Linux' way to say that nobody has the other end any more
            pass
        assert process.wait(60) == 0, said
    os.close(ours)
    text = said.decode()
    assert "\x1b[2mmodel     \x1b[0m  Line, 3 parameters" in text
    assert "gradients clipped to 1 (inherited)" in text
    assert text.count("step 20/20") == 1
    assert "step/s]" in text, "there is a moving line"
    assert text.index("step  1/20") < text.index("step  5/20") < text.index("dsframe: done")
    assert "best      \x1b[0m  loss" in text
