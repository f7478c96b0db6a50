"""Parameter groups, adapters and averages of weights are the same on every engine: losses, norms, states, and the way
to and from one process.

Beside torch's own groups: tests/engines/test_ports.py.
"""

import pytest

from tests.engines.groups import CASES
from tests.engines.test_tensor import BF16_NOISE, NOISE, check_round_trips, distance
from tests.processes import reported


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return reported("groups", tmp_path_factory.mktemp("groups"), 2, CASES)


@pytest.mark.parametrize("case", CASES)
def test_groups_are_those_of_one_process(case, reports):
    report = reports[case]
    noise = BF16_NOISE if "bf16" in case else NOISE
    assert report["before"] == 0.0
    assert distance(report["alone"], report["cut"], 0) < noise["loss"]
    # An adapter has learned what it can after four steps; in bf16 the gradients that are left are rounding.
    steps = 4 if case.startswith("adapter") and "bf16" in case else 6
    assert distance(report["alone"][:steps], report["cut"][:steps], 1) < noise["norm"]
    learned = 0.99 if "adapter" in case else 0.9  # which begins as nothing
    assert report["alone"][-1][0] < learned * report["alone"][0][0], "it has learned something"
    check_round_trips(report, noise)
    (whole, alone), (right, loss) = report["averaged"]
    assert whole
    assert right, "inside the averages are the weights, and afterwards everything is as it was"
    assert abs(loss - alone) < noise["loss"]
    assert abs(loss - report["evaluated"][1]) > 1e-3, "the averages are not the weights"
