"""Reference: one all-reduce for each parameter, after the backward pass.

What every tutorial writes by hand. It is exactly data-parallel training, and moves as many bytes as DDP and Horovod do
(2 (N - 1) / N times the gradients, by a ring: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). They win by time:

* A small tensor costs a message's latency and none of the bandwidth, and most parameters are small. DDP packs gradients into
  buckets, Horovod into a fusion buffer, and each sends a few large messages.
* Here the network idles during the backward pass and the processor during the all-reduce. DDP and Horovod send a bucket as
  soon as its gradients are there, while earlier layers are still being differentiated.
"""

from __future__ import annotations

import torch.distributed as dist

from reference_engines.common import ReferenceEngine


class AllReduceEngine(ReferenceEngine):
    """Full replicas; gradients are averaged parameter by parameter, one after another."""

    @property
    def description(self) -> str:
        """For the first line of a run."""
        return "reference: one all-reduce per parameter"

    def _synchronize(self) -> None:
        self._fill_gradients()
        adds = self.plan.config.deepspeed.gradient_allreduce_op == "sum"
        for parameter in self._parameters:
            assert parameter.grad is not None
            gradient = parameter.grad.contiguous()
            dist.all_reduce(gradient)
            parameter.grad = gradient if adds else gradient.div_(self.plan.world.size)
