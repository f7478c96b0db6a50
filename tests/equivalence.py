"""The promise, measured: one file, one model, one seed, and every engine's losses and weights beside a single process's.

    make equivalence                                    # the whole table
    python -m tests.equivalence --of gpt --case ddp,zero3  # a part of it

Each row is a real job under its own launcher: 30 steps of a global batch of 32 with gradient accumulation 2, AdamW with warm-up
and clipping. Weights are those of the checkpoint after the last step, each parameter in full shape. The noise floor is what
single processes differ by among themselves when only the order of summation differs: the same global batches, cut into other
micro-batches. In fp32 no engine may be further from the reference than three times that, nor than 1e-5 in the first ten losses;
in bf16, where a rounding is 2**16 times larger, the floor is that of bf16 and only the first bound holds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsframe.checkpoint import store
from dsframe.tools import export
from dsframe.tools.compare import losses
from tests.files import write_json, zero
from tests.kept import run as in_kept_ranks
from tests.processes import COMPILING_SECONDS, deepspeed, horovodrun, python, run_ranks, torchrun, warm

STEPS = 30
SHORT_STEPS = 20
"""In CI."""
EARLY = 10
EARLY_BOUND = 1e-5
NOISE_FACTOR = 3.0
SAMPLES = 32
"""Of one step."""
CUTS = (1, 2, 4, 8)
"""Accumulation steps of the single-process runs that make the noise floor; the second is the reference."""

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MIXTRAL = {**_LLAMA, "model_type": "mixtral", "num_local_experts": 4}
_OPT = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_OPT |= {"word_embed_proj_dim": 64, "dropout": 0.0}
TASKS = {
    "cnn": {"name": "vision", "model": "cnn", "dataset": "fashion-mnist", "samples": 2000},
    "gpt": {"name": "language", "layers": 2, "heads": 4, "width": 64, "context": 64, "samples": 2000},
    "llama": {"name": "causal-language-model", "model": _LLAMA, "context": 64, "samples": 2000},
    "mixtral": {"name": "causal-language-model", "model": _MIXTRAL, "context": 64, "samples": 2000},
    "opt": {"name": "causal-language-model", "model": _OPT, "context": 64, "samples": 2000},
    "gan": {"name": "tests.engines.parts:Gan"},
    "distilled": {"name": "tests.engines.parts:Distilled"},
}
TASKS["tied llama"] = {**TASKS["llama"], "model": {**_LLAMA, "tie_word_embeddings": True}}
"""tests/engines/test_pipeline.py trains it."""
SEVERAL_MODELS = ("gan", "distilled")
"""CI compares these with loops by hand instead (tests/engines/test_parts.py)."""


Launcher = Callable[[int, Iterable[str]], list[str]]
"""Number of processes and arguments to a command line."""


@dataclass(frozen=True)
class Case:
    """One way to train: what it adds to the file, its launcher and how many processes it takes."""

    engine: str
    file: Mapping[str, Any] = field(default_factory=dict)
    launcher: Launcher = torchrun
    processes: int = 2
    tasks: tuple[str, ...] = ("cnn", "gpt")
    in_suite: bool = True
    """Whether CI trains it too, if it takes no more than two processes. tests/engines covers the others with fewer steps."""

    @property
    def kernels(self):
        """Which reference it is compared with: one of REFERENCES."""
        return "bf16" if "bf16" in self.file else "fp32"


def pipeline(**more):
    """The section of a pipeline of two stages."""
    return {"pipeline": {"stages": 2, **more}}


def switched(**switches):
    """The switches of ``dsframe.model``."""
    return {"dsframe": {"model": switches}}


_BF16 = {"bf16": {"enabled": True}}
_ALL = ("cnn", "gpt", "llama", *SEVERAL_MODELS)
_OWN = ("cnn", "gpt", *SEVERAL_MODELS)
_CPU, _NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": tempfile.gettempdir()}
_TENSOR = {"tensor_parallel": {"autotp_size": 2}}
_EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
_HYBRID = {"sharding": "hybrid", "shard_size": 2, "offload": "cpu"}

_ALONE = {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0}
SINGLE = Case("single", {}, lambda _, arguments: python(list(arguments)), 1)
REFERENCES = {
    "fp32": SINGLE,
    "bf16": replace(SINGLE, file=_BF16),
}
"""The single processes, by what decides how their kernels round."""
CASES = {
    "zero0": Case("deepspeed", zero(0), deepspeed, tasks=_OWN),
    "zero1": Case("deepspeed", zero(1), deepspeed, tasks=_OWN),
    "zero2": Case("deepspeed", zero(2), deepspeed, tasks=_OWN),
    "zero3": Case("deepspeed", zero(3), deepspeed, tasks=_ALL),
    "zero3+cpu": Case("deepspeed", zero(3, offload_optimizer=_CPU, offload_param=_CPU), deepspeed),
    "zero3+nvme": Case("deepspeed", zero(3, offload_optimizer=_NVME, offload_param=_NVME), deepspeed),
    "horovod": Case("horovod", {}, horovodrun, tasks=_OWN),
    "ddp": Case("ddp", tasks=_ALL),
    "fsdp": Case("fsdp", tasks=_ALL),
    "fsdp hybrid+cpu": Case("fsdp", {"dsframe": {"fsdp": _HYBRID}}, processes=4),
    "pipeline": Case("deepspeed", pipeline(), deepspeed, tasks=("cnn", "gpt", "llama")),
    "pipeline 2x2 zero1": Case(
        "deepspeed", {**pipeline(activation_checkpoint_interval=1), **zero(1)}, processes=4, tasks=("gpt",)
    ),
    "zero3+cpu alone": Case(
        "deepspeed",
        {**zero(3, offload_optimizer=_CPU, offload_param=_CPU, **_ALONE)},
        SINGLE.launcher,
        1,
        tasks=("gpt",),
    ),
    "zero3 without prefetch": Case("deepspeed", zero(3, **_ALONE), deepspeed, tasks=("gpt", "llama")),
    "tensor": Case("deepspeed", _TENSOR, deepspeed, tasks=("gpt", "llama", "mixtral", "opt")),
    "tensor 2x2 zero3": Case("deepspeed", {**_TENSOR, **zero(3)}, processes=4, tasks=("gpt", "llama")),
    "zero1 bf16": Case("deepspeed", {**zero(1), **_BF16}, deepspeed, tasks=("gpt",), in_suite=False),
    "zero3 bf16": Case("deepspeed", {**zero(3), **_BF16}, deepspeed, tasks=("gpt",), in_suite=False),
    "tensor zero1 bf16": Case("deepspeed", {**_TENSOR, **zero(1), **_BF16}, deepspeed, tasks=("gpt",), in_suite=False),
    "pipeline bf16": Case("deepspeed", {**pipeline(), **_BF16}, deepspeed, tasks=("gpt",), in_suite=False),
    "horovod bf16": Case("horovod", _BF16, horovodrun, tasks=("gpt",), in_suite=False),
    "ddp bf16": Case("ddp", _BF16, tasks=("gpt",), in_suite=False),
    "fsdp bf16": Case("fsdp", _BF16, tasks=("gpt",), in_suite=False),
    **{
        f"experts zero{stage}": Case(
            "deepspeed", {**_EXPERTS, **zero(stage)}, deepspeed, tasks=("mixtral",), in_suite=False
        )
        for stage in range(4)
    },
    "sequence zero1": Case("deepspeed", {"sequence_parallel_size": 2, **zero(1)}, deepspeed, tasks=("gpt", "llama")),
    "sequence zero3": Case(
        "deepspeed",
        {"sequence_parallel_size": 2, **zero(3, **_ALONE)},
        deepspeed,
        tasks=("gpt", "llama"),
        in_suite=False,
    ),
    "sequence of 4 zero2": Case(
        "deepspeed", {"sequence_parallel_size": 4, **zero(2)}, deepspeed, processes=4, tasks=("gpt", "llama")
    ),
}


@dataclass(frozen=True)
class Run:
    """What a training came to."""

    losses: list[float]
    weights: Mapping[str, Tensor]
    """By name, in full shape and fp32."""

    def difference(self, other, steps=None):
        """The largest difference between the losses of the first ``steps`` steps."""
        pairs = [*zip(self.losses, other.losses, strict=True)]
        return max(abs(a - b) for a, b in pairs[:steps])

    def differences(self, other):
        """Returns the largest: of the first losses, of all losses, of weights."""
        assert self.weights.keys() == other.weights.keys(), self.weights.keys() ^ other.weights.keys()
        weights = [float((mine - other.weights[name]).abs().max()) for name, mine in self.weights.items()]
        return self.difference(other, EARLY), self.difference(other), max(weights)


@dataclass(frozen=True)
class Reference:
    """One process, and by how much it differs from itself."""

    run: Run
    floor: tuple[float, ...]


def document(task, case, accumulation=2, steps=STEPS):
    """The file of a case."""
    tensor = case.file.get("tensor_parallel", {}).get("autotp_size", 1)
    return {
        "train_batch_size": SAMPLES * tensor,  # DeepSpeed counts a sample once for each rank of a tensor-parallel group
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
        **{key: value for key, value in case.file.items() if key != "dsframe"},
        "dsframe": {
            "task": TASKS[task],
            "engine": case.engine,
            "steps": steps,
            "log_every_steps": 1,
            "eval_micro_batch_size": 200,
            "eval_samples": 64,
            "threads_per_rank": 1,
            **case.file.get("dsframe", {}),
        },
    }


def train(task, case, accumulation=2, *, in_suite=False):
    """A real run from its first to its last step, under the case's own launcher; ``in_suite``: in ranks that are there already."""
    with tempfile.TemporaryDirectory(prefix="dsframe-equivalence-") as directory:
        file, run_dir = Path(directory, "file.json"), Path(directory, "run")
        write_json(file, document(task, case, accumulation, SHORT_STEPS if in_suite else STEPS))
        words = ["--config", str(file), "--run-dir", str(run_dir)]
        compiles = "nvme" in file.read_text()  # an op, perhaps
        if in_suite and not compiles:
            in_kept_ranks(Path(directory), words, case.processes).check()
        else:
            launch = warm if in_suite else case.launcher
            command = launch(case.processes, ["-m", "dsframe.train", *words])
            run_ranks(command, timeout_seconds=COMPILING_SECONDS if compiles else 590).check()
        curve = [loss for _, loss in sorted(losses(run_dir).items())]
        return Run(curve, export.read(store.locate(run_dir)[0]))


def floor_of(runs):
    """The largest differences between any two."""
    pairs = [a.differences(b) for a, b in itertools.combinations(runs, 2)]
    return tuple(max(column) for column in zip(*pairs, strict=True))


def reference(task, kernels="fp32", *, in_suite=False):
    """One process with accumulation 2, and the noise floor of all cuts."""
    runs = [train(task, REFERENCES[kernels], cut, in_suite=in_suite) for cut in CUTS]
    return Reference(runs[1], floor_of(runs))


def broken(found, floor, *, early=True):
    """Which bounds these differences do not keep."""
    problems = [f"{found[0]:.1e} in the first {EARLY} steps"] if early and found[0] > EARLY_BOUND else []
    for name, off, noise in zip(("losses", "weights"), found[1:], floor[1:], strict=True):
        if off > NOISE_FACTOR * noise:
            problems.append(f"{name} off by {off:.1e}, more than {NOISE_FACTOR:g} x {noise:.1e}")
    return problems


def broken_bounds(run, floor, kernels):
    """Which bounds a run does not keep."""
    return broken(run.differences(floor.run), floor.floor, early=kernels != "bf16")


def table(task, kernels, cases):
    """Prints the rows of the cases that have this reference; whether all keep their bounds."""
    floor = reference(task, kernels)
    count = sum(weight.numel() for weight in floor.run.weights.values())
    first, last = floor.run.losses[0], floor.run.losses[-1]
    print(f"\n{task}, {kernels}: {count:,} parameters, {STEPS} steps, loss {first:.3f} to {last:.3f}")
    print(f"{'':22}{f'loss, first {EARLY}':>16}{f'loss, all {STEPS}':>16}{'weights':>12}")
    print(f"{'noise floor':22}{'':16}{floor.floor[1]:16.1e}{floor.floor[2]:12.1e}", flush=True)
    kept = True
    for name, case in cases.items():
        run = train(task, case)
        early, late, weights = run.differences(floor.run)
        problems = broken_bounds(run, floor, kernels)
        kept = kept and not problems
        print(f"{name:22}{early:16.1e}{late:16.1e}{weights:12.1e}  {'; '.join(problems)}", flush=True)
    return kept


def main(argv=None):
    """Prints the tables; 1 where a case breaks its bound."""
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--of", default=",".join(TASKS), help="models, with commas (default: %(default)s)")
    parser.add_argument("--case", default=",".join(CASES), help="cases, with commas (default: all)")
    options = parser.parse_args(argv)
    tasks, names = options.of.split(","), options.case.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    kept = True
    for task, kernels in itertools.product(tasks, REFERENCES):
        cases = {name: CASES[name] for name in names if task in CASES[name].tasks and CASES[name].kernels == kernels}
        if cases:
            kept = table(task, kernels, cases) and kept
    return int(not kept)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
