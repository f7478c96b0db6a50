"""What test_parts.py runs on every rank: several models of one task, beside loops of plain torch.

    torchrun --nproc-per-node=2 -m tests.engines.parts REPORT.json CASE...        a case: TASK ACCUMULATION ENGINE[:STAGE[:MORE]]

Each case: six steps, their losses, norms and weights beside those of the loop; the state after three of them goes into the next
case's engine of the same task, which takes the last three steps from there.
"""

import atexit
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import dsframe
from dsframe.cluster import world
from dsframe.data import Loader, as_source
from dsframe.model.ema import KEY
from dsframe.model.micro_batch import MicroBatch
from dsframe.train import leave_at_once
from tests.engines.several import one_process_group, prepare
from tests.engines.snapshot import Snapshot
from tests.files import write_json

STEPS, BATCH = 6, 12
EVERY_STEPS = 5
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}}

SMOOTH = {"type": "task", "params": {"lr": 0.05, "decay": 0.5, "weight_decay": 0.1}}
GROUPS = [{"match": ["discriminator.4.*"], "lr_scale": 0.5}, {"match": ["generator.*.bias"], "weight_decay": 0.0}]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, inputs):
        return inputs + torch.tanh(self.inner(inputs))


def net(inputs, outputs, width=10):
    return nn.Sequential(
        nn.Linear(inputs, width), Block(width), Block(width), nn.LayerNorm(width), nn.Linear(width, outputs)
    )


def taught(norm=nn.BatchNorm1d):
    """A teacher: what training mode would change is in it, and its weights are not drawn."""
    model = nn.Sequential(nn.Linear(4, 16), norm(16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) + 1.0).view_as(parameter) * 0.7)
        for name, buffer in model.named_buffers():
            if name.endswith("mean"):
                buffer.fill_(0.25)
    return model


class Smooth(torch.optim.Optimizer):
    """An optimizer of one's own, of which each number knows its own gradient alone."""

    def __init__(self, groups, lr, decay, weight_decay=0.0):
        super().__init__(groups, {"lr": lr, "decay": decay, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter]
                if "average" not in held:
                    held |= {"average": torch.zeros_like(parameter), "seen": 0}
                held["seen"] += 1
                held["average"].lerp_(parameter.grad, 1 - group["decay"])
                corrected = held["average"] / (1 - group["decay"] ** held["seen"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * corrected)


class Gan(dsframe.Task):
    """Two models, each with its own optimizer."""

    def models(self):
        return {"generator": partial(net, 4, 3), "discriminator": partial(net, 3, 1)}

    def losses(self):
        return {"discriminator": self.tell, "generator": self.fool}

    def tell(self, models, noise, real):
        made, found = models["discriminator"](models["generator"](noise)), models["discriminator"](real)
        loss = bce(made, torch.zeros_like(made)) + bce(found, torch.ones_like(found))
        return loss, {"told": dsframe.Sum((found > 0).sum(), len(found))}

    def fool(self, models, noise, real):
        made = models["discriminator"](models["generator"](noise))
        return bce(made, torch.ones_like(made))

    def metrics(self, outputs, targets):
        return {"distance": dsframe.Sum(mse_loss(outputs, targets, reduction="sum"), len(targets))}

    def train_data(self):
        draw = torch.Generator().manual_seed(5)
        noise = torch.randn(96, 4, generator=draw)
        return TensorDataset(noise, torch.randn(96, 3, generator=draw) * 0.3 + 1.0)

    def eval_data(self):
        return self.train_data()


class Distilled(Gan):
    """A student beside a frozen teacher."""

    def models(self):
        return {"teacher": taught, "student": partial(net, 4, 3)}

    def losses(self):
        return {"student": self.imitate}

    def imitate(self, models, inputs, targets):
        found = models["student"](inputs)
        return mse_loss(found, models["teacher"](inputs)) + 0.1 * mse_loss(found, targets)


def momentum(update):
    return 1.0 - 0.5 / update


class Centred(nn.Module):
    """A student that keeps the centre of its teacher's outputs."""

    def __init__(self):
        super().__init__()
        self.net = net(4, 3)
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, inputs, told=None, mean=None):
        outputs = self.net(inputs)
        if told is None or mean is None:
            return outputs
        wanted = ((told - self.centre) / 0.1).softmax(1)
        self.centre = 0.9 * self.centre + 0.1 * mean
        return -(wanted * (outputs / 0.2).log_softmax(1)).sum(1).mean()


class Dino(Distilled):
    """A teacher that is the average of its student, and a centre over the rows of all ranks."""

    def weight_decay(self, updates):
        return 0.5 * updates % 2  # 0 before the first update, and again later

    def models(self):
        return {"student": Centred, "teacher": dsframe.average_of("student", momentum)}

    def imitate(self, models, inputs, targets):
        with torch.no_grad():
            told = models["teacher"](inputs)
            mean = self.all_rows(told).mean(0)
        return models["student"](inputs, told=told, mean=mean)


class Critic(Gan):
    """A WGAN: its generator is trained in every fifth step, and its critic is clipped (Arjovsky et al. 2017, algorithm 1)."""

    after_step_elementwise = True

    def tell(self, models, noise, real):
        made, found = models["discriminator"](models["generator"](noise)), models["discriminator"](real)
        return made.mean() - found.mean(), {"told": dsframe.Sum((found > made).sum(), len(found))}

    def fool(self, models, noise, real):
        return -models["discriminator"](models["generator"](noise)).mean()

    def after_step(self, name, weight):
        if name.startswith("discriminator."):
            weight.clamp_(-0.1, 0.1)


class Rounded(Distilled):
    """Without BatchNorm, which torch does not evaluate in bf16 on CPUs."""

    def models(self):
        return {**super().models(), "teacher": partial(taught, nn.LayerNorm)}


class Uneven(Gan):
    """One rank calls a model that others do not."""

    def fool(self, models, noise, real):
        if world.here().is_main:
            models["discriminator"](real)
        return super().fool(models, noise, real)


class Smoothed(Gan):
    """Its generator is trained by the optimizer that the task makes."""

    def optimizer(self, groups, **params):
        return Smooth(groups, **params)


TASKS = {
    "gan": Gan,
    "critic": Critic,
    "dino": Dino,
    "smooth": Smoothed,
    "distilled": Distilled,
    "rounded": Rounded,
}


def file(case):
    task, accumulation, engine = case.split()
    engine, stage, more = (*engine.split(":"), "", "")[:3]
    zero = {"stage": int(stage or 0)}
    if stage == "3":
        zero["stage3_param_persistence_threshold"] = 0
    if more == "units":
        zero |= {"leaf_module": {"classes": ["Block"]}}
    if more == "cpu":
        zero |= {"offload_optimizer": {"device": "cpu"}} | (
            {"offload_param": {"device": "cpu"}} if stage == "3" else {}
        )
    adamw = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    own = {}
    if task in ("gan", "smooth", "critic"):
        own = {"optimizers": {"discriminator": SGD}, "parameter_groups": GROUPS}
    if task == "critic":
        own["optimizers"] = {"discriminator": SGD, "generator": {**adamw, "every_steps": EVERY_STEPS}}
    if task != "dino":
        own["ema"] = {"decay": 0.9}
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": int(accumulation),
        "gradient_clipping": 0.5,
        "optimizer": SMOOTH if task == "smooth" else adamw,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        **({"bf16": {"enabled": True}} if more == "bf16" else {}),
        "dsframe": {
            "engine": engine,
            "task": {"name": f"tests.engines.parts:{TASKS[task].__name__}"},
            **own,
        },
    }


# The loops, as one writes them: one process, the whole batch.


def loop(kind, warm_up=0):
    task = TASKS[kind]()
    models = {name: task.model_of(name) for name in task.models()}
    if "teacher" in models:
        models["teacher"].requires_grad_(False).eval()
    optimizers = {}
    if "discriminator" in models:
        each = {True: [], False: []}
        for name, parameter in models["generator"].named_parameters():
            each[name.endswith(".bias")].append(parameter)
        decayed = [{"params": each[False]}, {"params": each[True], "weight_decay": 0.0}]
        slower = [
            {"params": models["discriminator"][:4].parameters()},
            {"params": models["discriminator"][4].parameters(), "lr": 0.025},
        ]
        optimizers["discriminator"] = torch.optim.SGD(slower, lr=0.05, momentum=0.9)
        own = kind == "smooth"
        optimizers["generator"] = (
            Smooth(decayed, **SMOOTH["params"]) if own else torch.optim.AdamW(decayed, lr=0.01, weight_decay=0.1)
        )
    else:
        optimizers["student"] = torch.optim.AdamW(models["student"].parameters(), lr=0.01, weight_decay=0.1)
    rates = [(group, group["lr"]) for one in optimizers.values() for group in one.param_groups]
    source = as_source(task.train_data(), 0, None)
    loader = Loader(
        source, seed=0, micro_batch_size=BATCH, accumulation_steps=1, rank=0, ranks=1, device=torch.device("cpu")
    )
    found = {"losses": [], "norms": []}
    averages = {}
    for step in range(STEPS):
        ((inputs, targets),) = loader.micro_batches(step)
        losses, squares = [], 0.0
        for group, rate in rates:
            group["lr"] = rate * min(1.0, max(step - 1, 0) / warm_up) if warm_up else rate  # as DeepSpeed counts
            if kind == "dino":
                group["weight_decay"] = task.weight_decay(step)
        for name, optimizer in optimizers.items():
            if kind == "critic" and name == "generator" and (step + 1) % EVERY_STEPS:
                continue
            loss = task.losses()[name](models, inputs, targets)
            loss = loss[0] if isinstance(loss, tuple) else loss
            for model in models.values():
                model.zero_grad()
            loss.backward()
            squares += float(torch.nn.utils.clip_grad_norm_(models[name].parameters(), 0.5)) ** 2
            optimizer.step()
            with torch.no_grad():
                for rest, weight in models[name].named_parameters():
                    task.after_step(f"{name}.{rest}", weight)
            losses.append(float(loss.detach()))
        found["losses"].append(losses)
        found["norms"].append(squares**0.5)
        for name in optimizers:
            if kind == "dino":
                _follow(models, momentum(step + 1), averages)
                continue
            if kind == "critic" and name == "generator" and (step + 1) % EVERY_STEPS:
                continue
            for rest, weight in models[name].named_parameters():
                old = averages.get(f"{name}.{rest}", weight.detach())
                averages[f"{name}.{rest}"] = old + 0.1 * (weight.detach() - old)
    found["weights"] = {
        f"{name}.{rest}": weight.flatten().tolist()
        for name in optimizers
        for rest, weight in models[name].named_parameters()
    }
    found["averages"] = {name: value.flatten().tolist() for name, value in averages.items()}
    inputs, targets = source.batch(torch.arange(96), 0)
    with torch.no_grad():
        outputs = next(models[name] for name in models if name in optimizers)(inputs)
    found["distance"] = task.metrics(outputs, targets)["distance"].mean
    return found


@torch.no_grad()
def _follow(models, momentum, averages):
    for (name, average), weight in zip(
        models["teacher"].named_parameters(), models["student"].parameters(), strict=True
    ):
        average.mul_(momentum).add_(weight, alpha=1 - momentum)
        averages[f"student.{name}"] = average


# The same by dsframe.


def train(engine, loader, first, last):
    """Each loss over the global batch, and the norm, at each step."""
    losses, norms, size = [], [], engine.plan.world.size
    for step in range(first, last):
        result = engine.train_step(MicroBatch.of(loader.micro_batches(step)))
        if engine.plan.config.settings.ema:
            engine.average(0.9)
        terms = result.terms
        own = [one.total for name, one in terms.items() if name.endswith("_loss")] or [result.loss]
        assert ("told" in terms) == ("discriminator" in engine.plan.task.models())
        losses.append((engine.sum_over_ranks(torch.stack([one.double() for one in own])) / size).tolist())
        norms.append(float(result.gradient_norm))
    return losses, norms


def measure(case, kept):
    """**Collective.** ``kept``: by task, the state of the case before after half of the steps; is given this one's."""
    task, _, engine_name = case.split()
    make, loader = prepare(file(case), engine_name.partition(":")[0])
    engine = make()
    try:
        losses, norms = train(engine, loader, 0, STEPS // 2)
        half = Snapshot(engine.state())
        on = train(engine, loader, STEPS // 2, STEPS)
        last = Snapshot(engine.state())
        found = {"losses": losses + on[0], "norms": norms + on[1]}
        every = [last.parameter(name) for name in last.shapes]
        found["weights"] = {one.name: one.weight.flatten().tolist() for one in every}
        found["averages"] = {one.name: one.moments[KEY].flatten().tolist() for one in every}
        source = as_source(engine.plan.task.eval_data(), 0, None)
        share = torch.arange(engine.plan.data_rank, 96, engine.plan.batch.data_parallel_size)
        one = engine.eval_step(source.batch(share, 0), engine.plan.task.metrics)["distance"]
        total = engine.sum_over_ranks(torch.tensor([float(one.total), float(one.count)], dtype=torch.float64))
        found["distance"] = float(total[0] / total[1])
        if frozen := engine._parts.get("teacher"):
            held = sum(getattr(p, "ds_tensor", getattr(p, "_local_tensor", p)).numel() for p in frozen.parameters())
            found["share"] = held / frozen.size
        engine.load_state(kept.get(task, half))
        found["on from the case before"] = train(engine, loader, STEPS // 2, STEPS)
        engine.load_state(half)
        found["again"] = train(engine, loader, STEPS // 2, STEPS) == on
        with engine.averaged():
            inside = Snapshot(engine.state())
        found["swapped"] = all(inside.parameter(name).moments for name in inside.shapes)
        kept[task] = half
        return found
    finally:
        engine.close()


def main(path, cases):
    torch.set_num_threads(1)
    report = {}
    kept = {}
    with one_process_group():
        for case in cases:
            report[case] = measure(case, kept)
    report |= {task: loop(task) for task in TASKS}
    if world.here().is_main:
        write_json(Path(path), report)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    atexit._run_exitfuncs()  # as dsframe.train does: Horovod over MPI leaves here
    leave_at_once(0)
