"""What a run was predicted to take, to be put beside what it took; and what its model needs, beside what the machine can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dsframe.engines import precision
from dsframe.plan import hardware as machines
from dsframe.plan.predict import predict
from dsframe.plan.trace import traced
from dsframe.report.flops import amount
from dsframe.report.utilization import Utilization, peak_flops
from dsframe.tasks.task import Task

if TYPE_CHECKING:
    from dsframe.config import Config
    from dsframe.engine import Engine


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


def utilization(engine: Engine, say: Callable[[str], None]) -> Utilization | None:
    """**Collective.** For model FLOPs utilization, and says relative to what it is; None where the model cannot be traced."""
    plan = engine.plan
    dtype = precision.autocast_dtype(plan.config, plan.device) or precision.parameter_dtype(plan.config)
    each, problem = 0.0, ""
    if plan.world.is_main:
        try:
            rows = plan.batch.micro_batch_size
            each = traced(plan.config, plan.task).flops(rows) / rows / plan.task.units_per_sample
        except Exception as error:  # no reason not to train
            problem = " ".join(str(error).split())
    # Behind a collective, so that all ranks measure at once, as they will compute.
    own = engine.sum_over_ranks(torch.tensor([each], dtype=torch.float64, device=plan.device))
    each = float(own)
    peak = torch.tensor([peak_flops(dtype, plan.device)], dtype=torch.float64, device=plan.device)
    found = Utilization(each, float(engine.sum_over_ranks(peak)))
    if not each:
        say(f"dsframe: no MFU: {problem or 'the model does no products of matrices'}")
        return None
    kind = str(dtype).removeprefix("torch.")
    say(
        f"dsframe: MFU is relative to {amount(found.peak_flops)}FLOP/s, measured now: products of {kind} matrices on "
        f"{plan.world.size} rank(s) at once; the model needs {amount(each * plan.task.units_per_sample)}FLOP a sample"
    )
    return found
