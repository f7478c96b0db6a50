"""What test_references.py runs on every rank: the ring all-reduce by hand beside torch's own.

torchrun --nproc-per-node=3 -m tests.engines.ring
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dsframe.cluster import process_group, world
from dsframe.train import leave_at_once
from reference_engines.ring import ring_all_reduce

SIZES = (1, 2, 3, 7, 9, 1000)
"""Numbers to add up: fewer than ranks, as many, such as ranks do and do not divide."""


def main() -> None:
    here = world.here()
    process_group.open_process_group(here, torch.device("cpu"))
    for size in SIZES:
        flat = torch.randint(-1000, 1000, (size,), generator=torch.Generator().manual_seed(here.rank)).float()
        expected = flat.clone()
        dist.all_reduce(expected)
        ring_all_reduce(flat, here.rank, here.size)
        assert torch.equal(flat, expected), (size, here.rank)
    process_group.close_process_group()
    if here.is_main:
        print(f"equal: {len(SIZES)} sizes on {here.size} ranks")


if __name__ == "__main__":
    main()
    leave_at_once(0)
