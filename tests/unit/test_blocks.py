"""The first and the last lines of a run: its model's parts, its results, the best evaluation."""

from dsframe.config.schema.scheduler import Scheduler
from dsframe.model.parts import Part
from dsframe.results import Summary
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
    named = [{"step": step, "evaluation": {"val/loss": 1.0 / step}} for step in (1, 2)]
    assert blocks.best_of(named, None) == ("val/loss", 0.5, 2)


def test_a_model_is_a_table_of_its_parts_and_equal_ones_share_a_line():
    parts = [Part("0", "Linear", 20, 20), Part("1", "Linear", 20, 20), Part("head", "Linear", 1500, 0)]
    assert blocks.model_table(parts) == [
        "0 to 1  2 x Linear     40  40 trained",
        "head    Linear      1,500      frozen",
    ]
    assert blocks.model_table(parts[:2]) == [], "of one kind there is nothing to list"
    assert blocks.model_table([*parts[:2], *(Part("a", f"{n}", n, n) for n in range(11))])[-1] == "and 2 more"
    for trained, shown in ((9, "9"), (3, "3 trained")):
        assert blocks.model_table([*parts[:2], Part("tail", "Adapted", 9, trained)])[1].endswith(f" {shown}")


def test_the_end_names_the_fullest_rank_and_the_last_checkpoint(tmp_path):
    summary = Summary(30, 61.0, 8.0, "samples", 4, 0.5, 0.25, {"loss": 0.5}, (2**20, 3 * 2**20), 0)
    last = tmp_path / "checkpoints" / "step-00000030"
    last.mkdir(parents=True)
    (last.parent / "best").write_text("step-00000020\n")
    rows = dict(blocks.ending(summary, tmp_path, ("loss", 0.5, 20)))
    assert rows["training"] == "30 steps in 1:01, 8 samples/s, peak 3 MiB a rank"
    assert rows["checkpoint"] == str(last)
    assert rows["best saved"] == str(last.with_name("step-00000020"))
    assert blocks.lines([("best", ""), ("loss", "1")], colour=False) == ["  loss        1"]


def test_the_schedule_names_the_rate_that_deepspeed_takes_by_itself():
    """WarmupDecayLR rises to 0.001 whatever the optimizer's rate is."""
    asked = {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000, "warmup_num_steps": 10}}
    shown = blocks._schedule_of_file(Scheduler.model_validate(asked))
    assert shown == "WarmupDecayLR, warmup_max_lr 0.001, total_num_steps 2,000, warmup_num_steps 10"
    asked["params"]["warmup_max_lr"] = 0.5
    assert "warmup_max_lr 0.5" in blocks._schedule_of_file(Scheduler.model_validate(asked))
    others = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    assert blocks._schedule_of_file(Scheduler.model_validate(others)) == "WarmupLR, warmup_num_steps 10"
