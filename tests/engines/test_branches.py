"""A parameter without a gradient on a rank has a zero one there: the same training on all engines, as on one process."""

import pytest

from tests.processes import reported

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
    by_rank = reported("branches", folder, 2, ["horovod"])["horovod"]
    return by_rank | reported("branches", folder, 1, ["single"])["single"]


@pytest.mark.parametrize("engine", CASES)
def test_a_parameter_that_takes_no_part_has_a_zero_gradient(engine, expected, tmp_path):
    found = reported("branches", tmp_path, 2, CASES[engine])
    for case, trainings in found.items():
        assert trainings.keys() == {name for name in expected if case != "deepspeed:3" or name.startswith("idle")}
        for name, one in trainings.items():
            assert one["losses"] == pytest.approx(expected[name]["losses"], rel=0, abs=BOUND), (case, name)
            for parameter, weights in one["weights"].items():
                wanted = expected[name]["weights"][parameter]
                assert weights == pytest.approx(wanted, rel=0, abs=BOUND), (case, name, parameter)
