"""Pipelines of two stages, in one job: what may change the training and what may not, what a stage builds."""

import pytest

from tests import equivalence
from tests.engines.pipelines import SAME
from tests.equivalence import CASES, SINGLE
from tests.files import ds_config, read_json, write_json
from tests.processes import run_ranks, warm


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipelines") / "report.json"
    finished = run_ranks(warm(2, ["-m", "tests.engines.pipelines", str(path)]), timeout_seconds=280).check()
    assert "Warning" not in finished.output, finished
    return read_json(path)


@pytest.mark.timeout(300)
def test_where_layers_are_and_what_is_recomputed_changes_nothing(report):
    losses = report["losses"]
    assert losses.keys() == SAME.keys()
    assert losses["parameters"][0] != losses["parameters"][2]
    assert all(found == losses["parameters"] for found in losses.values()), losses


def test_layers_that_are_recomputed_count_a_batch_once_and_under_autocast(report):
    assert len(report["recomputed"]["0"][1]) == 6  # buffers of both stages
    assert report["recomputed"]["0"] == report["recomputed"]["1"]


@pytest.mark.parametrize("case", ["clipped", "grouped"])
def test_the_norm_that_clips_is_that_of_all_stages(case, report):
    """DeepSpeed's own counts the first stage's gradients alone (0.19.8, fp32, stage 0). It adds norms up by group (ZeRO-1):
    a stage with parameter groups of its own waited for the other for ever."""
    found = report[case]["pipeline"]
    assert found == pytest.approx(report[case]["replicas"], abs=2e-6)
    assert found[0] != found[2]


def test_a_loss_scale_that_grows_changes_no_update(report):
    """DeepSpeed's ZeRO optimizers divide by the next step's scale (0.19.8): half the gradient."""
    scaled = report["scaled"]
    assert scaled["zero3"] == pytest.approx(scaled["replicas"], abs=5e-3)
    assert scaled["pipeline"] == pytest.approx(scaled["replicas"], abs=5e-3)


def test_a_stage_builds_its_own_layers_and_the_weight_that_it_shares(report):
    first, middle, end = report["built"]["bounds"]
    own = set(range(first, middle)), set(range(middle, end - 1)) | {0}
    assert [set(layers) for layers in report["built"]["layers"]] == list(own)
    assert [len(layers) for layers in report["built"]["layers"]] == [len(layers) for layers in own]
    assert report["built"]["aliases"] == {"5.weight": "0.weight"}


def test_stages_leave_an_update_out_together_and_refuse_together(report):
    assert report["not finite"]["said"] == [[True, True], [True, True]]
    assert all(
        "takes one tensor, and this task's inputs are a dict" in text for text in report["not finite"]["refused"]
    )


def test_stages_announce_sizes_only_where_inputs_do_not_tell_them(report):
    """To read an announcement the next stage's host waits for its device."""
    sizes = report["sizes"]
    assert sizes["needed"] == sizes["always"]
    assert sizes["announced always"] == [4, 4, 4, 4, 4]
    assert sizes["announced needed"] == [1, 0, 4, 1, 1]
    assert "for inputs of the same size; the inputs' size must determine the outputs' size" in sizes["refused"]


def test_what_stages_pass_on_may_be_several_tensors_without_gradients_or_uses(report):
    passed = report["passed"]
    assert passed["0"] == pytest.approx(passed["replicas"], abs=2e-6)
    assert passed["1"] == passed["0"]


def test_batch_norm_trains_in_16_bits(report):
    normed = report["normed"]
    assert normed["bf16"] == pytest.approx(normed["float32"], abs=0.02)
    assert normed["bf16"] != normed["float32"]


def test_a_llama_with_tied_embeddings_is_one_training_with_and_without_stages():
    alone, staged = (equivalence.train("tied llama", case, in_suite=True) for case in (SINGLE, CASES["pipeline"]))
    _, losses, weights = staged.differences(alone)
    assert losses < 1e-5
    assert weights < 2e-5


def test_a_loss_over_the_rows_of_all_ranks_is_refused(tmp_path):
    """It had the rows of its own column alone, without a word."""
    file = ds_config(
        8,
        "AdamW",
        0.01,
        sections={"gradient_accumulation_steps": 1, "pipeline": {"stages": 2}},
        task={"name": "tests.engines.padded_task:Gathering"},
        steps=2,
    )
    write_json(tmp_path / "file.json", file)
    command = warm(2, ["-m", "dsframe.train", "--config", "file.json"])
    finished = run_ranks(command, cwd=tmp_path, timeout_seconds=100)
    assert finished.returncode != 0
    assert "all_rows() is not possible with a pipeline" in finished.output
