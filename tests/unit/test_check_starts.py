"""What the check lets pass trains: files made of random keys, and two steps of each.

The files are drawn from the schema itself, so that a key that is added is tried. Most are refused; what is left must run.
"""

import argparse
import json
import os
import random
import signal
import traceback

import pytest
import torch
from torch import nn

import dsframe
from dsframe.config.schema.file import File, shape
from dsframe.config.schema.parameters import (
    DEEPSPEED_OPTIMIZERS,
    DEEPSPEED_SCHEDULERS,
    HF_SCHEDULERS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
)
from dsframe.tools import check
from tests.processes import free_port

LEFT_OUT = frozenset(
    {"dsframe.task", "dsframe.run_dir", "dsframe.hooks", "dsframe.adapter", "dsframe.optimizers", "dsframe.parameter_groups",
     "dsframe.engine", "dsframe.engine_options", "dsframe.epochs", "dsframe.steps", "dsframe.pass_through",
     "dsframe.hang_timeout_seconds", "dsframe.threads_per_rank", "wandb", "comet", "aio", "optimizer", "scheduler"}
)  # fmt: skip
"""Keys of accounts and devices, of the task, and those that every file here has."""
OF_THE_TASK = ("lr_lambda", "channels_last", "compile")
"""Keys whose right values depend on the user's model and functions, or that take a compiler half a minute."""
DRAWN = ("loss:min", "accuracy:max", "fp32", "auto", "Block")
OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", **{name: name for name in TORCH_OPTIMIZERS}}
SCHEDULERS = {**DEEPSPEED_SCHEDULERS, **TORCH_SCHEDULERS, **HF_SCHEDULERS}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, inputs):
        return inputs + nn.functional.dropout(self.linear(self.norm(inputs)), 0.1, self.training)


class Points(dsframe.Task):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 2))

    def metrics(self, outputs, targets):
        return {"accuracy": dsframe.Sum((outputs.argmax(1) == targets).sum(), len(targets))}

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    def train_data(self):
        points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(points, (points.sum(1) > 0).long())

    def eval_data(self):
        return torch.utils.data.Subset(self.train_data(), range(10))


def a_value(rng, expected):
    """Draws a value of a key's type, or "auto"."""
    kinds, choices = expected.kinds, [*expected.literals]
    choices += [True, False] if "bool" in kinds else []
    choices += [0, 1, 2, 3, 1000] if "int" in kinds and not expected.literals else []
    choices += [0.0, 0.1, 1.0, 2.5] if "float" in kinds else []
    choices += DRAWN if "str" in kinds and not expected.literals else []
    choices += [None] if "null" in kinds else []
    choices += [{"epochs": 0.5}] if expected.unit else []
    if "list" in kinds and expected.item:
        choices.append([a_value(rng, expected.item) for _ in range(rng.choice([1, 2]))])
    return rng.choice([*choices, "auto"] if rng.random() < 0.1 or not choices else choices)


def a_section(rng, owner, share, path=""):
    """Draws some keys of a section."""
    drawn = {}
    for key, field in owner.model_fields.items():
        here = f"{path}.{key}".lstrip(".")
        if here in LEFT_OUT or key in OF_THE_TASK or (not field.is_required() and rng.random() > share):
            continue
        expected = shape(owner, key)
        if expected.section and expected.kinds <= {"dict", "null"}:
            drawn[key] = a_section(rng, expected.section, 0.3, here)
        else:
            drawn[key] = a_value(rng, expected)
    return drawn


def a_file(rng, engine):
    """Draws a file with an optimizer, and with a schedule or not."""
    name = rng.choice([*OPTIMIZERS, *["AdamW"] * 6])
    kind = (DEEPSPEED_OPTIMIZERS | TORCH_OPTIMIZERS).get(name) or DEEPSPEED_OPTIMIZERS[name.lower()]
    params = a_section(rng, kind, 0.2) | {"lr": 0.01}
    params.pop("torch_adam", None)  # false compiles DeepSpeed's kernel
    drawn = a_section(rng, File, rng.choice([0.01, 0.03, 0.1]))
    ours = drawn.setdefault("dsframe", {})
    length, batch = rng.choice([("steps", 2), ("epochs", 1)]), rng.choice([2, 4, 8])
    ours.update({"engine": engine, length[0]: length[1], "task": {"name": "tests.unit.test_check_starts:Points"}})
    drawn["optimizer"] = {"type": OPTIMIZERS.get(name, name), "params": params}
    if rng.random() < 0.5:
        name = rng.choice([*SCHEDULERS])
        drawn["scheduler"] = {"type": name, "params": a_section(rng, SCHEDULERS[name], 0.3)}
        drawn["scheduler"]["params"].pop("metric", None)  # of the user's evaluation
    if rng.random() < 0.8:
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            drawn.pop(key, None)
    return drawn | {"train_batch_size": batch if length[0] == "steps" else 32}


def passes(document, processes):
    """True if ``dsframe check`` has nothing but notes, or a package that this machine lacks."""
    options = argparse.Namespace(processes=processes, engine=None, overrides=())
    problems = check._examine(json.dumps(document), "f.json", options).problems
    return not any(each.severity == "error" or each.code == "not-installed" for each in problems)


def ended(document, folder):
    """Two steps in this process; what they ended with, or nothing."""
    try:
        dsframe.fit(Points(), json.loads(json.dumps(document)), overrides=[f"dsframe.run_dir={folder / 'run'}"])
    except dsframe.DsframeError as error:
        return "" if "not finite" in str(error) else str(error)  # rates of 1,000 are the user's
    except BaseException:
        return traceback.format_exc(limit=-3)
    return ""


def ended_apart(document, folder, ranks):
    """The same in ranks of its own, for engines that leave process groups behind; what the first that failed ended with."""
    from transformers import get_scheduler  # noqa: F401 - once, not in each process

    port, started = str(free_port()), []
    for rank in range(ranks):
        said = folder / f"rank{rank}"
        said.write_text("the process ended without a word")
        started.append(os.fork())
        if not started[-1]:
            signal.alarm(60)
            if ranks > 1:
                for name, number in {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": ranks,
                    "LOCAL_WORLD_SIZE": ranks,
                }.items():
                    os.environ[name] = str(number)
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            said.write_text(ended(document, folder))
            os._exit(0)
    for process in started:
        os.waitpid(process, 0)
    return next(filter(None, ((folder / f"rank{rank}").read_text() for rank in range(ranks))), "")


@pytest.mark.parametrize(
    ("engine", "ranks", "seeds"),
    [
        ("single", 1, range(100)),
        pytest.param("single", 1, range(100, 3000), marks=pytest.mark.long),
        *(pytest.param(name, 1, range(200), marks=pytest.mark.long) for name in ("ddp", "deepspeed")),
        *(pytest.param(name, 2, range(200, 300), marks=pytest.mark.long) for name in ("ddp", "deepspeed", "horovod")),
    ],
)
def test_what_passes_the_check_trains(engine, ranks, seeds, here):
    failed, tried = {}, 0
    for seed in seeds:
        document = a_file(random.Random(seed), engine)
        if passes(document, ranks):
            tried += 1
            (folder := here / str(seed)).mkdir()
            if text := ended(document, folder) if engine == "single" else ended_apart(document, folder, ranks):
                failed[seed] = (text, json.dumps(document))
    assert not failed, "\n\n".join(f"{seed}: {text}\n{document}" for seed, (text, document) in failed.items())
    assert tried > len(seeds) / 20
