"""The first and the last lines of a run: labelled, dim labels in a terminal alone, the best evaluation."""

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
