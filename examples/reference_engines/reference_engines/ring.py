"""Reference: the ring all-reduce, written by hand with send and receive (Patarasuk and Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002; Gibiansky 2017 brought it to deep learning, and Horovod into everybody's hands:
arXiv 1802.05799).

All gradients lie in one flat tensor, which is cut into N chunks, one for each rank. Each rank sends to the next one of the ring
and receives from the one before, all at the same time:

    reduce-scatter, N - 1 steps      each chunk travels around the ring, and every rank that it passes adds its own to it;
                                     at the end each rank has the sum of one chunk
    all-gather, N - 1 steps          the sums travel on, until every rank has all of them

A rank sends 2 (N - 1) chunks, which are 2 (N - 1) / N times the gradients: nearly the same on 2 ranks and on 1,000, where a
parameter server would send 1,000 times as much. That is the least there can be. What libraries do better:

* NCCL, Gloo and MPI cut chunks into smaller pieces, and add up one while the next is on its way.
* On many hosts 2 (N - 1) steps cost as many latencies: trees need only 2 log2 N.
* Here nothing leaves before the backward pass has ended, as in ``allreduce.py``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from reference_engines.common import ReferenceEngine


class RingEngine(ReferenceEngine):
    """Full replicas; gradients are averaged by messages between neighbours."""

    @property
    def description(self) -> str:
        """For the first line of a run."""
        return f"reference: ring all-reduce by hand over {self.plan.world.size} ranks"

    @torch.no_grad()
    def _synchronize(self) -> None:
        self._fill_gradients()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        ring_all_reduce(flat, self.plan.world.rank, self.plan.world.size)
        if self.plan.config.deepspeed.gradient_allreduce_op != "sum":
            flat /= self.plan.world.size
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, reduced in zip(gradients, flat.split_with_sizes(sizes), strict=True):
            gradient.copy_(reduced.view_as(gradient))


def ring_all_reduce(flat: Tensor, rank: int, ranks: int) -> None:
    """**Collective.** Makes ``flat`` the element-wise sum over the ranks, in place."""
    chunks = flat.tensor_split(ranks)  # views: what is written to them is written to `flat`
    # Reduce-scatter: in each step pass on the chunk that was completed by one more rank in the step before.
    for step in range(ranks - 1):
        mine, theirs = chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks]
        theirs += _pass_on(mine, theirs, rank, ranks)
    # Now the chunk after this rank's own is complete here. All-gather: pass on what is complete.
    for step in range(ranks - 1):
        mine, theirs = chunks[(rank + 1 - step) % ranks], chunks[(rank - step) % ranks]
        theirs.copy_(_pass_on(mine, theirs, rank, ranks))


def _pass_on(outgoing: Tensor, like: Tensor, rank: int, ranks: int) -> Tensor:
    """**Collective.** Sends to the next rank, and returns what came from the one before, which has the size of ``like``."""
    incoming = torch.empty_like(like)
    # Both at once: if everybody sent first, everybody would wait for a receiver. Of fewer numbers than ranks some chunks are empty.
    both = [dist.P2POp(dist.isend, outgoing, (rank + 1) % ranks)] * (outgoing.numel() > 0)
    both += [dist.P2POp(dist.irecv, incoming, (rank - 1) % ranks)] * (incoming.numel() > 0)
    for request in dist.batch_isend_irecv(both) if both else ():
        request.wait()
    return incoming
