"""The moments that a restart gives a fresh optimizer."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from dsframe.engines.deepspeed.state_flat import Piece, fill
from dsframe.errors import CheckpointError
from dsframe.model.state import EngineState, ParameterState
from tests.engines.snapshot import Snapshot


def test_pieces_lie_at_their_places_and_have_one_step_count():
    """Two last numbers of one parameter, then three of another."""
    flat = torch.zeros(5)
    optimizer = SimpleNamespace(state={flat: {}}, param_groups=[{}])
    pieces = [Piece("a", 0, 2, 1), Piece("b", 2, 3, 0)]
    weights = {"a": torch.tensor([0.0, 1.0, 2.0]), "b": torch.tensor([3.0, 4.0, 5.0])}
    for other in (7.0, 8.0):
        scalars = {"a": {"step": 7.0}, "b": {"step": other}}
        each = [ParameterState(name, weight, {"exp_avg": weight}, scalars[name]) for name, weight in weights.items()]
        saved = Snapshot(EngineState(7, None, {}, {}, iter(each)))
        if other == 7.0:
            fill(optimizer, flat, pieces, saved)
            assert flat.tolist() == optimizer.state[flat]["exp_avg"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
        else:
            with pytest.raises(CheckpointError, match="b has step count"):
                fill(optimizer, flat, pieces, saved)


def test_a_parameter_that_is_trained_anew_has_no_part_in_its_neighbours_step_count():
    flat = torch.zeros(4)
    optimizer = SimpleNamespace(state={flat: {}}, param_groups=[{}])
    head = ParameterState("head", torch.ones(2), {"exp_avg": torch.ones(2)}, {"step": 7.0})
    thawed = ParameterState("thawed", torch.ones(2), {}, {})
    saved = Snapshot(EngineState(7, None, {}, {}, iter([head, thawed])))
    with pytest.raises(CheckpointError, match=r"thawed has step count none.*lr_scale"):
        fill(optimizer, flat, [Piece("thawed", 0, 2, 0), Piece("head", 2, 2, 0)], saved)


def test_a_number_is_kept_where_there_is_nothing_else():
    """As a tensor where it was one, with an optimizer of a user's."""
    flat = torch.zeros(2)
    optimizer = SimpleNamespace(state=defaultdict(dict, {flat: {}}), param_groups=[{}])
    each = ParameterState("a", torch.ones(2), {}, {"count": 3, "step": [4]})
    fill(optimizer, flat, [Piece("a", 0, 2, 0)], Snapshot(EngineState(3, None, {}, {}, iter([each]))))
    held = optimizer.state[flat]
    assert (held["count"], held["step"]) == (3, torch.tensor(4))
    assert isinstance(held["step"], torch.Tensor)
