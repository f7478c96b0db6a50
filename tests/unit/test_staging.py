"""Copies for a save in the background: their memory stays, and nothing of one save is in the next."""

from itertools import pairwise

import torch

from dsframe.checkpoint.staging import Staging


def test_copies_lie_in_the_same_memory_in_the_next_save():
    tensors = [torch.arange(7, dtype=torch.bfloat16), torch.arange(24.0)[::2], torch.ones(0), torch.ones(1000)]
    staging, places = Staging(), []
    for saved in (tensors, tensors[:3], tensors, [2 * tensor for tensor in tensors]):  # a smaller save in between
        staging.reserve(tensor.nbytes for tensor in saved)
        copies = [staging.copy(tensor, tensor.dtype) for tensor in saved]
        for copy, tensor in zip(copies, saved, strict=True):
            torch.testing.assert_close(copy, tensor.contiguous(), rtol=0, atol=0)
            assert copy.is_contiguous()
        places.append([copy.data_ptr() for copy in copies])
        ends = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copies)
        assert all(first[1] <= second[0] for first, second in pairwise(ends))
    assert places[0] == places[2] == places[3]
    assert places[1] == places[0][:3]
    staging.reserve([1 << 27], ahead=True)
    staging.reserve([2 * tensor.nbytes for tensor in tensors])  # of a larger one
    assert not staging._making.is_alive(), "it would write zeros over the copies"
    assert torch.equal(staging.copy(torch.ones(2000), torch.bfloat16), torch.ones(2000, dtype=torch.bfloat16))
