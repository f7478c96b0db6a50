"""The dictionary that ``deepspeed.initialize`` gets: the file, and what dsframe adds to it or takes away.

All of it happens in one function, which reads and changes nothing but the dictionary that it makes. What touches the machine
(the folders to swap to) or the model (its layers and its size) is found out before and comes as an argument.
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


def handover(
    plan: Plan,
    *,
    elements: int = 0,
    keeps_weights: bool = False,
    swap_paths: Mapping[str, str] | None = None,
    tensor_parallel: Mapping[str, Any] | None = None,
) -> Json:
    """What DeepSpeed is told. Pure: the same arguments give the same dictionary, and stay as they are.

    Args:
        plan: With the resolved configuration.
        elements: Of the model's parameters, for the sizes of buckets that the file does not name.
        keeps_weights: ZeRO-3 does not reshard weights after use (``Zero.keeps_whole``).
        swap_paths: ``offload_optimizer`` or ``offload_param`` -> this run's own folder.
        tensor_parallel: The section as ``tensor.completed`` returns it; None where the model is not split so.

    Raises:
        ConfigError: as ``Config.batch``.
    """
    document = plan.config.for_deepspeed(plan.world.size)
    for section in (*WATCHING, "scheduler"):  # dsframe does these itself, the same on every engine
        document.pop(section, None)
    document["optimizer"] = plan.optimizer.for_deepspeed()
    for section, folder in (swap_paths or {}).items():
        document["zero_optimization"][section]["nvme_path"] = folder
    if plan.device.type != "cpu" and not plan.verbose:
        # DeepSpeed 0.19.8 waits for the device twice in a micro-batch to time it (``utils/timer.py``: ThroughputTimer). dsframe has
        # its own rate, and nobody reads this one.
        document.setdefault("timers", {"throughput": {"enabled": False}})
    if "zero_optimization" in document:
        # It changes where gradients lie, and DeepSpeed 0.19.8 looks for each parameter's part as if it did not
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
    return copy.deepcopy(document)  # DeepSpeed writes into it, and parts of it are the task's and the optimizer's


def _stage_3(section: Json, plan: Plan, elements: int, keeps_weights: bool) -> None:
    if keeps_weights:
        section.update(dict.fromkeys(PERSISTENCE, SMALL))
    _gradients(section, plan)
    _bucket(section, plan, elements)
    zero = plan.config.deepspeed.zero_optimization
    section.update(zero.fetched_elements(elements, on_cpu=plan.device.type == "cpu"))


def _gradients(section: Json, plan: Plan) -> None:
    """Without the buffer that gradients are first copied to: it is against holes in a GPU's memory. What is sent, and when, is the
    same. Source: deepspeed 0.19.8, runtime/zero/stage3.py (__add_grad_to_ipg_bucket, __avg_scatter_grads) and stage_1_and_2.py
    (reduce_ipg_grads)."""
    if plan.device.type == "cpu" and not plan.config.deepspeed.copies_gradients_on_cpus:
        section["contiguous_gradients"] = False


def _bucket(section: Json, plan: Plan, elements: int) -> None:
    zero = plan.config.deepspeed.zero_optimization
    size = zero.bucket_elements(elements, on_cpu=plan.device.type == "cpu")
    if size != zero.reduce_bucket_size:
        section["reduce_bucket_size"] = size


def _pipeline(document: Json, plan: Plan) -> None:
    # Reentrant checkpointing fails where a stage's inputs are integers or need no gradient, as the first stage's do.
    document["pipeline"] = {**document.get("pipeline", {}), "use_reentrant": False}
    if not plan.verbose:
        document["steps_per_print"] = _NEVER  # the pipeline engine prints, whatever the log level, and divides by it


def _split(document: Json, plan: Plan, tensor_parallel: Mapping[str, Any] | None) -> None:
    if plan.batch.sequence_parallel_size > 1:  # DeepSpeed would divide by ranks that it need not know of
        for key in ("train_batch_size", "sequence_parallel_size", "data_parallel_size"):
            document.pop(key, None)
    if tensor_parallel is not None:
        document["tensor_parallel"] = dict(tensor_parallel)
        # DeepSpeed counts ranks that share layers in the batch size, but not at stage 3.
        document.pop("train_batch_size", None)
