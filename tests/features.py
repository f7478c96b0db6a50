"""What a file may add to a training, measured: each on every engine, at 1, 2 and 3 ranks, with accumulation 1 and 2.

    python -m tests.features                                  # the second part of `make equivalence`
    python -m tests.features --of lora,ema --engine ddp,zero3 # a part of it

Each row is the largest of an engine's differences from one process, over its trainings of 30 steps of a global batch of 24:
losses of the first ten steps and of all, figures that the loss returns, last weights, and averages where there are some. As in
tests/equivalence.py the noise floor is what single processes with other micro-batches differ by among themselves. No engine may be
further off than three times that, nor than 1e-5 in the first ten losses. The last row of an engine: it trains 15 steps, and the
next engine, on another number of ranks, the other 15.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dsframe.checkpoint import store
from dsframe.tools import export
from tests import equivalence
from tests.engines.parts import GROUPS, SGD, SMOOTH
from tests.equivalence import EARLY, STEPS, Run, floor_of, pipeline
from tests.files import write_json, zero
from tests.kept import run as in_kept_ranks
from tests.text_files import LLAMA

BATCH = 24
FIGURES = ("near", "size", "told", "expert_load/0", "expert_load/3")
"""What losses return beside."""
_LLAMA = {**LLAMA, "intermediate_size": 64}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
_MIXTRAL = {**_LLAMA, "model_type": "mixtral", "num_local_experts": 4, **_EXPERTS}
_GPT = {"name": "language", "layers": 2, "heads": 4, "width": 32, "context": 32, "samples": 500}
_WHOLE = {"stage3_param_persistence_threshold": 0}
ENGINES = {
    "ddp": ("ddp", {}),
    "horovod": ("horovod", {}),
    "fsdp": ("fsdp", {}),
    "zero0": ("deepspeed", zero(0)),
    "zero1": ("deepspeed", zero(1)),
    "zero2": ("deepspeed", zero(2)),
    "zero3": ("deepspeed", zero(3, **_WHOLE)),
    "pipeline": ("deepspeed", pipeline()),
    "tensor": ("deepspeed", {"tensor_parallel": {"autotp_size": 2}}),
}
"""Engine and what it adds to the file. The last two take two ranks."""
_SPLIT = ("pipeline", "tensor")
_PARALLEL = tuple(name for name in ENGINES if name not in _SPLIT)


@dataclass(frozen=True)
class Feature:
    """One thing that a file may add."""

    settings: Mapping[str, Any]
    """In the section "dsframe"."""
    file: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = _PARALLEL
    accumulations: tuple[int, ...] = (1, 2)
    cuts: tuple[int, ...] = (1, 2, 3, 4)
    """Accumulations of the single processes that make the noise floor; the first is the reference."""


_TASK = "tests.engines.feature_tasks"
FEATURES = {
    "groups": Feature(
        {
            "task": _GPT,
            "no_decay": "norms-and-biases",
            "parameter_groups": [
                {"match": ["5.weight"], "lr_scale": 3.0},
                {"match": ["1.*"], "freeze": True},
                {"match": ["3.expand.*", "2.norm_1.weight"], "weight_decay": 2.0, "lr_scale": 0.5},
            ],
        },
        engines=(*_PARALLEL, *_SPLIT),
    ),
    "lora": Feature(
        {
            "task": {"name": "causal-language-model", "model": _LLAMA, "context": 32, "samples": 500},
            "adapter": {"type": "lora", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        }
    ),
    "tied llama": Feature(
        {
            "task": {
                "name": "causal-language-model",
                "model": {**_LLAMA, "tie_word_embeddings": True},
                "context": 32,
                "samples": 500,
            }
        },
        engines=("ddp", "pipeline"),
    ),
    # Without accumulation: experts are balanced over a micro-batch of all ranks.
    "mixtral": Feature(
        {"task": {"name": "causal-language-model", "model": _MIXTRAL, "context": 32, "samples": 500}},
        accumulations=(1,),
        cuts=(1,),
    ),
    "ema": Feature({"task": _GPT, "ema": {"decay": 0.9}}, engines=(*_PARALLEL, *_SPLIT)),
    "figures and stop": Feature(
        {
            "task": {"name": f"{_TASK}:Watched"},
            "eval_every_steps": 4,
            "stop": {"metric": "error:min", "patience": 4, "min_delta": 0.2},
        }
    ),
    "several models": Feature(
        {
            "task": {"name": "tests.engines.parts:Gan"},
            "optimizers": {"discriminator": SGD},
            "parameter_groups": GROUPS,
            "ema": {"decay": 0.9},
        },
        {"zero_allow_untested_optimizer": True},
    ),
    "own optimizer": Feature(
        {
            "task": {"name": "tests.engines.parts:Smoothed"},
            "optimizers": {"discriminator": SGD},
            "parameter_groups": GROUPS,
        },
        {"optimizer": SMOOTH, "zero_allow_untested_optimizer": True},
    ),
    "global batch": Feature({"task": {"name": f"{_TASK}:Contrastive"}}, accumulations=(1,), cuts=(1,)),
    "synced batch norm": Feature(
        {"task": {"name": "tests.engines.synced:Picture"}, "model": {"sync_batch_norm": True}},
        # A bias before BatchNorm has no gradient but rounding, which Adam would make as large as any other.
        {"optimizer": {**SGD, "params": {"lr": 0.1, "momentum": 0.9}}, "zero_allow_untested_optimizer": True},
        accumulations=(1,),
        cuts=(1,),
    ),
}


@dataclass(frozen=True)
class Way:
    """How a training runs."""

    engine: str = "single"
    ranks: int = 1
    accumulation: int = 1


def document(feature, way, steps=STEPS):
    """The file of a training."""
    engine, more = ENGINES.get(way.engine, (way.engine, {}))
    return {
        "train_batch_size": BATCH
        * (2 if way.engine == "tensor" else 1),  # DeepSpeed counts a sample once for each rank
        "gradient_accumulation_steps": way.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1}},
        **feature.file,
        **more,
        "dsframe": {"engine": engine, "steps": steps, "log_every_steps": 1, "threads_per_rank": 1, **feature.settings},
    }


def train(feature, *ways):
    """A real run; with several ``ways`` each goes on from the checkpoint of the one before, after an equal part of the steps."""
    losses = {}
    figures = {}
    with tempfile.TemporaryDirectory(prefix="dsframe-features-") as directory:
        run_dir = Path()
        for number, way in enumerate(ways, start=1):
            file, before, run_dir = Path(directory, "file.json"), run_dir, Path(directory, f"run-{number}")
            write_json(file, document(feature, way, STEPS * number // len(ways)))
            words = ["--config", str(file), "--run-dir", str(run_dir)]
            words += ["--resume", str(before)] if number > 1 else []
            in_kept_ranks(Path(directory), words, way.ranks).check()
            for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
                if "loss" in line and "learning_rate" in line:
                    losses[line["step"]] = line["loss"]
                    figures |= {(line["step"], name): line[name] for name in FIGURES if name in line}
        checkpoint = store.locate(run_dir)[0]
        tensors = dict(export.read(checkpoint))
        if "ema" in feature.settings:
            tensors |= {f"ema/{name}": tensor for name, tensor in export.averages(checkpoint).items()}
        assert sorted(losses) == list(range(1, len(losses) + 1))
        return Run([losses[step] for step in sorted(losses)], tensors, [figures[key] for key in sorted(figures)])


def reference(feature):
    """One process, and the largest differences between processes with other micro-batches."""
    runs = [train(feature, Way(accumulation=cut)) for cut in feature.cuts]
    # Where no other micro-batches are possible: the floor of a sum in fp32, as trainings of this size have it.
    return runs[0], floor_of(runs) if len(runs) > 1 else (1e-6, 1e-6, 1e-6, 5e-6)


def rows(feature, engine):
    """The trainings of an engine, by row."""
    alone = engine in _SPLIT
    for ranks in (2,) if alone else (1, 2, 3):
        yield f"{engine} @ {ranks}", [(Way(engine, ranks, accumulation),) for accumulation in feature.accumulations]
    others = [name for name in feature.engines if name not in _SPLIT]
    follower = others[(others.index(engine) + 1) % len(others)] if engine in others else others[0]
    first, last = feature.accumulations[-1], feature.accumulations[0]
    yield f"{engine} @ 2 > {follower} @ 3", [(Way(engine, 2, first), Way(follower, 3, last))]


broken = partial(equivalence.broken, least=2e-7)
"""Which bounds these differences do not keep."""


def table(name, engines):
    """Prints the rows of a feature; whether all keep their bounds."""
    feature = FEATURES[name]
    run, floor = reference(feature)
    steps = len(run.losses)
    print(f"\n{name}: {steps} steps, loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}")
    print(f"{'':26}{f'loss, first {EARLY}':>16}{f'loss, all {steps}':>16}{'figures':>12}{'weights':>12}")
    print(f"{'noise floor':26}{'':16}" + f"{floor[1]:16.1e}{floor[2]:12.1e}{floor[3]:12.1e}", flush=True)
    kept = True
    for engine in (one for one in feature.engines if one in engines):
        for row, trainings in rows(feature, engine):
            each = [train(feature, *ways).differences(run) for ways in trainings]
            found = [max(column) for column in zip(*each, strict=True)]
            problems = broken(found, floor)
            kept = kept and not problems
            figures = f"{found[0]:16.1e}{found[1]:16.1e}{found[2]:12.1e}{found[3]:12.1e}"
            print(f"{row:26}{figures}  {'; '.join(problems)}", flush=True)
    return kept


def main(argv=None):
    """Prints the tables; 1 where a row breaks its bound."""
    parser = argparse.ArgumentParser(prog="python -m tests.features", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--of", default=",".join(FEATURES), help="features, with commas (default: all)")
    parser.add_argument("--engine", default=",".join(ENGINES), help="engines, with commas (default: all)")
    options = parser.parse_args(argv)
    features, engines = options.of.split(","), options.engine.split(",")
    if unknown := [name for name in features if name not in FEATURES] + [
        name for name in engines if name not in ENGINES
    ]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join([*FEATURES, *ENGINES])}")
    kept = [table(name, engines) for name in features]
    return int(not all(kept))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
