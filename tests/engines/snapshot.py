"""A saved state in memory, for tests: every rank holds all of it."""

import math

import torch

from dsframe.model.state import ParameterState, narrowed


class Snapshot:
    """A copy of everything, as :class:`dsframe.model.state.SavedState`."""

    def __init__(self, state):
        """**Collective.** Reads ``state`` to its end."""
        self.updates, self.loss_scale = state.updates, state.loss_scale
        self._buffers = {name: buffer.detach().cpu().clone() for name, buffer in state.buffers.items()}
        self._parameters = {
            parameter.name: ParameterState(
                parameter.name,
                parameter.weight.detach().cpu().clone(),
                {key: moment.detach().cpu().clone() for key, moment in parameter.moments.items()},
                dict(parameter.scalars),
            )
            for parameter in state.parameters
        }

    @property
    def shapes(self):
        """Every parameter's full shape."""
        return {name: tuple(parameter.weight.shape) for name, parameter in self._parameters.items()}

    @property
    def resized(self):
        """No buffer: those of the state have the model's shapes."""
        return ()

    def buffers(self):
        """The model's persistent buffers."""
        return self._buffers

    def parameter(self, name):
        """One parameter."""
        return self._parameters[name]

    def part(self, name, first, size):
        """A range of one parameter."""
        return narrowed(self._parameters[name], first, size)


def apart(left, right, of=lambda state, name: state.parameter(name)):
    """The largest difference between two states, whose names, shapes, dtypes and scalars are the same."""
    mine, theirs = ({name: list(shape) for name, shape in one.shapes.items()} for one in (left, right))
    assert mine == theirs, (mine, theirs)
    largest = 0.0
    for name in left.shapes:
        a, b = of(left, name), of(right, name)
        assert dict(a.scalars) == dict(b.scalars), (name, a.scalars, b.scalars)
        assert list(a.moments) == list(b.moments), (name, list(a.moments), list(b.moments))
        for one, other in ((a.weight, b.weight), *((a.moments[key], b.moments[key]) for key in a.moments)):
            torch.testing.assert_close(one, other, rtol=0, atol=float("inf"))  # dtypes and shapes
            largest = max(largest, float((one - other).abs().max()))
    return largest


def middle(state, name):
    """A parameter without its first and last third, read by itself."""
    size = math.prod(state.shapes[name])
    return state.part(name, size // 3, size - 2 * (size // 3))
