"""Small scripts as people write them, each twice: as a task, and as the plain loop that it was moved from.

tests/engines/test_ports.py compares them. The scripts are of the kinds that pytorch/examples, nanoGPT, Accelerate,
DeepSpeedExamples and Horovod's examples show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import dsframe
from dsframe.data import TensorSource
from dsframe.data.sampler import Sampler
from dsframe.tools.compare import losses as losses_of
from tests import kept
from tests.files import ds_config

BATCH, SAMPLES, STEPS = 8, 96, 40


class _Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16),
                 nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)]
            )
            for _ in range(2)
        )  # fmt: skip
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        found = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for norm, qkv, out, norm2, up, down in self.blocks:
            q, k, v = qkv(norm(found)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            found = found + out(mixed.transpose(1, 2).flatten(2))
            found = found + down(functional.gelu(up(norm2(found))))
        return self.head(self.norm(found))


def _get_lr(step):
    """nanoGPT's, as a factor: a warm-up that does not begin at 0, then a cosine."""
    if step < 6:
        return (step + 1) / 7
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, (step - 6) / 24)))


class NanoGpt(dsframe.Task):
    """Tied embeddings, no decay for vectors, clipping, warm-up and a cosine (nanoGPT)."""

    def model(self):
        return _Gpt()

    def schedule(self, updates):
        return _get_lr(updates)

    def parameter_groups(self, model):
        return [{"match": [name for name, p in model.named_parameters() if p.dim() < 2], "weight_decay": 0}]

    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def train_data(self):
        tokens = torch.randint(32, (SAMPLES, 13), generator=torch.Generator().manual_seed(1))
        return TensorSource(tokens[:, :-1], tokens[:, 1:])


class _Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 8), nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 16))

    def forward(self, rows):
        mean, deviation = self.into(rows).chunk(2, 1)
        return self.out(mean + torch.randn_like(mean) * (deviation / 2).exp()), mean, deviation


class Vae(dsframe.Task):
    """A summed loss, and draws in the forward pass (pytorch/examples: vae)."""

    loss_is = "sum"

    def model(self):
        return _Vae()

    def loss(self, outputs, targets):
        again, mean, deviation = outputs
        entropy = functional.binary_cross_entropy_with_logits(again, targets, reduction="sum")
        return entropy - (1 + deviation - mean.square() - deviation.exp()).sum() / 2

    def train_data(self):
        rows = torch.rand(SAMPLES, 16, generator=torch.Generator().manual_seed(0))
        return TensorSource(rows, rows)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def _matrices_decay(model):
    """nanoGPT's configure_optimizers."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


@dataclass(frozen=True)
class Case:
    """A port: the task, and how the plain loop says what its file says."""

    task: type[dsframe.Task]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    rate: Callable[[int], float] = lambda step: 1.0
    """The plain loop's schedule."""
    clip: float = 0.0
    draws: bool = False
    """Whether it draws in training: on two ranks then with per_sample_randomness."""
    bound: float = 0.0
    """Of the losses beside the plain loop's, on one process."""


CASES = {
    "nanogpt": Case(NanoGpt, _matrices_decay, _get_lr, clip=1.0, bound=1e-7),
    "vae": Case(Vae, _adamw, draws=True),
}


def plain(case):
    """The script that the task was moved from: one process, torch alone but for the order of the samples."""
    task = case.task()
    torch.manual_seed(0)
    model = task.model().train()
    torch.manual_seed(1)  # what dsframe draws in training follows seed + 1 + rank
    optimizer = case.optimizer(model)
    rate = LambdaLR(optimizer, case.rate)
    order, data, losses = Sampler(SAMPLES, BATCH, 0), task.train_data(), []
    for step in range(STEPS):
        ((epoch, rows),) = order.global_batch(step)
        inputs, targets = data.batch(rows, epoch)
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        rate.step()
        losses.append(float(loss.detach()))
    return losses


def moved(name, engine, folder, ranks=1, *, by_sample=False):
    """The loss of every step by dsframe. ``by_sample``: what it draws is of the sample, not of the rank."""
    case, run_dir = CASES[name], folder / f"{name}-{engine}{'-by-sample' * by_sample}"
    zero = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True} if engine == "deepspeed" else {}
    file = ds_config(
        BATCH,
        {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        sections={"gradient_clipping": case.clip, **zero},
        task={"name": f"tests.engines.ports:{case.task.__name__}"},
        engine=engine,
        steps=STEPS,
        log_every_steps=1,
        run_dir=str(run_dir),
        per_sample_randomness=by_sample,
    )
    kept.train(folder, file, ranks).check()
    return list(losses_of(run_dir).values())
