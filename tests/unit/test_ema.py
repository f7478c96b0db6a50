"""The average of the weights is torch's AveragedModel, in checkpoints, over restarts, and evaluated on request.

On other engines: tests/engines/test_groups.py.
"""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dsframe
from dsframe.checkpoint.reader import Checkpoint
from dsframe.data import Loader
from dsframe.model import ema
from dsframe.tools import export
from tests.files import ds_config
from tests.lines import HeldOut


class Line(HeldOut):
    inputs, outputs = 3, 2


def file(run, kind="AdamW", ema=None, **more):
    settings = {"engine": "single", "steps": 6, "run_dir": str(run), "inherit": "torch", **more}
    settings |= {} if ema is None else {"ema": ema}
    return ds_config(8, kind, 0.1, **settings)


def by_hand(kind, decay, every):
    """The averages after six steps, and their mean loss over all samples."""
    torch.manual_seed(0)
    task = Line()
    model = task.model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    loader = Loader(task.train_data(), seed=0, micro_batch_size=8)
    for step in range(6):
        inputs, targets = next(iter(loader.micro_batches(step)))
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0:
            average.update_parameters(model)
    inputs, targets = task.train_data().batch(torch.arange(64), 0)
    with torch.no_grad():
        return dict(average.module.named_parameters()), float(task.loss(average(inputs), targets))


def by_weights(weights, decays):
    average = weights[0]
    for weight, decay in zip(weights[1:], decays, strict=True):
        average = decay * average + (1 - decay) * weight
    return average


@pytest.mark.parametrize(
    ("more", "decays"),
    [
        ({"warmup_gamma": 1.0}, [1 - (1 + n) ** -(2 / 3) for n in (2, 3, 4, 5, 6)]),
        (
            {"warmup_gamma": 0.1, "warmup_power": 0.75, "start_step": 2},
            [0.0] + [1 - (1 + n / 0.1) ** -0.75 for n in (1, 2)] + [0.9] * 2,
        ),
    ],
)
def test_its_decay_grows(more, decays, tmp_path):
    """As in torchvision's references, ema_pytorch and timm: weights until a step, then a decay that grows."""
    given = file(tmp_path, ema={"decay": 0.9, **more}, checkpoints={"every_steps": 1, "keep_last": 9})
    dsframe.fit(Line(), given)
    weights = []
    for step in range(1, 7):
        checkpoint = tmp_path / "checkpoints" / f"step-{step:08}"
        weights.append(Checkpoint(checkpoint).parameter("weight").weight.clone())
    torch.testing.assert_close(averages(checkpoint)["weight"], by_weights(weights, decays))


def averages(checkpoint):
    found = Checkpoint(checkpoint)
    return {name: found.parameter(name).moments["ema"].clone() for name in found.shapes}


def test_it_is_evaluated_on_request_alone(tmp_path):
    plain, kept = (dsframe.fit(Line(), file(tmp_path / str(ema), ema=ema)).metrics for ema in (None, {"decay": 0.9}))
    assert plain == kept


def test_one_that_begins_before_the_first_update_moves_towards_it():
    weight = nn.Parameter(torch.zeros(1))
    optimizer, start = torch.optim.SGD([weight], lr=1.0), ema.copies([weight])
    weight.data += 4.0
    ema.update(optimizer, [weight], 0.75, start)
    assert optimizer.state[weight][ema.KEY].item() == 1.0


def test_weights_and_averages_change_places_and_return_after_an_error():
    weight, seen = nn.Parameter(torch.zeros(1)), []
    optimizer = torch.optim.SGD([weight], lr=1.0)
    ema.update(optimizer, [weight], 0.5)
    weight.data += 1.0
    with pytest.raises(KeyError), ema.swapped(optimizer, [weight], lambda: seen.append(weight.item())):
        raise KeyError
    assert seen == [0.0, 1.0]


@pytest.mark.parametrize(("kind", "every"), [("AdamW", 2), ("SGD", 1)])
def test_it_is_torchs(kind, every, tmp_path):
    wanted = {"decay": 0.9, "every_steps": every, "evaluate": True}
    summary = dsframe.fit(Line(), file(tmp_path / "run", kind, wanted))
    expected, loss = by_hand(kind, 0.9, every)
    found = averages(tmp_path / "run" / "checkpoints" / "step-00000006")
    for name, value in expected.items():  # the optimizer is fused here, which rounds otherwise
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-6, atol=1e-7)
    assert summary.metrics["loss"] == pytest.approx(loss, rel=1e-6)


def test_averages_that_were_evaluated_are_exported(here, capsys):
    dsframe.fit(Line(), file(here / "run", ema={"decay": 0.9, "evaluate": True}))
    checkpoint = here / "run" / "checkpoints" / "step-00000006"
    capsys.readouterr()
    for name, options, wanted in (
        ("averages", [], averages(checkpoint)),
        ("weights", ["--no-average"], export.read(checkpoint)),
    ):
        assert export.main(["run", "--out", str(here / name), *options]) == 0
        found = load_file(here / name)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert ("the averages of the weights are written" in capsys.readouterr().err) == (name == "averages")


def test_training_does_not_see_it_and_a_restart_goes_on(here):
    plain = dsframe.fit(Line(), file(here / "plain"))
    every = {"eval_every_steps": 2, "checkpoints": {"every_steps": 3, "keep_last": 9}}
    whole = dsframe.fit(Line(), file(here / "whole", ema={"evaluate": True}, **every))
    assert plain.loss == whole.loss
    later = file(here / "later", ema={"evaluate": True}, **every)
    middle = "whole/checkpoints/step-00000003"
    again = dsframe.fit(Line(), later, resume=middle)
    assert (again.loss, again.metrics) == (whole.loss, whole.metrics)
    ends = [averages(here / name / "checkpoints" / "step-00000006") for name in ("whole", "later")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_what_changes_at_a_restart_is_said(here, capsys):
    dsframe.fit(Line(), file(here / "with", ema={}))
    dsframe.fit(Line(), file(here / "none"))
    capsys.readouterr()
    dsframe.fit(Line(), file(here / "a", steps=8), resume="with")
    assert "resuming with a change: dsframe.ema; the average of the weights is dropped" in capsys.readouterr().err
    assert not Checkpoint(here / "a" / "checkpoints" / "step-00000008").keeps("ema")
    dsframe.fit(Line(), file(here / "b", ema={}, steps=8), resume="none")
    assert "the average of the weights begins with the loaded weights" in capsys.readouterr().err
