"""Ranks as threads, for what asks an engine only for its plan and for sums over ranks."""

import threading
from dataclasses import dataclass
from types import SimpleNamespace

import torch


@dataclass
class Room:
    """Ranks as threads. A rank that waits for another more than ten seconds raises BrokenBarrierError."""

    size: int

    def __post_init__(self):
        self.barrier = threading.Barrier(self.size)
        self.values = [torch.zeros(0)] * self.size

    def run(self, action):
        results = [None] * self.size

        def one(rank):
            def sum_over_ranks(values):
                self.values[rank] = values
                self.barrier.wait(10)
                total = torch.stack(self.values).sum(0)
                self.barrier.wait(10)
                return total

            world = SimpleNamespace(rank=rank, size=self.size, local_size=self.size, is_main=rank == 0)
            plan = SimpleNamespace(world=world, device=torch.device("cpu"))
            results[rank] = action(SimpleNamespace(plan=plan, sum_over_ranks=sum_over_ranks))

        threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
