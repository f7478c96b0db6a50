"""Both forms of a checkpoint, at once and in the background, from real engines: what is in them, and what goes on from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsframe.checkpoint.store import read_manifest
from dsframe.tools import export
from tests.engines.test_round_trips import BF16, CPU, PIPELINE, also_long, configuration, zero
from tests.processes import run_ranks, warm
from tests.unit.test_generate import TASKS

SETUPS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero1": (2, "deepspeed", zero(1)),
    "zero2-bf16": (2, "deepspeed", {**zero(2), **BF16}),
    "zero3": (3, "deepspeed", {**zero(3, sub_group_size=200), "train_batch_size": 6, "gradient_accumulation_steps": 1}),
    "zero3-cpu": (2, "deepspeed", {**zero(3, **CPU), **BF16}),
    "fsdp": (2, "fsdp", {"dsframe": {"fsdp": {"wrap": ["Linear"]}}}),
    "fsdp-hybrid": (
        4,
        "fsdp",
        {"dsframe": {"fsdp": {"sharding": "hybrid", "shard_size": 2}}, "gradient_accumulation_steps": 1},
    ),
    "pipeline-bf16": (2, "deepspeed", {**PIPELINE, **BF16}),
    "pipeline": (2, "deepspeed", PIPELINE),
    "pipeline-zero1": (4, "deepspeed", {**PIPELINE, **zero(1)}),
}


SLACK_BYTES = 24 << 20
WHOLE = {"pipeline", "pipeline-bf16"}
"""Each parameter is on one rank."""
LONG_SETUPS = {"zero2-bf16", "fsdp", "pipeline-bf16"}


@pytest.mark.parametrize("case", also_long(SETUPS, LONG_SETUPS))
def test_every_form_holds_the_same_state(case: str, tmp_path: Path) -> None:
    ranks, engine, changes = SETUPS[case]
    report = forms(ranks, configuration(engine, changes, 19), tmp_path)
    sharded = [number for name, number in report["formats"].items() if name.startswith("sharded")]
    assert sharded == [2 if case in WHOLE else 3] * 2  # whole replicas have no pieces
    # Where a rank holds all of a parameter it writes it: the same tensors, in other files.
    assert report["same files"] == (case in ("zero3", "zero3-cpu", "fsdp", "fsdp-hybrid")), report["engine"]
    assert report["exchanges"] == report["in place"] == (case not in WHOLE)


def forms(ranks: int, config: dict[str, Any], folder: Path, timeout_seconds: float = 150) -> dict[str, Any]:
    """Runs tests.engines.forms; whatever the engine, each form holds the state and goes on from it."""
    (folder / "config.json").write_text(json.dumps(config))
    command = warm(ranks, ["-m", "tests.engines.forms", "config.json"])
    run_ranks(command, timeout_seconds=timeout_seconds, cwd=folder).check()
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert report["differences"] == {name: [] for name in report["differences"]}
    assert report["damaged"] == []
    assert report["same files in place"]
    assert len(report["after"]) == 4
    for name, (losses, equal) in report["repeated"].items():
        assert all(losses == after for after in report["after"]), name
        assert equal, name
    assert list(report["refused"]) == list(report["differences"])
    for text in report["refused"].values():
        assert "cannot be written: rank 1: " in text
        assert "No space left on device; the last good one is run/step-00000004" in text
    assert report["left"] == ["latest", *(f"step-{step:08}" for step in range(1, 5))]
    return report


def test_a_save_takes_a_window_and_a_load_its_own_pages(tmp_path: Path) -> None:
    """Of a parameter that is far larger than the window."""
    config = configuration("deepspeed", zero(3), 4000)
    (tmp_path / "config.json").write_text(json.dumps(config))
    run_ranks(warm(2, ["-m", "tests.engines.save_memory", "config.json"]), timeout_seconds=150, cwd=tmp_path).check()
    report = json.loads((tmp_path / "report.json").read_text())
    window, share = report["window"], report["share"]
    assert report["portable"] < 4 * window + SLACK_BYTES < share
    assert report["sharded"] < SLACK_BYTES
    assert report["portable, kept"] < share + 4 * window + SLACK_BYTES
    assert report["portable, loaded"] < 1.1 * share + SLACK_BYTES
    assert report["sharded, loaded"] < 1.1 * share + SLACK_BYTES


def test_a_rank_that_is_gone_ends_the_exchange(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configuration("deepspeed", zero(3), 19)))
    command = warm(2, ["-m", "tests.engines.lost_peer", "config.json"])
    run_ranks(command, timeout_seconds=60, cwd=tmp_path).check()
    assert (tmp_path / "report.txt").read_text() == "[]"


def test_both_forms_become_the_same_folders_of_transformers_and_of_deepspeed(tmp_path: Path) -> None:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for form in ("portable", "sharded"):
        words = ["--config", "zero3.json", "--engine", "fsdp", "--run-dir", form, "--set", "dsframe.steps=2"]
        words += ["--set", f"dsframe.checkpoints.form={form}", "--set", f"dsframe.task={json.dumps(TASKS['llama'])}"]
        run_ranks(warm(2, ["-m", "dsframe.train", *words]), cwd=tmp_path, timeout_seconds=150).check()
        manifest = read_manifest(tmp_path / form / "checkpoints" / "step-00000002")
        assert any(one.get("pieces") for one in manifest["parameters"].values()) == (form == "sharded")
        tensors: dict[str, torch.Tensor] = {}
        for to in ("huggingface", "universal"):
            out = tmp_path / f"{form}-{to}"
            assert export.main([str(tmp_path / form), "--to", to, "--out", str(out)]) == 0
            for path in sorted(out.rglob("*.safetensors")):
                tensors |= {f"{path.name}/{name}": value for name, value in load_file(path).items()}
            for path in (*sorted(out.rglob("fp32.pt")), *sorted(out.rglob("exp_avg.pt"))):
                tensors[str(path.relative_to(out))] = torch.load(path)["param"]
        found[form] = tensors
    assert found["portable"].keys() == found["sharded"].keys()
    assert len(found["portable"]) > 50
    assert all(torch.equal(value, found["sharded"][name]) for name, value in found["portable"].items())
