"""Training loops as people write them, with nothing of dsframe's but the model: one contestant of ``benchmarks.compare`` each.

    LAUNCHER benchmarks/by_hand.py KIND WORKLOAD SOCKET     # KIND: ddp, fsdp, zero1, zero2, zero3, zero3-kept, pipeline, horovod

Each follows its library's own tutorial. Images go through torchvision's transforms as PIL images, one by one, as in nearly every
example there is.
"""

import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import workloads
from benchmarks.gate import Gate
from benchmarks.workloads import ADAMW, CLIP, GLOBAL_BATCH

MICRO = 4
"""Micro-batches of a pipeline's step."""


def ddp(name, gate):
    """https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html"""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(workloads.model(name))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for inputs, targets in workloads.loader(name, dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        loss = gate.loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def fsdp(name, gate):
    """https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = workloads.model(name)
    for layer in model.children():
        if type(layer).__name__ in ("Block", "Sequential") and any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for inputs, targets in workloads.loader(name, dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        loss = gate.loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def _config(name, stage, micro, ranks):
    return {
        "train_batch_size": GLOBAL_BATCH[name],
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH[name] // micro // ranks,
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": CLIP,
    }


def _deepspeed():
    import deepspeed
    import deepspeed.ops

    # An op that training never uses, that takes a minute to compile and leaves 66 MiB a rank in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    return deepspeed


def zero(stage, name, gate, *, kept=False):
    """https://www.deepspeed.ai/getting-started/; AdamW is DeepSpeed's own compiled one, which is its default.

    ``kept``: all parameters stay whole between steps, and not only the small ones as by default.
    """
    deepspeed = _deepspeed()
    model = workloads.model(name)
    ranks = dist.get_world_size()
    config = _config(name, stage, 1, ranks)
    if kept:
        keys = ("stage3_param_persistence_threshold", "stage3_model_persistence_threshold")
        config["zero_optimization"].update(dict.fromkeys(keys, 1 << 23))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for inputs, targets in workloads.loader(name, dist.get_rank(), ranks):
        loss = gate.loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()


def pipeline(name, gate):
    """https://www.deepspeed.ai/tutorials/pipeline/: two stages, cut by parameters."""
    deepspeed = _deepspeed()
    from deepspeed.pipe import PipelineModule

    ranks = dist.get_world_size()
    module = PipelineModule(list(workloads.model(name).children()), num_stages=ranks, loss_fn=gate.loss)
    for parameter in module.parameters():  # else DeepSpeed 0.19.8 clips by the norm of the first stage alone
        parameter.model_parallel = True
    engine, *_ = deepspeed.initialize(model=module, config=_config(name, 0, MICRO, 1))
    batches = iter(workloads.loader(name, 0, 1, micro=MICRO))
    for _ in itertools.count():
        engine.train_batch(batches)


def horovod(name, gate):
    """https://horovod.readthedocs.io/en/stable/pytorch.html

    Without ``broadcast_optimizer_state``: on a new optimizer it takes a hidden step, and the losses would be others.
    """
    import horovod.torch as hvd

    hvd.init()
    model = workloads.model(name)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for inputs, targets in workloads.loader(name, hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        loss = gate.loss(model(inputs), targets)
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with optimizer.skip_synchronize():
            optimizer.step()


def main(arguments):
    kind, name, path = (word for word in arguments if not word.startswith("--local_rank"))
    gate = Gate(path, f"{kind} by hand", MICRO if kind == "pipeline" else 1)
    if kind.startswith("zero"):
        zero(int(kind[4]), name, gate, kept=kind.endswith("-kept"))
    else:
        {"ddp": ddp, "fsdp": fsdp, "pipeline": pipeline, "horovod": horovod}[kind](name, gate)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main(sys.argv[1:])
