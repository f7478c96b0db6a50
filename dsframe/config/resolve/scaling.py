"""Learning rates for another batch size than the one they were found for: by how much, and the sentence that says so."""

from __future__ import annotations

import math

from dsframe.config.schema.settings_model import LargeBatch


def factor(wanted: LargeBatch, batch: int) -> float:
    """Returns what every learning rate is multiplied with when one step takes ``batch`` samples.

    "linear" is Goyal et al. 2017 (arXiv 1706.02677), made for SGD; "sqrt" is Krizhevsky 2014 (arXiv 1404.5997), and for Adam
    Malladi et al. 2022 (arXiv 2205.10287).
    """
    if wanted.lr_scaling == "none" or wanted.reference_batch_size is None:
        return 1.0
    ratio = batch / wanted.reference_batch_size
    return ratio if wanted.lr_scaling == "linear" else math.sqrt(ratio)


def sentence(wanted: LargeBatch, batch: int) -> str | None:
    """``learning rates x 4 (linear: batch 1,024 / reference 256)``; None where the file asks for no scaling."""
    if wanted.lr_scaling == "none" or wanted.reference_batch_size is None:
        return None
    steps = wanted.warmup_steps
    over = f"{steps:,} steps" if isinstance(steps, int) else f"{steps.epochs:g} epochs"
    ramp = f", growing from x 1 over {over}" if steps else ""
    how = f"{wanted.lr_scaling}: batch {batch:,} / reference {wanted.reference_batch_size:,}"
    return f"learning rates x {factor(wanted, batch):.4g} ({how}){ramp}"
