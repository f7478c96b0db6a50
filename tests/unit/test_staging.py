"""Copies for a save in the background: their memory stays, and nothing of one save is in the next."""

from itertools import pairwise

import torch

from dsframe.checkpoint.staging import Staging


def test_copies_lie_in_the_same_memory_in_the_next_save():
    tensors = [
        torch.arange(7, dtype=torch.bfloat16),
        torch.arange(24.0)[::2],
        torch.tensor([3], dtype=torch.int64),
        torch.ones(0),
        torch.ones(1000),
    ]
    staging, places = Staging(), list[list[int]]()
    for save in range(3):
        staging.reserve(tensor.nbytes for tensor in tensors[: 5 - (save == 1)])  # a smaller one in between
        copies = [staging.copy(tensor + save, tensor.dtype) for tensor in tensors[: 5 - (save == 1)]]
        for copy, tensor in zip(copies, tensors, strict=False):
            assert torch.equal(copy, tensor + save)
            assert copy.dtype == tensor.dtype
            assert copy.is_contiguous()
        places.append([copy.data_ptr() for copy in copies])
        ends = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copies)
        assert all(first[1] <= second[0] for first, second in pairwise(ends))
    assert places[0] == places[2]
    assert places[1] == places[0][:4]
    staging.reserve([2 * tensor.nbytes for tensor in tensors])  # and a larger one
    assert torch.equal(staging.copy(torch.ones(2000), torch.bfloat16), torch.ones(2000, dtype=torch.bfloat16))
