"""What a run was predicted to take, to be put beside what it took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dsframe.plan import hardware as machines
from dsframe.plan.predict import predict
from dsframe.plan.trace import traced
from dsframe.tasks.task import Task

if TYPE_CHECKING:
    from dsframe.config import Config


def predicted(
    config: Config, engine: str, task: Task, world_size: int, device: torch.device, base_bytes: int
) -> dict[str, Any]:
    """Memory of the fullest rank, bytes it sends in a step and, where the machine is known, seconds of a step.

    ``base_bytes``: what the process held before the engine was made; 0 on a GPU, whose peak counts torch's own tensors alone.
    A model that cannot be planned says why instead.
    """
    machine = machine_of(config, device)
    try:
        found = predict(config, engine, traced(config, task), machine, world_size)
    except Exception as error:  # the training went well: a prediction is no reason to fail after it
        return {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    memory = found.memory
    return {
        "memory_bytes": round(memory.total - memory.reserved + base_bytes),
        "base_bytes": base_bytes,
        "states_bytes": round(memory.states),
        "activation_bytes": round(memory.activations),
        "buffer_bytes": round(memory.buffers),
        "sent_bytes_per_step": {name: round(size) for name, size in found.sent.items()},
        "flops_per_step": round(found.flops),
        "seconds_per_step": found.seconds.step if machine.name != machines.UNKNOWN else None,
        "communication_seconds_per_step": found.seconds.collectives if machine.name != machines.UNKNOWN else None,
        "hardware": machine.name,
    }


def machine_of(config: Config, device: torch.device) -> machines.Hardware:
    """As the file says (``dsframe.hardware``), else by the GPU's name; else one whose times mean nothing."""
    if config.settings.hardware:
        return machines.find(config.settings.hardware)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower()
        known = [machine for machine in machines.TABLE.values() if machine.name in name.replace("-", "").split()]
        return known[0] if known else machines.unknown(on_gpu=True)
    return machines.unknown(on_gpu=False)
