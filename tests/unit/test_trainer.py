"""The loop in one process, in seconds: after a resume, a skipped update, an evaluation; whose random numbers come next."""

import signal
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import dsframe
from dsframe.checkpoint.store import locate, read_manifest
from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.data import TensorSource
from dsframe.errors import CheckpointError, DataError, StoppedError, TaskError, TrainingError
from dsframe.guard import nonfinite
from dsframe.guard.signals import StopRequest
from dsframe.host import generators
from dsframe.model import build, optimizers, schedules
from dsframe.model.micro_batch import MicroBatch
from dsframe.model.plan import Plan
from dsframe.model.state import EngineState
from dsframe.run_dir.record import read_metrics
from dsframe.trainer import Trainer
from dsframe.training import finite, running_model, step_log
from dsframe.training.checkpoints import Checkpoints
from dsframe.training.evaluations import Evaluations
from tests.files import ds_config
from tests.threads import Room


class Line(dsframe.Task):
    """One weight. ``broken``: samples whose loss is NaN."""

    def __init__(self, *broken):
        self.broken = broken

    def model(self):
        return nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))

    def loss(self, outputs, targets):
        return (outputs - targets).square().mean()

    def train_data(self):
        inputs = torch.arange(1.0, 13.0).reshape(12, 1) / 12
        inputs[list(self.broken)] = torch.nan
        return TensorSource(inputs, torch.ones(12, 1))

    def eval_data(self):
        return TensorSource(torch.ones(4, 1), torch.ones(4, 1))


def file(run, **more):
    section = {"engine": "single", "steps": 6, "run_dir": str(run), "order": "sequential", "log_every_steps": 1}
    return ds_config(
        2,
        "SGD",
        0.1,
        sections={"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}},
        **(section | more),
    )


def curve(run, key):
    return [line[key] for line in read_metrics(run) if key in line]


def test_a_resume_continues_rates_losses_and_random_numbers(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    often = {"checkpoints": {"every_steps": 3}}
    dsframe.fit(Line(), file(whole, **often))
    dsframe.fit(Line(), file(parts, **often), overrides=["dsframe.steps=3"])
    dsframe.fit(Line(), file(parts, **often), resume="auto")
    for key in ("learning_rate", "loss"):
        assert curve(parts, key) == curve(whole, key)
    assert [rate > 0 for rate in curve(whole, "rate")] == [False] + [True] * 5
    assert curve(whole, "epoch") == [step / 6 for step in (*range(1, 7), 6)]
    assert curve(whole, "learning_rate") == [0.1 * 0.5**step for step in range(6)]


class Drawing(Line):
    def metrics(self, outputs, targets):
        return {"drawn": dsframe.Sum(torch.randperm(9)[0], 1)}  # which belongs to no sample


class Copying(dsframe.Hooks):
    def on_step(self, run):
        run.model()

    def on_evaluation(self, run, metrics):
        metrics.clear()


class Fading(Line):
    """Its loss is divided by the step, which is not 0 in the trial of the evaluation either."""

    def model(self):
        return nn.Linear(1, 1)

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) / self.context.step


class Killing(dsframe.Hooks):
    def on_evaluation_batch(self, run, outputs, targets):
        raise ZeroDivisionError


def test_an_evaluation_after_a_resume_is_of_the_step_it_was_left_out_after(tmp_path):
    whole, parts = (
        file(tmp_path / run, steps=4, eval_every_steps=2, checkpoints={"every_steps": 2}) for run in ("whole", "parts")
    )
    dsframe.fit(Fading(), whole)
    killed = Fading()
    killed.hooks = [Killing()]
    with pytest.raises(ZeroDivisionError):
        dsframe.fit(killed, parts)
    dsframe.fit(Fading(), parts, resume="auto")
    assert curve(tmp_path / "parts", "evaluation") == curve(tmp_path / "whole", "evaluation") != []


def test_evaluations_and_copies_leave_the_training_s_random_numbers(tmp_path):
    dsframe.fit(Drawing(), file(tmp_path / "plain"))
    dsframe.fit(Drawing(), file(tmp_path / "often", eval_every_steps=1))
    copied = Drawing()
    copied.hooks = [Copying()]
    assert dsframe.fit(copied, file(tmp_path / "copied")).metrics
    for run in ("often", "copied"):
        assert curve(tmp_path / run, "loss") == curve(tmp_path / "plain", "loss")


class Counter(nn.Module):
    """Holds a number in no tensor, and random ones that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.number = 0
        self.register_buffer("mask", torch.rand(1), persistent=False)

    def forward(self, rows):
        self.number += self.training
        return rows + self.mask

    def get_extra_state(self):
        return self.number

    def set_extra_state(self, state):
        self.number = state


class Copied(Line):
    """Holds each model that it has made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def model(self):
        self.made.append(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), Counter()))
        return self.made[-1]


class Taking(dsframe.Hooks):
    """Takes copies at the last save."""

    def __init__(self, averages):
        self.averages, self.copies = averages, []

    def on_checkpoint(self, run, path):
        self.copies += [run.model(averages=averages) for averages in self.averages]


@pytest.mark.parametrize("more", [{"ema": {"decay": 0.5}}, {"adapter": {"r": 1, "target_modules": ["0"]}}])
def test_a_copy_of_the_model_is_what_a_checkpoint_has(more, tmp_path):
    """Weights or their averages, buffers, extra states and an adapter; in evaluation mode, as it was built."""
    averages = [False, True] if "ema" in more else [False]
    task, hook = Copied(), Taking(averages)
    task.hooks = [hook]
    dsframe.fit(task, file(tmp_path, **more))
    for copied, of_averages in zip(hook.copies, averages, strict=True):
        loaded = dsframe.load_model(tmp_path, Copied(), averages=of_averages)
        assert not any(module.training for module in copied.modules())
        assert copied[2].number == task.made[0][2].number > 0
        assert torch.equal(copied[2].mask, task.made[0][2].mask)
        for name, tensor in loaded.state_dict().items():
            if name != "2._extra_state":
                torch.testing.assert_close(copied.state_dict()[name], tensor)


def test_a_copy_is_where_it_is_asked_for_and_an_error_everywhere():
    def copies(ranks):
        of_file = SimpleNamespace(settings=SimpleNamespace(ema=None))
        vars(ranks.plan).update(task=Line(), seed=0, config=of_file)
        ranks.built, ranks.state = MagicMock(adapter=None, watch=None), lambda: EngineState(0, None, {}, {}, [])
        made = [running_model.copy_of(ranks, False, all_ranks) is not None for all_ranks in (False, True)]
        ranks.plan.task.model = lambda: 1 / 0
        for averages, said in ((False, "Line.model: .*ZeroDivisionError"), (True, 'write "ema"')):
            with pytest.raises(TaskError, match=said):
                running_model.copy_of(ranks, averages)
        return made

    assert Room(2).run(copies) == [[True, True], [False, True]]


def test_a_task_that_gives_its_model_again_has_no_copy(tmp_path):
    task, made = Line(), nn.Linear(1, 1)
    task.model, task.hooks = lambda: made, [Copying()]
    with pytest.raises(TaskError, match=r"model\(\) gives the module that is trained"):
        dsframe.fit(task, file(tmp_path))


class Undropped(Line):
    def model(self):
        return nn.Linear(1, 1)


def evaluated(run, task):
    """The loss of the weights that were saved."""
    inputs, targets = task.eval_data().batch(torch.arange(4), 0)
    with torch.no_grad():
        return float(task.loss(dsframe.load_model(run, task).eval()(inputs), targets))


def test_training_drops_out_and_evaluations_do_not(tmp_path):
    summary = dsframe.fit(Line(), file(tmp_path))
    dsframe.fit(Undropped(), file(tmp_path / "plain"))
    assert curve(tmp_path, "loss") != curve(tmp_path / "plain", "loss")
    assert summary.metrics["loss"] == pytest.approx(evaluated(tmp_path, Line()))


class Zeroed(Undropped):
    def after_step(self, name, weight):
        weight.zero_()


def hooked_by(hook):
    model = nn.Linear(1, 1)
    model.weight.register_hook(hook)
    return model


def test_weights_of_16_bits_follow_their_masters(tmp_path):
    summary = dsframe.fit(Undropped(), file(tmp_path) | {"bf16": {"enabled": True}})
    assert summary.metrics["loss"] == pytest.approx(evaluated(tmp_path, Undropped()), rel=0.05)
    assert curve(tmp_path, "loss")[0] > 2 * summary.metrics["loss"]
    assert dsframe.fit(Zeroed(), file(tmp_path / "zero") | {"bf16": {"enabled": True}}).metrics["loss"] == 1


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}}


def test_hooks_on_gradients_see_no_loss_scale(tmp_path):
    seen = [], []
    for gradients, more in zip(seen, ({}, FP16), strict=True):
        hooked = Undropped()
        hooked.model = partial(hooked_by, lambda gradient, kept=gradients: kept.append(float(gradient)))
        dsframe.fit(hooked, file(tmp_path / str(len(more)), steps=1) | more)
    assert seen[1] == pytest.approx(seen[0], rel=0.01)


def test_a_resume_continues_the_loss_scale(tmp_path):
    dsframe.fit(Undropped(), file(tmp_path / "whole") | FP16)
    dsframe.fit(Undropped(), file(tmp_path / "parts") | FP16, overrides=["dsframe.steps=3"])
    dsframe.fit(Undropped(), file(tmp_path / "parts") | FP16, resume="auto")
    scales = [read_manifest(locate(tmp_path / name)[0])["loss_scale"] for name in ("whole", "parts")]
    assert scales[0] == scales[1]
    assert scales[0]["scale"] > 2**4


class Terms(Line):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets), {"target": dsframe.Sum(targets.sum(), len(targets))}

    def train_data(self):
        return TensorSource(torch.ones(12, 1), torch.arange(12.0).reshape(12, 1))


def test_a_term_is_the_mean_over_all_micro_batches(tmp_path):
    given = file(tmp_path, steps=2) | {"gradient_accumulation_steps": 2}
    dsframe.fit(Terms(), given)
    assert curve(tmp_path, "target") == [0.5, 2.5]


def test_the_average_does_not_move_after_a_skipped_update(tmp_path):
    """The third of three updates is left out, and the last one before it was averaged already."""
    ends = []
    for steps, broken in ((2, ()), (3, (4,))):
        run = tmp_path / str(steps)
        given = file(run, ema={"decay": 0.5}, on_nonfinite="skip", steps=steps)
        assert dsframe.fit(Line(*broken), given).skipped_steps == len(broken)
        ends.append(dsframe.load_model(run, Line(), averages=True).state_dict())
        assert read_manifest(locate(run)[0])["updates"] == 2
    assert torch.equal(ends[0]["0.weight"], ends[1]["0.weight"])


def test_fifty_skipped_updates_in_a_row_end_the_training(tmp_path):
    with pytest.raises(TrainingError, match="step 50: "):
        dsframe.fit(Line(*range(12)), file(tmp_path / "bits", on_nonfinite="skip", steps=60))
    fixed = {"fp16": {"enabled": True, "loss_scale": 8}}
    with pytest.raises(TrainingError, match="step 50: "):
        dsframe.fit(Line(*range(12)), file(tmp_path / "scaled", steps=60) | fixed)


@pytest.mark.parametrize("broken", [0, 2])
def test_no_learning_rate_is_blamed_for_a_loss_before_the_first_update(broken, tmp_path):
    began = r"no update was made before, so look at the weights that the training begins with"
    with pytest.raises(TrainingError, match="lower the learning rate" if broken else began):
        dsframe.fit(Line(broken), file(tmp_path))


def test_of_several_ranks_the_first_is_blamed(monkeypatch):
    monkeypatch.setattr(nonfinite, "_parts", lambda rank, step: [(0, torch.tensor([rank, step]))])
    for name in ("_nonfinite_samples", "_parameters"):
        monkeypatch.setattr(nonfinite, name, lambda loader, *step: [loader, *step] if step else "")

    def told(ranks):
        rank, first = ranks.plan.world.rank, nonfinite.FirstNonFinite(ranks.plan.device)
        for step in (5 - rank, 9):
            first.look(step, torch.tensor(torch.nan), None)
        return nonfinite.diagnose_nonfinite(ranks, rank, first, 9).rpartition(";")[0]

    line = "the loss of rank 1 is not finite since step 4, made of samples 1, 4; of these, 1, 4 hold NaN or infinity themselves"
    assert Room(2).run(told) == [line] * 2


def test_skipped_updates_that_are_not_in_a_row_end_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(finite, "SKIPS_IN_A_ROW", 2)
    given = file(tmp_path, on_nonfinite="skip")
    assert dsframe.fit(Line(0, 4), given).skipped_steps == 2
    assert curve(tmp_path, "skipped") == [True, False, True, False, False, False]
    with pytest.raises(
        TrainingError, match=r"step 4: the loss of rank 0 is not finite since step 3, made of samples 4, 5"
    ):
        dsframe.fit(Line(0, 4, 6), given)


class Steep(Undropped):
    """A loss of 0, whose gradients are NaN."""

    def loss(self, outputs, targets):
        return (outputs - outputs.detach()).abs().sqrt().mean()


def test_gradients_that_are_not_finite_end_the_training_at_the_next_line(tmp_path):
    with pytest.raises(TrainingError, match="step 1: the gradients are not finite at step 1, though the loss is"):
        dsframe.fit(Steep(), file(tmp_path))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    with pytest.raises(TrainingError, match=r"step 3: .* made of samples 4, 5; of these, 4 hold NaN"):
        dsframe.fit(Line(4), file(tmp_path, log_every_steps=100, checkpoints={"every_steps": 1, "keep_last": 1}))
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == ["step-00000002"]


@pytest.mark.parametrize("rank", [0, 1])
def test_random_numbers_go_by_the_row_of_the_global_batch(rank):
    """Of two ranks with three micro-batches of four rows: the ranks take turns."""
    asked = []
    batch = SimpleNamespace(data_parallel_size=2, micro_batch_size=4)
    plan = SimpleNamespace(batch=batch, data_rank=rank)
    built = SimpleNamespace(sample_draws=SimpleNamespace(at=lambda step, row: asked.append((step, row))))
    loop = SimpleNamespace(
        engine=SimpleNamespace(plan=plan, built=built),
        _watchdog=SimpleNamespace(alive=lambda: None),
        _trial=SimpleNamespace(watched=lambda batch, index: batch),
        training=SimpleNamespace(first_step=1),
    )
    list(Trainer._observed(loop, [MicroBatch(None, None)] * 3, 5))
    assert asked == [(4, 4 * rank), (4, 8 + 4 * rank), (4, 16 + 4 * rank)]


def test_a_checkpoint_has_what_is_known_of_its_step(tmp_path):
    """Step 3 is not logged, odd steps are not evaluated; a resume, also of the finished run, evaluates nothing again."""
    often = {"every_steps": 1, "keep_last": 9}
    given = file(tmp_path, log_every_steps=4, eval_every_steps=2, checkpoints=often)
    dsframe.fit(Line(), given, overrides=["dsframe.steps=4"])
    summary = dsframe.fit(Line(), given, resume="auto")
    kept = [read_manifest(path) for path in reversed(locate(tmp_path))]
    assert [one["loss"] is None for one in kept] == [False, False, True, False, False, False]
    assert [bool(one["evaluation"]) for one in kept] == [False, True, False, True, False, True]
    again = dsframe.fit(Line(), given, resume="auto")
    assert (again.loss, again.metrics) == (summary.loss, summary.metrics)
    assert len(curve(tmp_path, "evaluation")) == 3


def test_the_rate_is_of_the_steps_after_the_first_without_pauses(monkeypatch):
    """Ten steps of eight tokens in five of nine seconds."""
    monkeypatch.setattr("dsframe.trainer.all_gather_json", lambda *_: [0])
    monkeypatch.setattr("dsframe.trainer.peak_memory_bytes", lambda _: 0)
    loop = MagicMock()
    loop.engine.plan.batch.train_batch_size, loop.engine.plan.task.units_per_sample = 4, 2
    loop.training.first_step, loop.training.last_step, loop.training.paused_seconds = 3, 13, 3.0
    loop._first_step.ended = 2.0
    summary = Trainer._summary(loop, 1.0, 10.0)
    assert (summary.rate, summary.seconds, summary.first_step_seconds) == (16.0, 6.0, 1.0)


def test_saves_and_evaluations_are_pauses():
    training, saver = MagicMock(step=3), MagicMock(saved_step=None)
    saver.save.return_value = 5.0
    checkpoints = Checkpoints(saver, MagicMock(), MagicMock(), MagicMock())
    checkpoints.save(training)
    Evaluations(MagicMock(), MagicMock(), checkpoints).evaluate(training)
    assert not saver.rate.called  # step 3 has no checkpoint here
    assert [each.args for each in training.pause.call_args_list] == [(5.0,), (pytest.approx(0.0, abs=5.0),)]


@pytest.mark.parametrize(
    ("asynchronous", "name", "by"), [(False, "", " by a signal to another rank"), (True, "SIGUSR1", "")]
)
def test_a_stopped_run_and_a_hook_wait_for_a_save(asynchronous, name, by):
    """Not the hook if it is to be in the background."""
    saver, training, events = MagicMock(saved_step=None, asynchronous=asynchronous), MagicMock(step=3), MagicMock()
    training.stop_request.name = name
    with pytest.raises(StoppedError, match=f"^stopped after step 3{by}; continue with --resume auto$"):
        Checkpoints(saver, events, MagicMock(), MagicMock()).save_and_stop(training)
    assert [each.args[0] for each in events.emit.call_args_list] == ["on_checkpoint", "on_finish"]
    assert training.stop_request.saving.call_count == 2  # a second signal interrupts neither save nor wait
    assert [name for name, *_ in saver.method_calls] == ["save", *["settle"] * (not asynchronous), "path", "settle"]


@pytest.mark.parametrize(("ranks_with", "mean"), [(2, 2 / 3), (1, 1.0)])
def test_what_is_logged_is_the_mean_over_ranks(ranks_with, mean):
    """Of terms, over those of which a loss has some."""

    def logged(ranks):
        rank = ranks.plan.world.rank
        terms = {"right": dsframe.Sum(torch.tensor(1.0), 1 + rank)} if rank < ranks_with else {}
        return step_log._means(ranks, SimpleNamespace(loss=torch.tensor(float(rank)), terms=terms))

    assert Room(2).run(logged) == [(0.5, {"right": pytest.approx(mean)})] * 2


def test_a_stream_of_another_length_is_said_once():
    result = SimpleNamespace(loss=torch.ones(()), terms={}, gradient_norm=None, skipped=False, learning_rate=0.1)

    def logged(ranks):
        training, log = MagicMock(step=1, first_step=1, engine=ranks), step_log.StepLog(MagicMock(), MagicMock())
        training.loader.rows_read.return_value = None
        log.log(training, result)
        log.log(training, result)
        return training.progress.say.call_count

    assert Room(1).run(logged) == [1]


def test_passes_over_a_stream_that_differ_between_ranks_are_refused():
    def refused(ranks):
        with pytest.raises(DataError) as caught:
            step_log._rows_read(ranks, SimpleNamespace(rows_read=lambda: [5, 1, 4 + ranks.plan.world.rank]))
        return str(caught.value)

    assert all("had 4 rows on rank 0, but 5 on rank 1" in said for said in Room(2).run(refused))


def test_ranks_may_be_in_different_passes_over_a_stream():
    def read(ranks):
        passes = 1 + ranks.plan.world.rank
        return step_log._rows_read(ranks, SimpleNamespace(rows_read=lambda: [5 + passes, passes, 4 * passes]))

    assert Room(2).run(read) == [{"rows_read": [6, 7]}] * 2


def test_two_micro_batches_are_one_batch(tmp_path):
    for count in (1, 2):
        given = file(tmp_path / str(count), per_sample_randomness=True)
        dsframe.fit(Line(), given | {"gradient_accumulation_steps": count})
    assert curve(tmp_path / "2", "loss") == pytest.approx(curve(tmp_path / "1", "loss"))


def test_one_ranks_signal_stops_all_and_one_ranks_trouble_is_known_to_all():
    def stops(ranks):
        rank = ranks.plan.world.rank
        request = StopRequest(ranks, 0, lambda: rank == 1)
        request._received = signal.SIGTERM if rank else None
        return request.agreed(1), request.trouble, request.name

    assert Room(2).run(stops) == [(True, True, ""), (True, True, "SIGTERM")]


class Remembering(Line):
    def __init__(self):
        super().__init__()
        self.seen = [0]

    def loss(self, outputs, targets):
        self.seen.append(len(targets))
        return super().loss(outputs, targets) * min(1.0, len(self.seen) / 100)


_CALLS = [0]


class Counting(Line):
    def loss(self, outputs, targets):
        _CALLS[0] += 1
        return super().loss(outputs, targets) * min(1.0, _CALLS[0] / 1000)


def test_a_loss_that_depends_on_a_global_is_said_and_not_gone_on_from(tmp_path, capsys):
    dsframe.fit(Counting(), file(tmp_path, steps=3))
    assert "its loss depends on them (_CALLS of test_trainer.py)" in capsys.readouterr().err
    with pytest.raises(TaskError, match=r"_CALLS of test_trainer\.py\): no checkpoint has them"):
        dsframe.fit(Counting(), file(tmp_path), resume="auto")


def test_what_no_checkpoint_has_and_what_ends_before_it_is_not_gone_on_from(tmp_path):
    dsframe.fit(Remembering(), file(tmp_path, steps=3))
    with pytest.raises(TaskError, match=r"its loss depends on them \(seen\): no checkpoint has them"):
        dsframe.fit(Remembering(), file(tmp_path), resume="auto")
    with pytest.raises(CheckpointError, match="was saved after step 3, but the run ends at step 2"):
        dsframe.fit(Remembering(), file(tmp_path, steps=2), resume="auto")


class Rank(SimpleNamespace):
    """One that can be referred to weakly."""


@pytest.mark.parametrize(
    ("modules", "line"),
    [
        ((nn.ReLU(), nn.Tanh()), "module 1 ReLU()"),
        ((nn.Dropout(0.1), nn.Dropout(0.2)), "module 1 Dropout(p=0.1, inplace=False)"),
        ((nn.ReLU(), nn.ReLU()), ""),
    ],
)
def test_ranks_with_other_modules_are_refused(modules, line):
    def build_one(ranks):
        ranks.plan.task = Line()
        try:
            build.assert_same_model(ranks, nn.Sequential(nn.Linear(3, 4), modules[ranks.plan.world.rank]))
        except TaskError as error:
            return str(error)
        return ""

    for said in Room(2).run(build_one):
        assert line in said
        assert bool(said) == bool(line)


def test_ranks_build_the_same_model_and_draw_other_numbers(monkeypatch, tmp_path):
    seeds = []
    monkeypatch.setattr(generators, "seed", seeds.append)
    config = load(file(tmp_path))

    def built(ranks):
        rank = ranks.plan.world.rank
        spec, course = optimizers.read(config), schedules.constant(0.1)
        plan = Plan(config, World(rank, 2, rank, 2), Line(), spec, course, config.batch(2), torch.device("cpu"))
        build.build_model(Rank(plan=plan, sum_over_ranks=ranks.sum_over_ranks))

    Room(2).run(built)
    assert len(seeds) == 4
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(("p", "draws"), [(0.0, False), (0.5, True), (1.0, False)])
def test_a_dropout_of_nothing_or_everything_draws_no_other_masks(p, draws):
    assert bool(build.dependences(Line(), nn.Dropout(p))) == draws


@pytest.mark.parametrize(
    "module", [nn.Embedding(2, 2, scale_grad_by_freq=True), nn.InstanceNorm1d(2, track_running_stats=True)]
)
def test_what_counts_within_a_micro_batch_is_said(module):
    assert build.dependences(Line(), module)
