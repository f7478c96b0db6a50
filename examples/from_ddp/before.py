"""A training loop with DistributedDataParallel, as many scripts have it: torchrun --nproc-per-node=2 before.py"""

import os

import torch
import torch.distributed as dist
from model import Net, images
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Trains for one epoch and prints the loss of rank 0."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    data = images()
    sampler = DistributedSampler(data, size, rank, shuffle=True)
    loader = DataLoader(data, batch_size=64 // size, sampler=sampler)
    for epoch in range(int(os.environ.get("EPOCHS", "1"))):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if rank == 0 and step % 5 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
