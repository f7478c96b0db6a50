"""The first and the last lines of a run: labelled, dim labels in a terminal alone, the best evaluation."""

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
