"""Copies for a save in the background: their memory stays, and nothing of one save is in the next."""

from __future__ import annotations

from itertools import pairwise

import torch

from dsframe.checkpoint.staging import BLOCK_BYTES, Staging


def test_copies_lie_in_the_same_memory_in_the_next_save() -> None:
    tensors = [
        torch.arange(7, dtype=torch.bfloat16),
        torch.arange(12.0).view(3, 4).t(),
        torch.tensor(3, dtype=torch.int64),
        torch.ones(0),
        torch.full((BLOCK_BYTES // 4 - 5,), 2.0),  # does not fit behind the others
        torch.full((BLOCK_BYTES // 4 + 5,), 3.0),  # nor in any block
        torch.arange(3.0),
    ]
    staging, places = Staging(), list[list[int]]()
    for save in range(3):
        staging.begin()
        copies = [staging.copy(tensor + save) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            assert torch.equal(copy, tensor + save)
            assert copy.dtype == tensor.dtype
            assert copy.is_contiguous()
        places.append([copy.data_ptr() for copy in copies])
        ends = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copies)
        assert all(first[1] <= second[0] for first, second in pairwise(ends))
    assert places[0] == places[1] == places[2]
    assert staging.bytes < 4 * BLOCK_BYTES + 64


def test_a_smaller_save_takes_no_more_memory_and_a_larger_one_only_what_lacks() -> None:
    staging = Staging()
    for sizes, blocks in (([10, 20], 1), ([20], 1), ([BLOCK_BYTES // 4, 20], 2), ([20, BLOCK_BYTES // 4], 2)):
        staging.begin()
        assert all(torch.equal(staging.copy(torch.ones(size)), torch.ones(size)) for size in sizes)
        assert staging.bytes == blocks * BLOCK_BYTES
    assert staging.copy(torch.ones(4), torch.bfloat16).dtype == torch.bfloat16


def test_reserved_memory_is_what_the_first_save_fills() -> None:
    staging = Staging()
    staging.reserve(1 << 20)
    staging.begin()  # waits until all of it is there
    block = staging._blocks[0]
    assert block.count_nonzero() == 0
    copies = [staging.copy(torch.ones(1 << 17)) for _ in range(2)]
    assert [copy.data_ptr() for copy in copies] == [block.data_ptr(), block.data_ptr() + (1 << 19)]
    assert staging.bytes == 1 << 20
