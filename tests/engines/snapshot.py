"""A saved state in memory, for tests: every rank holds all of it."""

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
