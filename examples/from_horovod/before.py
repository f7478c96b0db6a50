"""A Horovod script as the tutorials of 2021 have it: horovodrun -np 2 python before.py"""

import horovod.torch as hvd
import torch
from model import Net, points
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Trains for two epochs and prints the loss of rank 0."""
    hvd.init()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = points()
    sampler = DistributedSampler(data, hvd.size(), hvd.rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
