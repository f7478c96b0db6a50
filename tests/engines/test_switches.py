"""Switches on real engines: the same training with and without, and no more communication than a step needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.files import read_json
from tests.processes import run_ranks, warm


def switched(folder, *variants):
    """The report on these variants, or on all."""
    report = folder / "report.json"
    run_ranks(warm(2, ["-m", "tests.engines.switched", str(report), *variants]), timeout_seconds=400).check()
    return read_json(Path(report))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """One job of two ranks for all of them."""
    return switched(tmp_path_factory.mktemp("switched"))


@pytest.mark.timeout(450)
@pytest.mark.parametrize("how", ["recomputed", "some recomputed"])
@pytest.mark.parametrize("engine", ["zero3", "ddp", "fsdp", "pipeline"])
def test_recomputation_is_the_same_training_to_the_last_bit(found, engine, how):
    plain, recomputed = found[engine], found[f"{engine}, {how}"]
    assert recomputed["losses"] == plain["losses"]
    assert (recomputed["distance"], recomputed["names"]) == (0.0, True)
    once, again = (
        {kind: count for kind, count in one["collectives"].items() if kind != "all-gather"}
        for one in (plain, recomputed)
    )
    assert sum(once.values()) > 0
    assert again == once, "parameters may be gathered more or less often, gradients and activations are sent as before"


COMPILED = ("zero3, compiled", "ddp, compiled, recomputed")


@pytest.mark.parametrize("name", [*COMPILED, "fsdp of lists, compiled"])
def test_what_is_compiled_is_the_same_training(found, name):
    check_compiled(found, name)


@pytest.mark.long
def test_other_kernels_sum_in_another_order(tmp_path):
    found = switched(tmp_path, "zero3", "ddp", *COMPILED)
    for name in COMPILED:
        check_compiled(found, name)


def check_compiled(found: dict[str, Any], name: str) -> None:
    plain, switched = found[name.partition(",")[0]], found[name]
    assert switched["losses"] == pytest.approx(plain["losses"], abs=5e-6)
    assert switched["names"]
    assert switched["distance"] < 1e-5


def test_horovod_takes_channels_last(found):
    name = "horovod of images, channels last"
    assert found[name]["losses"] == pytest.approx(found["ddp of images"]["losses"], abs=5e-6)
    assert found[name]["collectives"] == {"all-reduce": 1}, "one bucket, once with two micro-batches"


@pytest.mark.parametrize("engine", ["zero0", "zero1", "ddp"])
def test_accumulation_reduces_once_in_a_step(found, engine):
    assert found[f"{engine} x 1"]["collectives"]["all-reduce"] >= 1
    assert found[f"{engine} x 3"]["collectives"] == found[f"{engine} x 1"]["collectives"]


def test_deepspeed_reduces_sharded_gradients_each_time_and_fsdp_once_a_step(found):
    def counts(name, kind):
        return int(found[name]["collectives"].get(kind, 0))

    assert counts("zero2 x 3", "all-reduce") - counts("zero2 x 1", "all-reduce") == 2
    assert counts("zero3 x 3", "reduce-scatter") == 3 * counts("zero3 x 1", "reduce-scatter")
    assert counts("fsdp x 3", "reduce-scatter") == counts("fsdp x 1", "reduce-scatter")
