"""Orders forward hooks at ZeRO-3: the user's run after the one that wraps outputs.

DeepSpeed wraps a module's outputs in a function whose backward pass gathers the weights. A user's hook that was
registered before sees unwrapped outputs. If it keeps them (features, attention), the layer's backward pass would run
without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def noting_users_hooks(modules: Iterable[nn.Module]) -> Callable[[Any], None]:
    """Records the user's forward hooks on those ``modules`` that have weights themselves. Returns a function, to be
    called when DeepSpeed's engine exists. It moves the hooks between the one that wraps outputs and the one that
    releases the weights, which a user's hook may read."""
    hooked = (module for module in modules if module._forward_hooks and module._parameters)
    of_modules = {module: [key for key, hook in module._forward_hooks.items() if _is_users(hook)] for module in hooked}
    users = {module: keys for module, keys in of_modules.items() if keys}

    def reorder(engine: Any) -> None:
        if not users:
            return
        # For a frozen model ``engine.optimizer`` is the offload object itself.
        offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        releasing = {handle.id for handle in offload.forward_hooks}
        for module, keys in users.items():
            hooks = module._forward_hooks
            for key in (*keys, *releasing.intersection(hooks)):
                hooks[key] = hooks.pop(key)

    return reorder


def _is_users(hook: Any) -> bool:
    return not (getattr(hook, "__module__", None) or "").startswith("dsframe.")
