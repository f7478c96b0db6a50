"""Where DeepSpeed's engine takes another step than every other engine would: mended, on its own objects."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from dsframe.engines import precision
from dsframe.engines.library import clip_grad_norm_


def keep_norm(engine: Any) -> None:
    """At stage 0 in fp32, where DeepSpeed forgets the norm by which it clips, and takes none where it does not clip.

    Source: deepspeed 0.19.8, ``runtime/engine.py`` (_take_model_step, clip_fp32_gradients).
    """
    if engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization():
        return
    limit = engine.gradient_clipping() or math.inf  # of which nothing is clipped, and every gradient times 1.0

    def clip() -> None:
        engine._global_grad_norm = clip_grad_norm_(engine.module.parameters(), max_norm=limit, mpu=engine.mpu)

    engine.gradient_clipping, engine.clip_fp32_gradients = lambda: limit, clip


def scale_until_updated(optimizer: Any) -> None:
    """Where fp16's loss scale has grown, DeepSpeed divides by the new one gradients that were multiplied by the old one.

    So the scale moves when the update is done, as on every other engine. Source: deepspeed 0.19.8,
    ``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` (step, unscale_and_clip_grads).
    """
    if not getattr(optimizer, "dynamic_loss_scale", False):
        return
    move, update, told = optimizer._update_scale, optimizer.step, list[bool]()

    def step(*arguments: Any, **keywords: Any) -> Any:
        result = update(*arguments, **keywords)
        while told:
            move(told.pop())
        return result

    optimizer._update_scale, optimizer.step = told.append, step


def look_before_each_step(engine: Any) -> None:
    """At stage 0 in fp32, where DeepSpeed updates whatever the gradients are, leaves updates out as it does everywhere else.

    DeepSpeed's engine asks its optimizer for ``overflow`` after each step. Source: deepspeed 0.19.8, ``runtime/engine.py``
    (_take_model_step); the ZeRO optimizers look at the norm (``runtime/zero/stage_1_and_2.py``, ``stage3.py``: step).
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "overflow"):
        return
    update = optimizer.step

    def guarded(*arguments: Any, **keywords: Any) -> Any:
        gradients = precision.gradients_of([p for group in optimizer.param_groups for p in group["params"]])
        norm = precision.clip(gradients, 0.0, always=True)
        if engine.mpu is not None and norm is not None:
            # Ranks that split one model have other gradients, and one answer.
            dist.all_reduce(norm, group=engine.mpu.get_model_parallel_group())
        optimizer.overflow = not precision.finite(norm)
        return None if optimizer.overflow else update(*arguments, **keywords)

    optimizer.step = guarded
