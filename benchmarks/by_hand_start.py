"""What one writes without dsframe: the shortest script that takes a training step, to be timed by ``benchmarks.startup``.

    torchrun --nproc-per-node=2 benchmarks/by_hand_start.py zero3

Prints the time (seconds since 1970) at which rank 0's first step has ended.
"""

import os
import sys
import time


def main(engine):
    """One step of a small CNN on ``ddp``, ``zero1``, ``zero3`` or ``horovod``, as the libraries' documentation has it."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(7744, 10),
    )
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    rank = int(os.environ.get("RANK", "0"))
    if engine.startswith("zero"):
        import deepspeed

        config = {
            "train_batch_size": 128,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": int(engine[-1])},
        }
        deepspeed.init_distributed()
        ready, *_ = deepspeed.initialize(model=model, config=config)
        loss = nn.functional.cross_entropy(ready(images), labels)
        ready.backward(loss)
        ready.step()
        leave = torch.distributed.destroy_process_group
    else:
        optimizer = torch.optim.AdamW(model.parameters())
        if engine == "horovod":
            import horovod.torch as hvd

            hvd.init()
            rank, leave = hvd.rank(), hvd.shutdown
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        else:
            torch.distributed.init_process_group("gloo")
            model, leave = nn.parallel.DistributedDataParallel(model), torch.distributed.destroy_process_group
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    float(sum(parameter.sum() for parameter in model.parameters()))
    if rank == 0:
        print(f"first step ended at {time.time():.3f}", flush=True)
    leave()
    os._exit(0)  # DeepSpeed's threads at times abort a regular exit, and the start is over


if __name__ == "__main__":
    main(next(word for word in sys.argv[1:] if not word.startswith("--")))
