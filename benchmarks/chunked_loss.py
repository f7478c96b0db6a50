"""A language model's loss at once and in slices: time, highest memory, and the gradients beside those of the loss at once.

    python -m benchmarks.chunked_loss [--tokens N] [--vocabulary N] [--width N] [--rounds 3] [--torchtune FOLDER] [--json FILE]

Each way is a process of its own, in turn, which makes the output layer and its inputs and computes the loss and both gradients,
in fp32. Memory is the highest anonymous memory (RssAnon, looked at every 5 ms) above that before. ``torch`` is
``torch.nn.functional.linear_cross_entropy`` with chunks; ``torchtune`` is its ``CEWithChunkedOutputLoss`` (8 chunks), the output
layer called chunk by chunk, out of a folder to which ``pip install --no-deps --target FOLDER torchtune==0.6.1`` has put it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name that every torch program uses

from benchmarks.tokenise import anonymous
from dsframe.tasks import chunked_loss

WAYS = ("plain", "dsframe, auto", "dsframe, 1024", "torch")


def loss_of(way: str, hidden: Tensor, weight: Tensor, targets: Tensor, torchtune: str) -> Tensor:
    """The mean loss by one way."""
    if way == "plain":
        return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())
    if way == "torch":
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256)
        found: Tensor = F.linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), options=options)
        return found
    if way == "torchtune":
        place = Path(torchtune, "torchtune", "modules", "loss", "ce_chunked_output_loss.py")
        spec: Any = importlib.util.spec_from_file_location("ce_chunked_output_loss", place)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        loss = module.CEWithChunkedOutputLoss()
        return loss([F.linear(one, weight) for one in hidden.chunk(loss.num_output_chunks, dim=1)], targets)  # type: ignore[no-any-return]
    size = chunked_loss.tokens_of(len(weight)) if way.endswith("auto") else int(way.rpartition(" ")[2])
    return chunked_loss.mean(chunked_loss.cross_entropy(hidden, weight, None, targets, size))


def measure(way: str, tokens: int, vocabulary: int, width: int, torchtune: str, out: Path) -> None:
    """One process: writes seconds and bytes, and the gradients beside them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(2, tokens // 2, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (2, tokens // 2))
    base, highest, over = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.005):
            highest = max(highest, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    loss = loss_of(way, hidden, weight, targets, torchtune)
    loss.backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - began
    over.set()
    thread.join()
    torch.save({"seconds": seconds, "bytes": highest - base, "grads": (hidden.grad, weight.grad), "loss": loss}, out)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chunked_loss", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torchtune", default="", help="folder that has it (default: leave it out)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        measure(options.way, options.tokens, options.vocabulary, options.width, options.torchtune, options.out)
        return 0
    ways = [*WAYS, *(["torchtune"] if options.torchtune else [])]
    rows: dict[str, dict[str, Any]] = {way: {"seconds": [], "bytes": []} for way in ways}
    with tempfile.TemporaryDirectory(prefix="dsframe-chunked-") as folder:
        plain: Any = None
        for _ in range(options.rounds):
            for way in ways:
                out = Path(folder, "out.pt")
                own = [sys.executable, "-m", "benchmarks.chunked_loss", *sys.argv[1:], "--way", way, "--out", str(out)]
                subprocess.run(own, check=True)
                found = torch.load(out)
                plain = found if way == "plain" else plain
                rows[way]["seconds"].append(found["seconds"])
                rows[way]["bytes"].append(found["bytes"])
                rows[way]["gradients"] = [
                    float((mine - theirs).abs().max())
                    for mine, theirs in zip(found["grads"], plain["grads"], strict=True)
                ]
    print(f"{'':16}{'seconds':>10}{'of plain':>10}{'MiB':>8}{'of plain':>10}{'gradients: inputs, weight':>28}")
    first = rows["plain"]
    for way, row in rows.items():
        ratio = statistics.median(a / b for a, b in zip(row["seconds"], first["seconds"], strict=True))
        size = max(row["bytes"])
        seconds, gradients = statistics.median(row["seconds"]), "  ".join(f"{one:.1e}" for one in row["gradients"])
        print(
            f"{way:16}{seconds:10.1f}{ratio:10.2f}{size / 2**20:8.0f}{size / max(first['bytes']):10.2f}{gradients:>28}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
