"""What the stand-in refuses and records, one by one: ``python -m tests.standin.refusals`` prints it as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from dsframe.data import ImageSource, Loader
from dsframe.data.loader import READER
from dsframe.errors import DataError
from tests.standin import switch_on


def outcome(action: Callable[[], Any]) -> dict[str, Any]:
    """What ``action`` came to: its value or its error, and what was recorded meanwhile."""
    switch_on.events.clear()
    try:
        found = {"value": action()}
    except (RuntimeError, TypeError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return {**found, "events": [[event.what, event.detail] for event in switch_on.events]}


def read_address(tensor: torch.Tensor) -> int:
    """How a process ends that reads the tensor's address, as code of the host would."""
    child = os.fork()
    if child == 0:
        os.close(2)  # its stack is nobody's concern
        ctypes.string_at(tensor.data_ptr(), 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def early_read(tensor: torch.Tensor) -> list[float]:
    """A copy to the host that does not block: its sum before and after the host has waited."""
    host = torch.empty(tensor.shape).pin_memory()
    host.copy_(tensor, non_blocking=True)
    before = float(host.sum())
    torch.cuda.synchronize()
    return [0.0 if before != before else before, float(host.sum())]  # NaN is not itself


def beyond_the_limit() -> None:
    """More bytes than the device has."""
    switch_on.device.set_limit(0, 1 << 20)
    try:
        torch.empty(1 << 20, device="cuda")
    finally:
        switch_on.device.set_limit(0, 1 << 40)


class Damaged:
    """Eight rows, of which one cannot be read."""

    def __len__(self) -> int:
        return 8

    def batch(self, indices: torch.Tensor, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        if 4 in indices:
            raise DataError("row 4 is damaged")
        return indices, indices


def damaged() -> list[Any]:
    """What the thread that reads ahead has met, as the training hears of it; and whether the thread is still there."""
    try:
        return [len(list(Loader(Damaged(), seed=0, micro_batch_size=2, device="cuda").stream()))]
    except DataError as error:
        return [str(error), [thread.name for thread in threading.enumerate() if thread.name.startswith(READER)]]


def images() -> list[Any]:
    """A batch of images on the device: its format, and whether it is the host's to the bit."""
    pixels = (torch.arange(6 * 3 * 4 * 4) % 256).to(torch.uint8).view(6, 3, 4, 4)
    one = ImageSource(
        pixels, torch.arange(6), classes=6, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), padding=1, flip=True
    )
    (found, _), (expected, _) = (
        next(Loader(one, seed=0, micro_batch_size=2, device=on).stream()) for on in ("cuda", "cpu")
    )
    return [str(found.dtype), torch.equal(found.cpu(), expected)]


def two_threads() -> int:
    """Copies to the host that nobody here keeps, taken and let go in one thread while another waits for them."""
    there, over = torch.ones(8, device="cuda"), threading.Event()
    event = torch.cuda.Event()
    event.record()

    def waiting() -> None:
        while not over.wait(1e-5):
            torch.cuda.synchronize()

    thread = threading.Thread(target=waiting, daemon=True)
    thread.start()
    for _ in range(3000):
        there.to("cpu", non_blocking=True)
        event.record()
    over.set()
    thread.join()
    return 3000


def main() -> None:
    there, here = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
    grown = switch_on.usage()[0]
    more = torch.empty(1000, device="cuda")
    actions: dict[str, Callable[[], Any]] = {
        "two places": lambda: (there + here).sum().item(),
        "a scalar of the host": lambda: (there + torch.tensor(1.0)).sum().item(),
        "two devices": lambda: there + torch.ones(4, 4, device="cuda:1"),
        "no such device": lambda: torch.ones(1, device="cuda:7").device.index,
        "numpy": lambda: there.numpy(),
        "the host's generator": lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
        "an address": lambda: read_address(there),
        "memory": beyond_the_limit,
        "an early read": lambda: early_read(there),
        "a number": lambda: there.sum().item(),
        "a mask": lambda: list(there[there > 0].shape),
        "a batch": lambda: here.to("cuda").device.type,
        "a good batch": lambda: here.pin_memory().to("cuda", non_blocking=True).device.type,
        "a batch with holes": lambda: here[:, :2].to("cuda", non_blocking=True).device.type,
        "uninitialised": lambda: bool(torch.empty(3, device="cuda").isnan().all()),
        "bytes": lambda: switch_on.usage()[0] - grown,
        "a row that cannot be read": damaged,
        "images": images,
        "two threads": two_threads,
    }
    print(json.dumps({name: outcome(action) for name, action in actions.items()}))
    del more


if __name__ == "__main__":
    main()
