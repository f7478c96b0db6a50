"""The configuration that ``deepspeed.initialize`` gets: the file with dsframe's changes.

One function makes all changes. It reads and changes only the dictionary that it creates. What depends on the machine
(swap folders) or the model (layers and size) is computed before and passed in.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsframe.config.features import WATCHING
from dsframe.config.schema.zero import PERSISTENCE, SMALL
from dsframe.text import Json

if TYPE_CHECKING:
    from dsframe.model.plan import Plan

_NEVER = 2**62


def initialize_config(
    plan: Plan,
    *,
    elements: int = 0,
    keeps_weights: bool = False,
    swap_paths: Mapping[str, str] | None = None,
    tensor_parallel: Mapping[str, Any] | None = None,
) -> Json:
    """Returns DeepSpeed's configuration. Pure: the same arguments give the same dictionary and are not changed.

    Args:
        plan: With the resolved configuration.
        elements: Number of the model's parameters, for bucket sizes that the file does not set.
        keeps_weights: ZeRO-3 does not reshard weights after use (``Zero.keeps_whole``).
        swap_paths: ``offload_optimizer`` or ``offload_param`` -> this run's folder.
        tensor_parallel: The section as ``tensor.completed`` returns it; None without tensor parallelism.

    Raises:
        ConfigError: as ``Config.batch``.
    """
    document = plan.config.for_deepspeed(plan.world.size)
    for section in (*WATCHING, "scheduler"):  # dsframe implements these itself, the same on every engine
        document.pop(section, None)
    document["optimizer"] = plan.optimizer.for_deepspeed()
    for section, folder in (swap_paths or {}).items():
        document["zero_optimization"][section]["nvme_path"] = folder
    if plan.device.type != "cpu" and not plan.verbose:
        # To measure throughput, DeepSpeed 0.19.8 waits for the device twice per micro-batch (``utils/timer.py``:
        # ThroughputTimer). dsframe computes its own rate.
        document.setdefault("timers", {"throughput": {"enabled": False}})
    if "zero_optimization" in document:
        # The option moves gradients, but DeepSpeed 0.19.8 looks for each parameter's part at the old position
        # (``runtime/zero/stage_1_and_2.py``: round_robin_bit16_groups and tensor_fragment's mapping).
        document["zero_optimization"].pop("round_robin_gradients", None)
    if plan.config.deepspeed.zero_optimization.stage == 3:
        _stage_3(document["zero_optimization"], plan, elements, keeps_weights)
    elif plan.config.deepspeed.zero_optimization.stage:
        _gradients(document["zero_optimization"], plan)
        _bucket(document["zero_optimization"], plan, elements)
    if plan.device.type == "cpu" and "expert_parallel" in document:  # one product for all experts is for GPUs
        document["expert_parallel"] = {**document["expert_parallel"], "use_grouped_mm": False}
    if plan.config.deepspeed.pipeline.stages > 1:
        _pipeline(document, plan)
    else:
        _split(document, plan, tensor_parallel)
    return copy.deepcopy(document)  # DeepSpeed writes into it, and parts of it belong to the task and the optimizer


def _stage_3(section: Json, plan: Plan, elements: int, keeps_weights: bool) -> None:
    if keeps_weights:
        section.update(dict.fromkeys(PERSISTENCE, SMALL))
    _gradients(section, plan)
    _bucket(section, plan, elements)
    zero = plan.config.deepspeed.zero_optimization
    section.update(zero.fetched_elements(elements, on_cpu=plan.device.type == "cpu"))


def _gradients(section: Json, plan: Plan) -> None:
    """Disables the buffer that gradients are copied to: it prevents fragmentation of GPU memory. What is sent, and
    when, is the same. Source: deepspeed 0.19.8, runtime/zero/stage3.py (__add_grad_to_ipg_bucket, __avg_scatter_grads)
    and stage_1_and_2.py (reduce_ipg_grads)."""
    if plan.device.type == "cpu" and not plan.config.deepspeed.copies_gradients_on_cpus:
        section["contiguous_gradients"] = False


def _bucket(section: Json, plan: Plan, elements: int) -> None:
    zero = plan.config.deepspeed.zero_optimization
    size = zero.bucket_elements(elements, on_cpu=plan.device.type == "cpu")
    if size != zero.reduce_bucket_size:
        section["reduce_bucket_size"] = size


def _pipeline(document: Json, plan: Plan) -> None:
    # Reentrant checkpointing fails if a stage's inputs are integers or need no gradient, as the first stage's.
    document["pipeline"] = {**document.get("pipeline", {}), "use_reentrant": False}
    if not plan.verbose:
        document["steps_per_print"] = _NEVER  # the pipeline engine prints at any log level, and divides by it


def _split(document: Json, plan: Plan, tensor_parallel: Mapping[str, Any] | None) -> None:
    if plan.batch.sequence_parallel_size > 1:  # DeepSpeed would divide by ranks that it does not need to know
        for key in ("train_batch_size", "sequence_parallel_size", "data_parallel_size"):
            document.pop(key, None)
    if tensor_parallel is not None:
        document["tensor_parallel"] = dict(tensor_parallel)
        # DeepSpeed includes ranks that split layers in the batch size, except at stage 3.
        document.pop("train_batch_size", None)
