"""What one rank holds while a sharded model is built, set up and trained: resident memory by phase, beside its share of the state.

    torchrun --nproc-per-node=2 -m benchmarks.sharded_memory --engine fsdp --millions 55
    torchrun --nproc-per-node=2 -m benchmarks.sharded_memory --engine deepspeed --precision bf16 --folder MODEL

A thread of each rank reads /proc/self/status every few milliseconds. "base" is what the rank holds before its model is built, once
torch, the engine's library and one small step are loaded. Above it: the most at set-up, and the most in the first steps.
"anonymous" leaves out the pages of files, which the kernel takes back when it needs them. "share" is this rank's part of weights,
gradients, masters and moments, in bytes an element: 20 on ZeRO-3 (fp32 weights beside fp32 masters), 18 in bf16, 16 on FSDP.

``--pss`` adds rank 0's look at all ranks together, several times a second: the largest sum of what is in no file of their
/proc/PID/smaps_rollup (Pss_Anon), and at that phase of what is in files (Pss_File and Pss_Shmem, shared pages counted once).

``--make FOLDER`` writes the Llama into a folder instead, in bf16, in several safetensors files.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from dsframe.cluster import world as worlds
from dsframe.config import load
from dsframe.data import TensorSource
from dsframe.host import phases
from dsframe.run import execute
from dsframe.tasks import _transformers
from dsframe.tasks.task import Task

MIB = 1 << 20
CONTEXT = 8
"""Tokens in a sample: activations are nothing beside the weights, and each token takes its time."""
STATUS = Path("/proc/self/status")
SET_UP = ("data", "engine")
"""Phases that end with the engine ready; what comes after them trains."""


class Sampler(threading.Thread):
    """The largest resident sets seen so far, by the phase that was running."""

    def __init__(self, read, pause=0.004):
        super().__init__(daemon=True)
        self.peaks = {}
        self.ends = threading.Event()
        self._read, self._pause = read, pause

    def run(self):
        while not self.ends.wait(self._pause):
            done = list(phases.seconds())
            name = "base" if "engine's imports" not in done else "set-up" if "engine" not in done else "steps"
            peak = self.peaks.setdefault(name, {})
            for kind, value in self._read().items():
                peak[kind] = max(peak.get(kind, 0.0), value)


def resident():
    """MiB of this process: all that is resident, and what of it is in no file."""
    found = dict(re.findall(r"(VmRSS|RssAnon):\s+(\d+) kB", STATUS.read_text()))
    return {"resident": int(found["VmRSS"]) / 1024, "anonymous": int(found["RssAnon"]) / 1024}


def proportional():
    """MiB of all processes that this one's parent has started, each page divided by the number of those that share it."""
    found = {"anonymous": 0.0, "files": 0.0}
    for process in Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
        try:
            lines = (Path("/proc") / process / "smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        sizes = {kind: int(size) / 1024 for kind, size in re.findall(r"Pss_(Anon|File|Shmem):\s+(\d+) kB", lines)}
        found["anonymous"] += sizes["Anon"]
        found["files"] += sizes["File"] + sizes["Shmem"]
    return found


@contextmanager
def limited(mebibytes):
    """In a memory cgroup of its own, whose processes are killed beyond the limit; as root, with cgroups of version 1 or 2."""
    if mebibytes is None:
        yield
        return
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").is_dir()
    group = (root / "memory" if first else root) / f"dsframe-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(mebibytes << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def make(folder, millions):
    """Writes the Llama in bf16, in files of a tenth of it at most."""
    config = _transformers.configure("AutoModelForCausalLM", llama(millions), {"vocab_size": 256})
    model = _transformers.build("AutoModelForCausalLM", config, None, torch.float32).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=max(1, millions // 5) * 1_000_000)
    print(
        f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters, {len([*folder.glob('*.safetensors')])} files"
    )


def llama(millions):
    """Settings of a Llama of about so many million parameters: 8 blocks, none of which is more than a tenth of the model."""
    width = max(64, round((millions * 1e6 / 8 / 12) ** 0.5 / 64) * 64)
    sizes = {"hidden_size": width, "intermediate_size": width * 8 // 3 // 64 * 64, "num_hidden_layers": 8}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    return {"model_type": "llama", **sizes, **heads, "max_position_embeddings": 64}


class Tokens(Task):
    """Random tokens for a Llama: what they are does not matter to memory, and nothing is evaluated."""

    def __init__(self, model):
        self._weights = model if isinstance(model, str) else None
        self._config = _transformers.configure("AutoModelForCausalLM", model, {"vocab_size": 256})

    def model(self):
        return _transformers.build("AutoModelForCausalLM", self._config, self._weights, self.context.dtype)

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())

    def train_data(self):
        tokens = torch.randint(0, 256, (64, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
        return TensorSource(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def document(options, processes, run_dir):
    """The file of the run."""
    settings = {"engine": options.engine, "steps": options.steps, "seed": 1, "threads_per_rank": 1}
    found = {
        "train_batch_size": processes,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "dsframe": {**settings, "run_dir": str(run_dir), "log_every_steps": 1, "checkpoints": {"at_end": False}},
    }
    if options.engine == "deepspeed":
        found["zero_optimization"] = {"stage": 3}
    if options.precision == "bf16":
        found["bf16"] = {"enabled": True}
    for change in options.set:
        key, _, value = change.partition("=")
        *above, last = key.split(".")
        place = found
        for name in above:
            place = place.setdefault(name, {})
        place[last] = json.loads(value)
    return found


def main():
    """Trains, and prints one line a rank."""
    parser = argparse.ArgumentParser(prog="benchmarks.sharded_memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", default="deepspeed", choices=("deepspeed", "fsdp", "ddp", "single"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--millions", type=int, default=55, help="parameters of the Llama, in millions")
    parser.add_argument("--folder", type=Path, help="a model folder, instead of a Llama from settings")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="change the file")
    parser.add_argument("--pss", action="store_true", help="rank 0 adds up the ranks' proportional shares of memory")
    parser.add_argument("--limit", type=int, metavar="MIB", help="kill a rank that takes more; as root")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="write the Llama there, and end")
    options = parser.parse_args()
    if options.make:
        make(options.make, options.millions)
        return 0
    world = worlds.here()
    run_dir = (
        Path(tempfile.gettempdir()) / f"dsframe-memory-{os.environ.get('MASTER_PORT', '')}"
    )  # the same on every rank
    file = document(options, world.size, run_dir)
    if "adapter" in file["dsframe"]:
        importlib.import_module("peft")  # a library belongs to the base
    sampler, together = Sampler(resident), Sampler(proportional, 0.2)
    sampler.start()
    if options.pss and world.is_main:
        together.start()
    began = time.perf_counter()
    try:
        task = Tokens(str(options.folder) if options.folder else llama(options.millions))
        with limited(options.limit):
            summary = execute(load(file), task=task, world=world, quiet=True)
    finally:
        sampler.ends.set()
        together.ends.set()
        if world.is_main:
            shutil.rmtree(run_dir, ignore_errors=True)
    sampler.join()
    print(line(world.rank, sampler.peaks, phases.seconds(), summary.loss, time.perf_counter() - began), flush=True)
    if options.pss and world.is_main:
        for name, peak in together.peaks.items():
            print(
                f"all ranks, PSS, {name}: {peak['anonymous']:,.0f} MiB anonymous, {peak['files']:,.0f} of files",
                flush=True,
            )
    return 0


def line(rank, peaks, seconds, loss, whole):
    """One rank's figures, in MiB above its base."""
    base = peaks["base"]
    above = "  ".join(
        f"{name} +{peaks[name]['resident'] - base['resident']:,.0f} ({peaks[name]['anonymous'] - base['anonymous']:,.0f} anonymous)"
        for name in ("set-up", "steps")
        if name in peaks
    )
    return (
        f"rank {rank}: base {base['resident']:,.0f} MiB  {above}  set-up {seconds.get('engine', 0.0):.1f} s  "
        f"{whole:.1f} s in all  last loss {loss:.7f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
