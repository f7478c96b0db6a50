"""Programs whose batches are not rows of tensors, and an evaluation of each on any engine.

``python -m tests.engines.evaluated REPORT ENGINE`` evaluates all of them at several micro-batches, as one rank of whatever
launched it, and writes the metrics.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsframe import Hooks, Sum, Task
from dsframe.data import EvaluationLoader, TensorSource
from dsframe.data.datasets import as_source
from dsframe.host import generators
from dsframe.training.evaluation import Evaluation
from dsframe.training.loaders import sets
from tests.engines.several import one_process_group, prepare
from tests.files import write_json

F = nn.functional
SAMPLES, MICRO_BATCHES = 13, (1, 4, 7)
ENGINES = {
    "single": ("single", {}),
    "ddp": ("ddp", {}),
    "horovod": ("horovod", {}),
    "fsdp": ("fsdp", {}),
    "zero1": ("deepspeed", {"zero_optimization": {"stage": 1}}),
    "kept": ("deepspeed", {"zero_optimization": {"stage": 3}}),
    "zero3": ("deepspeed", {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
}


class Rows(list[Any]):
    """A data set of rows."""


def numbers(seed):
    return torch.Generator().manual_seed(seed)


class Detector(nn.Module):
    """Scores the patches of each image and keeps those above 0: another number of boxes for each image."""

    def __init__(self, keeps=False):
        super().__init__()
        self.score, self.box, self.keeps = nn.Linear(6, 1), nn.Linear(6, 4), keeps

    def forward(self, images):
        patches, sizes = torch.cat(images), [len(image) for image in images]
        scores, boxes = self.score(patches).squeeze(1).split(sizes), self.box(patches).split(sizes)
        kept = [s > 0 if not self.keeps else s == s for s in scores]
        return [{"boxes": b[k], "scores": s[k]} for s, b, k in zip(scores, boxes, kept, strict=True)]


class Boxes(Task):
    """Detection: lists of images, dicts of boxes, another number of them in each image. Its loss is of training alone."""

    @staticmethod
    def collate(rows):
        return ([row[0] for row in rows],), [row[1] for row in rows]

    def model(self):
        return Detector()

    def loss(self, outputs, targets):
        raise RuntimeError("a detector has no loss in evaluation mode")

    def metrics(self, outputs, targets):
        assert len(outputs) == len(targets)
        return {"boxes": Sum(sum(len(output["boxes"]) for output in outputs), len(outputs))}

    def keep(self, outputs, targets):
        return [(output["scores"], len(target["boxes"])) for output, target in zip(outputs, targets, strict=True)]

    def metrics_of_all(self, batches):
        pairs = [pair for batch in batches for pair in batch]
        best = torch.cat([scores for scores, _ in pairs]).sort().values
        return {"median": float(best[len(best) // 2]), "images": len(pairs)}

    def eval_data(self):
        draw, rows = numbers(1), Rows()
        for _ in range(SAMPLES):
            patches, truths = (int(torch.randint(3, 20, (), generator=draw)) for _ in range(2))
            rows.append((torch.randn(patches, 6, generator=draw), {"boxes": torch.randn(truths, 4, generator=draw)}))
        return rows

    train_data = eval_data

    def by_hand(self, model):
        outputs = [model([image])[0] for image, _ in self.eval_data()]
        scores = torch.cat([output["scores"] for output in outputs]).sort().values
        median = float(scores[len(scores) // 2])
        return {"boxes": len(scores) / SAMPLES, "median": median, "images": SAMPLES}


class Words(Task):
    """word2vec: a collate that makes pairs of words from texts, another number of them than it gets texts."""

    @staticmethod
    def collate(rows):
        pairs = [(row[i], row[j]) for row in rows for i in range(len(row)) for j in (i - 1, i + 1) if 0 <= j < len(row)]
        return torch.tensor([one for one, _ in pairs]), torch.tensor([other for _, other in pairs])

    def model(self):
        return nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30))

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets)

    def eval_data(self):
        draw = numbers(2)
        sizes = torch.randint(2, 12, (SAMPLES,), generator=draw).tolist()
        return Rows(torch.randint(30, (size,), generator=draw).tolist() for size in sizes)

    train_data = eval_data

    def by_hand(self, model):
        losses = []
        for row in self.eval_data():
            inputs, targets = self.collate([row])
            losses.append(F.cross_entropy(model(inputs), targets, reduction="none"))
        return {"loss": float(torch.cat(losses).mean())}


class Look(Hooks):
    """Writes what it sees of evaluations: outputs of each rank, and the loss of a copy of the model."""

    def on_evaluation_batch(self, run, outputs, targets):
        with (run.directory / f"outputs{run.rank}.jsonl").open("a") as file:
            file.write(json.dumps([run.step, len(outputs)]) + "\n")

    def on_evaluation(self, run, metrics):
        model = run.model(averages=True)
        assert (model is None) == (run.rank > 0)
        if model is not None:
            assert not model.training
            found = [metrics["loss"], Rated().by_hand(model)["loss"], metrics["images"]]
            write_json(run.directory / "seen.json", found)


class Rated(Boxes):
    """One that has a loss in evaluation mode too, and hooks that look at it."""

    hooks = (Look(),)

    def model(self):
        return Detector(keeps=True)

    def loss(self, outputs, targets):
        return torch.stack([output["scores"].square().mean() for output in outputs]).mean()

    def by_hand(self, model):
        with torch.no_grad():
            return {"loss": float(self.loss(model([image for image, _ in self.eval_data()]), None))}


class Gathers(Rated):
    """Keeps what it needs of each batch on itself, of which each rank has a part."""

    hooks = ()

    def __init__(self):
        self.boxes = []

    def metrics(self, outputs, targets):
        self.boxes += [len(output["boxes"]) for output in outputs]
        return {3: Sum(1.0, 1), **super().metrics(outputs, targets)}

    def finalize(self, sums):
        boxes, self.boxes = self.boxes, []
        return {"boxes": sum(boxes), "3": sums["3"].mean}


class Generates(Task):
    """Metrics that call the model as often as a row asks for: another number of calls on each rank."""

    def model(self):
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        return self.net

    def loss(self, outputs, targets):
        return F.mse_loss(outputs, targets.float().unsqueeze(1).expand_as(outputs))

    def metrics(self, outputs, targets):
        for _ in range(int(targets.sum())):
            outputs = self.net(outputs)
        return {"last": Sum(outputs.sum(), len(outputs))}

    def train_data(self):
        inputs = torch.randn(SAMPLES, 4, generator=numbers(6))
        return TensorSource(inputs, torch.arange(SAMPLES) % 5)

    eval_data = train_data


class Mixed(Task):
    """Mixup in the collate of the training, two sets to evaluate on, and an accuracy beside which the loss is left out."""

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def collate(self, rows):
        raise AssertionError("the collate of the training")

    @staticmethod
    def eval_collate(rows):
        return torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets)

    def metrics(self, outputs, targets):
        return {
            f"right of {self.context.eval_set}": Sum((outputs.argmax(1) == targets).sum(), self.context.eval_samples)
        }

    def train_data(self):
        draw = numbers(4)
        return Rows((torch.randn(4, generator=draw), number % 3) for number in range(SAMPLES))

    def eval_data(self):
        return {"val": self.train_data(), "clean": Rows(self.train_data()[:5])}

    def by_hand(self, model):
        found = {}
        for name, rows in self.eval_data().items():
            outputs, targets = model(torch.stack([row[0] for row in rows])), torch.tensor([row[1] for row in rows])
            found[f"{name}/loss"] = float(F.cross_entropy(outputs, targets))
            found[f"{name}/right of {name}"] = float((outputs.argmax(1) == targets).float().mean())
        return found


TASKS = {one.__name__: one for one in (Boxes, Words, Mixed)}


def by_hand(name):
    """The metrics of a loop on one process, sample by sample."""
    task = TASKS[name]()
    generators.seed(0)
    model = task.model().eval()
    with torch.no_grad():
        return task.by_hand(model)


def measure(name, engine_name):
    """**Collective.** The metrics at each micro-batch, and what was said."""
    kind, changes = ENGINES[engine_name]
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "dsframe": {"task": {"name": f"tests.engines.evaluated:{name}"}},
        **changes,
    }
    engine = prepare(file, kind)[0]()
    task, said = engine.plan.task, []
    report = {}
    for size in MICRO_BATCHES:
        loaders = {
            key: EvaluationLoader(
                as_source(data, 0, task.eval_collate or task.collate),
                seed=0,
                micro_batch_size=size,
                rank=engine.plan.data_rank,
                ranks=engine.plan.batch.data_parallel_size,
            )
            for key, data in sets(task, task.eval_data()).items()
        }
        evaluation = Evaluation(engine, loaders, lambda: None, said.append)
        evaluation.try_out()
        report[str(size)] = evaluation.run()
    report["said"] = sorted(set(said))
    if hasattr(engine, "_engine"):
        engine._engine.destroy()
    return report


def main(path, engine_name):
    torch.set_num_threads(1)
    with one_process_group():
        report = {name: measure(name, engine_name) for name in TASKS}
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            write_json(Path(path), report)


if __name__ == "__main__":
    from dsframe.train import leave_at_once

    main(*sys.argv[1:])
    leave_at_once(0)
