"""What test_switches.py runs on two ranks: engines with and without each switch, one after another.

    python -m tests.engines.switched REPORT.json [VARIANT ...]

All variants are compiled without kernels of their own, which take half a minute; those that are named, with them.
Rank 0 writes, by name of the variant: the losses of three steps, the collectives of a fourth, and how far the weights are from
those of the same engine without the switch.
"""

import functools
import os
import sys
from pathlib import Path

from dsframe.cluster import world as worlds
from dsframe.model.micro_batch import MicroBatch
from dsframe.run import settle_threads
from tests.files import ds_config, write_json

GPT = {"name": "language", "layers": 2, "heads": 2, "width": 32, "context": 16, "corpus": "synthetic", "samples": 64}
CNN = {"name": "vision", "dataset": "synthetic", "image_size": 16, "classes": 10, "samples": 64}
LISTS = {"name": "tests.engines.foreign_tasks:Filled"}
KEEP_NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
}


def zero(stage, accumulation=2, settings=None, **more):
    section = {"stage": stage, **(KEEP_NOTHING if stage == 3 else {})}
    return {
        "engine": "deepspeed",
        "accumulation": accumulation,
        "settings": settings or {},
        "zero_optimization": section,
        **more,
    }


def of(engine, accumulation=2, **settings):
    return {"engine": engine, "accumulation": accumulation, "settings": settings}


PIPELINE = {"stages": 2}
SOME = {"modules": ["Block", "*.expand"], "every": 2}
"""The first of two blocks."""
VARIANTS = {
    **{f"zero{stage} x {times}": zero(stage, times) for stage in range(4) for times in (1, 3)},
    "zero3": zero(3),
    "zero3, recomputed": zero(3, settings={"model": {"activation_checkpointing": True}}),
    "zero3, compiled": zero(3, settings={"model": {"compile": "blocks"}}),
    **{f"{engine} x {times}": of(engine, times) for engine in ("ddp", "fsdp") for times in (1, 3)},
    "ddp": of("ddp"),
    "ddp, recomputed": of("ddp", model={"activation_checkpointing": True}),
    "ddp, compiled, recomputed": of("ddp", model={"compile": "blocks", "activation_checkpointing": True}),
    "fsdp": of("fsdp"),
    "zero3, some recomputed": zero(3, settings={"model": {"activation_checkpointing": SOME}}),
    "ddp, some recomputed": of("ddp", model={"activation_checkpointing": SOME}),
    "fsdp, some recomputed": of("fsdp", model={"activation_checkpointing": SOME}),
    "pipeline, some recomputed": zero(1, pipeline=PIPELINE, settings={"model": {"activation_checkpointing": SOME}}),
    "fsdp, recomputed": of("fsdp", model={"activation_checkpointing": True}),
    "fsdp of lists": of("fsdp", task=LISTS),
    "fsdp of lists, compiled": of("fsdp", task=LISTS, model={"compile": True}),
    "pipeline": zero(1, pipeline=PIPELINE),
    "pipeline, recomputed": zero(1, pipeline=PIPELINE, settings={"model": {"activation_checkpointing": True}}),
    "ddp of images": of("ddp", task=CNN),
    "horovod of images, channels last": of("horovod", task=CNN, model={"channels_last": True}),
}


def file(variant):
    """The variant as a file: twelve samples a step, whatever the accumulation."""
    variant = dict(variant)
    variant.pop("engine")
    settings = {"task": GPT, "threads_per_rank": 1, **variant.pop("settings")}
    variant["gradient_accumulation_steps"] = variant.pop("accumulation")
    return ds_config(12, "AdamW", 1e-3, sections=variant, **settings)


def main(report, *chosen):
    settle_threads(worlds.here(), 1)
    import torch

    from tests.communication import Communication
    from tests.engines.several import one_process_group, prepare
    from tests.engines.snapshot import Snapshot

    torch.set_num_threads(1)
    if not chosen:
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    found = {}
    plain = {}
    with one_process_group():
        for name in chosen or VARIANTS:
            variant = VARIANTS[name]
            make, loader = prepare(file(variant), variant["engine"])
            engine = make()
            losses = [float(engine.train_step(MicroBatch.of(loader.micro_batches(step))).loss) for step in range(3)]
            weights = Snapshot(engine.state())
            # In step 4 ranks also compare which parameters the loss uses.
            engine.train_step(MicroBatch.of(loader.micro_batches(3)))
            reference = plain.setdefault(name.partition(",")[0], weights)
            # Not where a compiler would look at what looks.
            with Communication() as counted:
                engine.train_step(MicroBatch.of(loader.micro_batches(4)))
            found[name] = {
                "losses": losses,
                "names": list(weights.shapes) == list(reference.shapes),
                "distance": max(
                    float((weights.parameter(one).weight - reference.parameter(one).weight).abs().max())
                    for one in reference.shapes
                ),
                "collectives": {kind: traffic.calls for kind, traffic in counted.by_kind.items()},
            }
            del make, engine
        if worlds.here().is_main:
            write_json(report, found)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
