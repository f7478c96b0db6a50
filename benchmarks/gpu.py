"""A GPT in bf16 on one GPU, dsframe beside a hand-written loop and Accelerate: tokens a second, MFU and peak memory.

    pip install -c constraints.txt -e '.[bench]'    # Accelerate, and what else the benchmarks need
    python -m benchmarks.gpu                        # 350 M parameters; --size 1.3b for 1.3 billion
    python -m benchmarks.gpu --only zero2,by-hand
    python -m benchmarks.gpu --tiny                 # a small model, on the CPU where there is no GPU: does the script run?

Each contestant is a job of its own, one after the other, and each step's batch stays on the device: this is about the step, not
about loading. "numbers" says what each computes with: bf16 weights beside fp32 ones that are updated, or autocast over fp32
weights, which is Accelerate's way; by hand there are both. MFU is 6 x parameters + 12 x layers x width x context floating-point
operations a token (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), divided by the rate of a bf16 matrix product that is
measured in the same run. Without a GPU and without ``--tiny`` it says so and exits with 3.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import processes
from dsframe.cluster.rendezvous import free_port

REPOSITORY = Path(__file__).resolve().parents[1]
SIZES = {
    "tiny": {"layers": 2, "heads": 2, "width": 64, "context": 64, "batch": 2},
    "350m": {"layers": 24, "heads": 16, "width": 1024, "context": 1024, "batch": 16},
    "1.3b": {"layers": 24, "heads": 16, "width": 2048, "context": 1024, "batch": 8},
}
ADAMW = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
BF16 = {"bf16": {"enabled": True}}
OURS = {
    "zero1": {**BF16, "zero_optimization": {"stage": 1}},
    "zero2": {**BF16, "zero_optimization": {"stage": 2}},
    "zero3": {**BF16, "zero_optimization": {"stage": 3}},
    "zero2-offload": {**BF16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "fsdp": BF16,
    "horovod": BF16,
    "ddp": BF16,
    "ddp-autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
CONTESTANTS = (*OURS, "by-hand", "by-hand-bf16", "accelerate")
NO_GPU = 3
LIMIT_SECONDS = 540.0
"""For a contestant."""


def numbers(name):
    """The number format of a contestant."""
    if name == "fsdp":
        return "bf16, fp32 shares"
    return "bf16 weights" if name == "by-hand-bf16" or OURS.get(name, {}).get("bf16") else "autocast"


def work(name, size, steps, report):
    """One contestant, in a process of its own."""
    import torch

    if name in OURS:
        _ours(name, size, steps, report)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = _task(size, steps, report)
    torch.manual_seed(0)
    model = task.model().to(device)
    arguments = {**ADAMW, "betas": tuple(ADAMW["betas"])}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **arguments)
    inputs, targets = (leaf.to(device) for leaf in task.train_data().batch(torch.arange(SIZES[size]["batch"]), 0))
    if name == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
        model, optimizer = accelerator.prepare(model, optimizer)
        while True:
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if name == "by-hand-bf16":
        _bf16_by_hand(model, task, inputs, targets, arguments)
    while True:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = task.loss(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _bf16_by_hand(model, task, inputs, targets, adamw):
    """Steps without end: weights and gradients in bf16, and fp32 masters that AdamW updates."""
    import torch

    masters = [torch.nn.Parameter(weight.detach().clone()) for weight in model.parameters()]
    weights = [weight.detach() for weight in model.bfloat16().parameters()]
    optimizer = torch.optim.AdamW(masters, fused=True, **adamw)
    while True:
        task.loss(model(inputs).float(), targets).backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        torch._foreach_copy_(weights, [master.detach() for master in masters])


def _task(size, steps, report):
    """The model and random tokens; its loss counts the steps, and ends the process when they are done."""
    import torch

    from dsframe.config.schema.settings import LanguageTask as Settings
    from dsframe.tasks.language import LanguageTask

    shape = SIZES[size]
    context = shape["context"]

    class Same:
        """The same batch for ever, so that loading takes nothing."""

        def __init__(self):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            tokens = torch.randint(256, (shape["batch"], context + 1), generator=torch.Generator().manual_seed(0))
            self._batch = (tokens[:, :-1].to(device), tokens[:, 1:].to(device))

        def __len__(self):
            return shape["batch"]

        def batch(self, indices, epoch):
            return self._batch

    class Counted(LanguageTask):
        calls, began = 0, 0.0

        def loss(self, outputs, targets):
            if self.calls in (steps // 3, steps):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if self.calls == steps:
                    seconds = (time.perf_counter() - self.began) / (steps - steps // 3)
                    report.write_text(json.dumps({"seconds": seconds, "peak": _peak()}))
                    os._exit(0)
                self.began = time.perf_counter()
            self.calls += 1
            return super().loss(outputs, targets)

        def train_data(self):
            return Same()

        def eval_data(self):
            return None

    dimensions = {key: shape[key] for key in ("layers", "heads", "width", "context")}
    return Counted(Settings(name="language", corpus="synthetic", tie_embeddings=False, **dimensions), 0)


def _peak():
    import torch

    from dsframe.host.memory import peak_memory_bytes

    return peak_memory_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _ours(name, size, steps, report):
    import dsframe

    engine = name.split("-")[0] if name.split("-")[0] in ("ddp", "fsdp", "horovod") else "deepspeed"
    config = {
        "train_batch_size": SIZES[size]["batch"],
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        **OURS[name],
        "dsframe": {"engine": engine, "steps": 1_000_000, "log_every_steps": 100_000},
    }
    file = report.with_name(f"{name}.json")
    file.write_text(json.dumps(config))
    arguments = ["--config", str(file), "--run-dir", str(report.with_name(f"{name}-run")), "--quiet"]
    sys.exit(dsframe.main(_task(size, steps, report), arguments))


def matrix_rate(seconds=2.0):
    """Floating-point operations a second of a bf16 product of 8192 x 8192 matrices (512 x 512 on a CPU)."""
    import torch

    gpu = torch.cuda.is_available()
    side = 8192 if gpu else 512
    a, b = (torch.randn(side, side, device="cuda" if gpu else "cpu", dtype=torch.bfloat16) for _ in range(2))

    def run(count):
        began = time.perf_counter()
        for _ in range(count):
            a @ b
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    run(5)
    count = max(3, int(seconds / (run(5) / 5)))
    return 2 * side**3 * count / run(count)


def measured(names, size, steps):
    """Each contestant's figures, or why it has none."""
    with tempfile.TemporaryDirectory(prefix="dsframe-gpu-") as folder:
        for name in names:
            report = Path(folder, f"{name}.report")
            start = (
                ["torchrun", "--nproc-per-node=1", f"--master-port={free_port()}"]
                if name == "fsdp"
                else [sys.executable]
            )
            words = [*start, "-m", "benchmarks.gpu", "--work", name, "--size", size, "--steps", str(steps)]
            try:
                done = processes.run([*words, "--report", str(report)], cwd=REPOSITORY, timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                yield name, f"not done after {LIMIT_SECONDS / 60:.0f} minutes"
                continue
            if report.exists():
                yield name, json.loads(report.read_text())
            else:
                yield name, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="the first third does not count (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="short for --size tiny --steps 6, also without a GPU")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.size, options.steps, options.report)
    import torch

    size, steps = ("tiny", 6) if options.tiny else (options.size, options.steps)
    if not torch.cuda.is_available() and not options.tiny:
        print(
            "benchmarks.gpu: there is no GPU here; --tiny runs the script with a small model on the CPU",
            file=sys.stderr,
        )
        return NO_GPU
    processes.heed_sigterm()
    names = options.only.split(",")
    if wrong := {*names} - {*CONTESTANTS}:
        parser.error(f"unknown: {', '.join(sorted(wrong))}")
    peak = matrix_rate()
    shape = SIZES[size]
    parameters = 12 * shape["layers"] * shape["width"] ** 2 + (2 * 256 + shape["context"]) * shape["width"]
    operations = 6 * parameters + 12 * shape["layers"] * shape["width"] * shape["context"]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{where}: bf16 matrix product {peak / 1e12:,.1f} TFLOP/s; {parameters / 1e6:,.1f} M parameters")
    print(f"{'who':22} {'numbers':17} {'tokens/s':>10} {'MFU':>6} {'peak GiB':>9}")
    figures = {}
    for name, found in measured(names, size, steps):
        who = f"dsframe {name}" if name in OURS else name
        if isinstance(found, str):
            print(f"{who:22} {found}", flush=True)
            continue
        rate = shape["batch"] * shape["context"] / found["seconds"]
        figures[name] = {**found, "numbers": numbers(name), "tokens_per_second": rate, "mfu": rate * operations / peak}
        print(
            f"{who:22} {numbers(name):17} {rate:10,.0f} {figures[name]['mfu']:6.1%} {found['peak'] / 2**30:9.2f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(
            json.dumps({"device": where, "matrix_rate": peak, "size": size, **figures}, indent=1) + "\n"
        )
    return 0 if len(figures) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
