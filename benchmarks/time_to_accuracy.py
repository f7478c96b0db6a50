"""Seconds from the command to a test accuracy of 0.92 on Fashion-MNIST: what users buy. Two processes, one thread each.

    python -m benchmarks.time_to_accuracy                 # ds_configs/fast_fashion_mnist.json, three seeds, and the peers
    python -m benchmarks.time_to_accuracy --held-out      # what the file was tuned by, without the peers

``fast_fashion_mnist.json`` trains to its end, and its last evaluation counts: the seconds are those of the whole command. It was
tuned by the last 10,000 images of the training set, held out for that (``--held-out``), never by the test set. Peers train what
their MNIST examples do, the network and the optimizer of PyTorch's example (Adadelta from 1.0, times 0.7 an epoch, batches of 64
a process, dropout), on the same images under torchrun, and are evaluated after each epoch until they are there or ``--epochs`` are
over. Fails where a seed of the file ends below the target.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.nn import functional

from benchmarks import processes
from benchmarks.startup import REPOSITORY
from dsframe.data import vision
from dsframe.run_dir.record import read_metrics
from dsframe.tasks.vision import VisionTask
from dsframe.tools import subprocess_runs
from dsframe.tools.report.pictures import Chart, Line, figure

FILE = REPOSITORY / "ds_configs" / "fast_fashion_mnist.json"
TARGET = 0.92
TRAINED = 50_000
"""Images of the training set that a run with ``--held-out`` trains on."""
PEERS = ("accelerate", "lightning")


class HeldOut(VisionTask):
    """The CNN on the first 50,000 training images, evaluated on the other 10,000."""

    def __init__(self):
        from dsframe.config.schema.settings import VisionTask as Settings

        super().__init__(Settings(**json.loads(FILE.read_text())["dsframe"]["task"]), 0)

    def train_data(self):
        self.settings = self.settings.model_copy(update={"samples": TRAINED})
        return super().train_data()

    def eval_data(self):
        plain = self.settings.model_copy(update={"augment": False, "samples": None})
        return _Rows(vision.load(plain, self.images, train=True, seed=0), TRAINED)


class _Rows:
    """A source from its row ``first`` on."""

    def __init__(self, source, first):
        self._source, self._first = source, first

    def __len__(self):
        return len(self._source) - self._first

    def batch(self, indices, epoch):
        return self._source.batch(indices + self._first, epoch)


def ours(folder, seed, *, held_out, overrides):
    """The seconds of the command, and of each evaluation the seconds until then (in proportion to steps) and its accuracy."""
    own = [f"dsframe.seed={seed}", *overrides]
    if held_out:
        own.append('dsframe.task={"name": "benchmarks.time_to_accuracy:HeldOut"}')
    began = time.perf_counter()
    subprocess_runs.train(FILE, 2, folder, engine="ddp", overrides=own)
    seconds = time.perf_counter() - began
    rows = read_metrics(folder)
    curve = [(float(row["step"]), row["evaluation"]["accuracy"]) for row in rows if "evaluation" in row]
    last, begun = curve[-1][0], seconds - json.loads((folder / "summary.json").read_text())["seconds"]
    return seconds, [(begun + step / last * (seconds - begun), accuracy) for step, accuracy in curve]


class Example(nn.Sequential):
    """The network of PyTorch's MNIST example."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(),
            nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
        )  # fmt: skip


def images(*, train):
    """As the examples read them: torchvision's data set, a tensor of each image, normalised."""
    from torchvision import datasets, transforms

    known = vision.KNOWN["fashion-mnist"]
    look = transforms.Compose([transforms.ToTensor(), transforms.Normalize(known.mean, known.std)])
    root = str(Path(os.environ["DSFRAME_DATA"]).expanduser())
    return datasets.FashionMNIST(root, train=train, transform=look)


def accelerate(epochs):
    """Yields the test accuracy after each epoch."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Example()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader = torch.utils.data.DataLoader(images(train=True), batch_size=64, shuffle=True)
    held_out = torch.utils.data.DataLoader(images(train=False), batch_size=500)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    for _ in range(epochs):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(inputs), targets))
            optimizer.step()
        schedule.step()
        model.eval()
        right = torch.zeros(())
        with torch.no_grad():
            for inputs, targets in held_out:
                outputs, targets = accelerator.gather_for_metrics((model(inputs), targets))
                right += (outputs.argmax(1) == targets).sum()
        yield float(right) / 10_000


def lightning(epochs):
    """Yields the test accuracy after each epoch."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Example()

        def training_step(self, batch, index):
            return functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch, index):
            right = (self.model(batch[0]).argmax(1) == batch[1]).float().mean()
            self.log("accuracy", right, on_epoch=True, sync_dist=True, batch_size=len(batch[1]))

        def configure_optimizers(self):
            optimizer = torch.optim.Adadelta(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    loader = torch.utils.data.DataLoader(images(train=True), batch_size=64, shuffle=True)
    held_out = torch.utils.data.DataLoader(images(train=False), batch_size=500)
    module = Module()
    for epoch in range(1, epochs + 1):
        if epoch == 1:
            trainer = Trainer(
                accelerator="cpu", devices=2, strategy="ddp", max_epochs=epoch, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            )  # fmt: skip
        trainer.fit_loop.max_epochs = epoch
        trainer.fit(module, loader, held_out)
        yield float(trainer.callback_metrics["accuracy"])


def peer(kind, epochs):
    """As one rank: writes ``[seconds since the command, accuracy]`` of each epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["SEED"]))
    began = float(os.environ["BEGAN"])
    for accuracy in (accelerate if kind == "accelerate" else lightning)(epochs):
        if os.environ["RANK"] == "0":
            print("CURVE " + json.dumps([time.time() - began, accuracy]), flush=True)
        if accuracy >= TARGET:
            return


def of_peer(kind, seed, epochs):
    """Runs it; the curve."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.time_to_accuracy", "--peer", kind, "--epochs", str(epochs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SEED": str(seed), "BEGAN": str(time.time())}
    environment.setdefault("DSFRAME_DATA", "~/.cache/dsframe/data")
    done = processes.run(command, timeout=3600, env=environment)
    curve = [json.loads(line.removeprefix("CURVE ")) for line in done.stdout.splitlines() if line.startswith("CURVE ")]
    if not curve:
        raise SystemExit(f"{kind} failed\n{done.stdout}{done.stderr}")
    return [(seconds, accuracy) for seconds, accuracy in curve]


def main(argv=None):
    """Prints each curve and the seconds. Returns 1 where the file does not reach the target."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_to_accuracy", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seeds", default="1,2,3", help="of the file (default: %(default)s)")
    parser.add_argument("--peer-seeds", default="1,2,3", help="those of them with which the peers train too")
    parser.add_argument("--epochs", type=int, default=14, help="of a peer, at most (default: %(default)s)")
    parser.add_argument(
        "--held-out", action="store_true", help="train on 50,000 images, evaluate on 10,000 of the training set"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for the file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="the curves of all seeds, .svg or .png")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peer:
        peer(options.peer, options.epochs)
        return 0
    processes.heed_sigterm()
    os.environ["OMP_NUM_THREADS"] = "1"
    reached = {}
    curves = []
    below = False
    with TemporaryDirectory(prefix="dsframe-accuracy-") as name:
        for seed in map(int, options.seeds.split(",")):
            seconds, curve = ours(Path(name) / str(seed), seed, held_out=options.held_out, overrides=options.set)
            curves.append(Line(f"dsframe, seed {seed}", curve, 0))
            below |= curve[-1][1] < TARGET
            if curve[-1][1] >= TARGET:
                reached.setdefault("dsframe", []).append(seconds)
            print(f"dsframe     seed {seed}  {seconds:6.1f} s  {_told(curve)}", flush=True)
            for kind in PEERS if not options.held_out and str(seed) in options.peer_seeds.split(",") else ():
                curve = of_peer(kind, seed, options.epochs)
                curves.append(Line(f"{kind}, seed {seed}", curve, 1 + PEERS.index(kind)))
                if curve[-1][1] >= TARGET:
                    reached.setdefault(kind, []).append(curve[-1][0])
                print(f"{kind:<11} seed {seed}  {curve[-1][0]:6.1f} s  {_told(curve)}", flush=True)
    if options.picture:
        chart = Chart("Fashion-MNIST, two processes", "test accuracy", curves, across="seconds from the command on")
        figure(chart).savefig(options.picture, dpi=150)
    for kind, times in reached.items():
        print(f"{kind}: {statistics.median(times):.1f} s to {TARGET} (median of {len(times)} seeds that reached it)")
    print(f"the file {'ends below the target' if below else 'reaches the target with each seed'}")
    return int(below)


def _told(curve):
    return "  ".join(f"{seconds:.0f} s {accuracy:.4f}" for seconds, accuracy in curve)


if __name__ == "__main__":
    sys.exit(main())
