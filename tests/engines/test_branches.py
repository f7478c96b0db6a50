"""A parameter without a gradient on a rank has a zero one there: the same training on all engines, as on one process."""

from functools import partial

import pytest

from tests.processes import horovodrun, python, reported

BOUND = 1e-5
CASES = {
    "ddp": ["ddp"],
    "deepspeed": [f"deepspeed:{how}" for how in ("0", "1", "2", "3")],
    "fsdp": ["fsdp"],
    "horovod": ["horovod"],
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """One process; and of Horovod, which waits for nothing, what one process cannot be: a branch for each rank."""
    folder = tmp_path_factory.mktemp("expected")
    by_rank = reported("branches", folder, partial(horovodrun, 2), ["horovod"])["horovod"]
    return by_rank | reported("branches", folder, python, ["single"])["single"]


@pytest.mark.parametrize("engine", CASES)
def test_a_parameter_that_takes_no_part_has_a_zero_gradient(engine, expected, tmp_path):
    launch = partial(horovodrun, 2) if engine == "horovod" else 2
    found = reported("branches", tmp_path, launch, CASES[engine])
    for case, trainings in found.items():
        assert trainings.keys() == {name for name in expected if case != "deepspeed:3" or name.startswith("idle")}
        for name, one in trainings.items():
            assert one["losses"] == pytest.approx(expected[name]["losses"], rel=0, abs=BOUND), (case, name)
            for parameter, weights in one["weights"].items():
                wanted = expected[name]["weights"][parameter]
                assert weights == pytest.approx(wanted, rel=0, abs=BOUND), (case, name, parameter)
