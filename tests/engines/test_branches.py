"""A parameter without a gradient on a rank has a zero one there: the same training on all engines, as on one process."""

import functools

import pytest
import torch

from dsframe.checkpoint import store
from dsframe.tools import export
from dsframe.tools.compare import losses
from tests import kept
from tests.engines.branches import file

BOUND = 1e-5
CASES = ("ddp", "deepspeed:0", "deepspeed:1", "deepspeed:2", "deepspeed:3", "fsdp", "horovod")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """The losses and the last weights of each training, once."""
    folder = tmp_path_factory.mktemp("branches")

    @functools.cache
    def trained(case, way, accumulation, ranks=2):
        run = folder / f"{case}-{way}-{accumulation}-{ranks}"
        kept.train(folder, file(case, way, accumulation, str(run)), ranks).check()
        return list(losses(run).values()), export.read(store.locate(run)[0])

    return trained


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("case", "way"),
    # At ZeRO-3, ranks that call different layers are told so: tests/faults/test_calls.py.
    [(case, way) for case in CASES for way in ("idle", "rows") if (case, way) != ("deepspeed:3", "rows")],
)
def test_a_parameter_that_takes_no_part_has_a_zero_gradient(case, way, accumulation, train):
    found, weights = train(case, way, accumulation)
    expected, wanted = train("single", way, 1, 1)
    assert found == pytest.approx(expected, rel=0, abs=BOUND)
    assert weights.keys() == wanted.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=BOUND)
