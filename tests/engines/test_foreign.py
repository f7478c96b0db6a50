"""What programs do with weights that their engine does not see: the loop by hand, or refused with the reason."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from dsframe.host import generators
from dsframe.run_dir.record import read_summary
from dsframe.tools.compare import losses
from tests import kept
from tests.engines import foreign_tasks
from tests.files import read_rows, write_json
from tests.processes import run_ranks, warm

SETUPS = {
    "single": (1, {"dsframe": {"engine": "single"}}),
    "ddp": (2, {"dsframe": {"engine": "ddp"}}),
    "horovod": (2, {"dsframe": {"engine": "horovod"}}),
    "fsdp": (2, {"dsframe": {"engine": "fsdp"}}),
    "zero2": (2, {"zero_optimization": {"stage": 2}}),
    "zero3": (
        2,
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}},
    ),
    "stages": (2, {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2}),
    "stages of ZeRO-1": (2, {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}),
}
ENGINES = tuple(setup for setup in SETUPS if not setup.startswith("stages"))
READ = "outside of its module's forward pass"
MOVED = "in the memory that body.weight had when the model was built"
WRITTEN = "only to a copy|was written|were written|writes to its weight"
SHARDED = {"fsdp", "zero3"}
CASES = {
    # name: (task, options, what is refused: set-up -> words of the message)
    "weights in the loss": ("Penalty", {}, dict.fromkeys(SHARDED, READ)),
    "a layer of two names": ("TwoNames", {}, {}),
    "converted in forward": ("TwoNames", {"converts": True}, {"fsdp": "changes only a copy"}),
    "a copy in the loss": ("CopiedInLoss", {}, {"fsdp": "copy.deepcopy of a module whose weights", "zero3": READ}),
    "a weight in a list": ("Listed", {}, {"fsdp": "by a reference from before the training"}),
    "gathered weights in the loss": ("Gathered", {}, {}),
    "gathered weights written": ("WrittenInside", {}, dict.fromkeys(SHARDED, "which changes only a copy")),
    "gathered weights called": ("CalledInside", {}, dict.fromkeys(SHARDED, "is called inside of dsframe.gathered()")),
    "clamped after a step": ("After", {"what": "clamp"}, {}),
    "norms after a step": ("After", {"what": "norms"}, {}),
    "not by element": ("After", {"what": "wrong"}, dict.fromkeys(("single", "zero2"), "is not element-wise")),
    "an object after a step": ("AfterByObject", {}, {}),
    "parts in threads": ("InThreads", {}, dict.fromkeys(SHARDED, "is called in a thread of its own")),
    "in inference mode first": ("Inferred", {}, dict.fromkeys(SHARDED, "write torch.no_grad()")),
    "frozen for one call": ("Toggling", {}, {}),
    "a weight's size": ("Size", {}, dict.fromkeys(SHARDED, READ)),
    "a state in an attribute": ("Remembers", {}, dict.fromkeys(("ddp", "horovod", "fsdp", "zero3"), "depends on them")),
    "a list in an attribute": ("Remembers", {"what": "queue"}, {"zero3": "depends on them"}),
    "a long list in an attribute": ("Remembers", {"what": "long"}, {"fsdp": "depends on them"}),
    "attributes that the loss does not need": ("Remembers", {"what": "nothing"}, {}),
    "max_norm": ("MaxNorm", {}, {}),
    "max_norm of a function": (
        "MaxNorm",
        {"function": True},
        {"ddp": "not the same numbers", "zero2": "overwrites", "zero3": "max_norm", "fsdp": "max_norm"},
    ),
    "a limit of sums of rows": ("Limits", {"of": "bag"}, {}),
    "a limit of a user's class": ("Limits", {"of": "class"}, {}),
    "an attribute called limit": ("Limits", {"of": "name"}, {}),
    "a buffer that is replaced": ("Averaging", {}, {}),
    "features that hooks keep": ("Features", {}, {}),
    "scalars": ("Scaled", {}, {}),
    "scalars of all kinds": ("Temperatures", {}, {}),
    "a layer that is not registered": ("Unregistered", {}, {"fsdp": "not the model's"}),
    "a compiled part": ("Features", {"compiled": True}, {"zero3": "that is compiled already"}),
    "clamped in forward": ("Clamped", {}, {"zero2": "overwrites", "zero3": WRITTEN, "fsdp": WRITTEN}),
    "grown in forward": ("Grown", {}, {"zero2": "overwrites"}),
    **{f"written by {how}": ("Written", {"how": how}, {"fsdp": WRITTEN}) for how in ("foreach", "out", "index", "init")},
    "a gradient's hook reads": ("Decayed", {}, {"fsdp": "by a reference from before the training"}),
    "a copy in a hook": ("Copied", {}, {"fsdp": "copy.deepcopy of a module whose weights"}),
    "clamped in a stage": ("Layered", {}, {"stages of ZeRO-1": "0.weight was written in the forward pass"}),
    "clipped in a hook": ("Clipped", {}, {"zero2": "overwrites", "zero3": READ, "fsdp": READ}),
    "converted in a hook": ("Converted", {}, dict.fromkeys(("ddp", "fsdp"), "was converted from torch.float32")),
    "teacher": ("Teacher", {}, dict.fromkeys(SHARDED, f"{READ}|{WRITTEN}")),
    "weights in the loss, gathered for steps": ("Penalty", {"whole": True}, {}),
    "prototypes": ("Prototypes", {}, {}),
    "prototypes, gathered for steps": ("Prototypes", {"whole": True}, {}),
    "derivatives": ("Forces", {}, {}),
    "an equation": ("Equation", {}, {}),
    "a masked gradient": ("GradientHook", {"what": "mask"}, {}),
    "a clipped gradient": ("GradientHook", {"what": "clip"}, dict.fromkeys(("zero2", "zero3"), "is not linear")),
    "a gradient where it lies": ("GradientHook", {"what": "late"}, dict.fromkeys(("single", "fsdp"), "use register_hook")),
    "hidden derivatives": ("Hidden", {}, dict.fromkeys(SHARDED, "whole_weights = True")),
    "hidden derivatives, gathered for steps": ("Hidden", {"whole": True}, {}),
    "an equation, summed": ("Equation", {"summed": True}, dict.fromkeys(("ddp", "zero3"), "gives a sum over the rows")),
    "consolidated": ("Consolidated", {}, {}),
    "derivatives by a transform": ("Transformed", {}, {}),
    "a hook adds a layer": ("Growing", {}, dict.fromkeys(("single", "zero3"), "made in a hook")),
    "a hook writes later": ("Later", {}, {"zero2": "overwrites", "fsdp": READ}),
    "backward writes": ("Later", {"what": "backward"}, dict.fromkeys(("zero2", "zero3"), "in the backward pass")),
    "a hook writes its own": ("Later", {"what": "rank"}, {"ddp": "not the same numbers"}),
    "forward writes later": ("Later", {"what": "forward"}, {"zero2": "overwrites"}),
    "a hook replaces a layer": ("Growing", {"replaces": True}, dict.fromkeys(("single", "ddp", "zero2"), "replaced in a hook")),
    "a hook clips one of two models": ("Adversaries", {}, {"zero2": "overwrites", "fsdp": READ}),
    "other parameters": ("Overridden", {}, {"single": "gives other parameters than the model has"}),
    "recomputed by itself": ("Recomputed", {"calls": 1}, {}),
    "recomputed by itself, twice": (
        "Recomputed",
        {"calls": 2},
        dict.fromkeys(("ddp", "horovod", "fsdp", "zero3"), "use_reentrant=False"),
    ),
    "complex": ("Unusual", {"kind": "complex"}, dict.fromkeys(("ddp", "zero3"), "turn is complex")),
    "collectives of its own": ("Codebook", {}, {}),
    "a buffer is a weight's memory": ("Shared", {"kind": "buffer"}, dict.fromkeys(("single", "zero2"), "in the same memory")),
    "an attribute is a weight's memory": ("Shared", {"kind": "attribute"}, dict.fromkeys(("fsdp", "zero2", "zero3"), MOVED)),
    "an array is a weight's memory": ("Shared", {"kind": "array"}, {"zero2": MOVED}),
    "an attribute that was a weight's memory": ("Shared", {"kind": "replaced"}, {}),
    "weights merged in evaluation mode": ("Merging", {}, dict.fromkeys(SHARDED, READ)),
    "a count in a buffer that is not saved": ("Transient", {}, dict.fromkeys(("ddp", "zero3"), "depends on them (calls)")),
    "a scale that evaluations alone need": ("Scaling", {}, dict.fromkeys(("ddp", "zero3"), "its evaluation depends on them")),
    "an extra state": ("ExtraState", {}, {}),
    "an extra state of one rank": ("ExtraState", {"by_rank": True}, {"ddp": "(0._extra_state, 0.scales): each rank keeps its own"}),
    "a buffer that grows": ("GrowingBuffer", {}, {}),
    "an attribute of a parameter": ("Tagged", {}, {"fsdp": "asks a parameter for an attribute"}),
    "sparse inputs": ("Batches", {"nested": False}, {}),
    "nested inputs": ("Batches", {"nested": True}, {"zero3": "gets a nested tensor"}),
    "two weights in one memory": ("Shared", {"kind": "memory"}, dict.fromkeys(("ddp",), "in the same memory")),
    "two weights in one tensor": ("Shared", {"kind": "columns"}, {}),
    "a buffer that backward needs": ("Shared", {"kind": "mask"}, {}),
    "integers": ("Unusual", {"kind": "integer"}, {}),
    "without elements": ("Unusual", {"kind": "empty"}, dict.fromkeys(SHARDED, "which has no elements")),
    "late": ("Unusual", {"kind": "late"}, dict.fromkeys(("single", "ddp", "fsdp", "zero2", "zero3"), "made in")),
    "lazy": ("Unusual", {"kind": "lazy"}, dict.fromkeys(("single", "zero3"), "no shape before the first forward pass")),
    "replaced": ("Unusual", {"kind": "replaced"}, dict.fromkeys(("ddp", "fsdp"), "scale replaced in")),
    "without memory": ("Unusual", {"kind": "meta"}, dict.fromkeys(("single", "fsdp"), "body.bias have no memory")),
    "unfrozen": ("Unusual", {"kind": "unfrozen"}, dict.fromkeys(("single", "ddp", "fsdp"), "frozen or unfrozen in")),
    "sparse": ("Sparse", {}, dict.fromkeys(("single", "ddp", "zero3"), "a sparse gradient")),
    "weights of the loss": ("Proxies", {}, dict.fromkeys(("single", "fsdp", "zero2"), "that are not the model's")),
    "a module beside the model": ("Beside", {}, {}),
    "a weight after an evaluation": ("Reported", {}, {"zero3": READ}),
    "state of the loss": ("Centre", {}, dict.fromkeys(("ddp", "zero3"), "its loss depends on them (centre)")),
    "a count in the loss": ("Counted", {"where": "attribute"}, dict.fromkeys(("ddp", "zero3"), "depends on them (calls)")),
    "a count in training": ("Counted", {"where": "training"}, dict.fromkeys(("ddp", "zero3"), "depends on them (calls)")),
    "a count elsewhere": ("Counted", {"where": "global"}, dict.fromkeys(("ddp", "zero3"), "(_COUNT of foreign_tasks.py)")),
    "a count in an object": ("Counted", {"where": "object"}, {"ddp": "a value outside of the attributes"}),
    "a count in a model's global": ("WarmedUp", {"where": "global"}, dict.fromkeys(("ddp", "zero3"), "(_FORWARDS of")),
    "a count in a global list": ("WarmedUp", {"where": "list"}, dict.fromkeys(("horovod", "fsdp"), "(_CALLS of foreign")),
    "a count in a class": ("WarmedUp", {"where": "class"}, dict.fromkeys(("ddp", "zero2"), "them (Warming.calls)")),
    "a count in a local function": ("WarmedUp", {"where": "local function"}, {"ddp": "(count of a closure in foreign"}),
    "a count in a local class": ("WarmedUp", {"where": "local class"}, {"ddp": "them (Counter.calls)"}),
    "a count in a closure": ("WarmedUp", {"where": "closure"}, dict.fromkeys(("fsdp",), "(count of a closure in foreign")),
    "a rank in the loss": ("ByRank", {"where": "loss"}, dict.fromkeys(("ddp", "zero3"), "not the same on each rank")),
    "a rank in the model": ("ByRank", {"where": "forward"}, dict.fromkeys(("horovod", "fsdp"), "not the same on each rank")),
    "noise of its own": ("Noisy", {}, {}),
    "auxiliary losses in attributes": ("Auxiliary", {}, {}),
    "auxiliary losses in a global": ("Auxiliary", {"where": "global"}, {"fsdp": "left its block by another way"}),
    "a part is left out": ("Leaving", {}, {}),
    "the model in the loss": ("Again", {"what": "model"}, {}),
    "collectives in the loss": ("Again", {"what": "communicates"}, {}),
    "the model in what is kept": ("Again", {"what": "keeps"}, {}),
    "a centre of all ranks": ("ModelCentre", {}, {}),
    "a centre of one rank": ("ModelCentre", {"all_ranks": False}, {"ddp": "changes centre, a state"}),
    "classes": ("Classes", {}, {}),
    "classes with slots": ("Classes", {"slots": True}, {}),
    "backward in the loss": ("Adversarial", {}, dict.fromkeys(("ddp", "zero3"), "calls backward() itself")),
    "a tied table with a limit": ("TiedTable", {}, {}),
    "views that are written to": ("Residual", {}, {}),
    "a frozen table with a limit": ("FrozenTable", {}, {}),
    "an output's gradient is turned": ("Guarded", {"what": "turn"}, {}),
    "what backward needs is written": (
        "Guarded",
        {"what": "spoilt"},
        dict.fromkeys(ENGINES, "the backward pass of the task's model raised RuntimeError"),
    ),
    "rows of length one": ("Normed", {}, {"zero2": "overwrites", "zero3": WRITTEN, "fsdp": WRITTEN}),
    "set from the first batch": (
        "FromData",
        {},
        {"ddp": "not the same numbers", "zero2": "1.bias, 1.scale were written", "zero3": "writes to 1.bias", "fsdp": WRITTEN},
    ),
    "an adjoint method": ("Backwards", {"kind": "adjoint"}, {}),
    "a backward pass in the backward pass": (
        "Backwards",
        {"kind": "reversible"},
        dict.fromkeys(("ddp", "zero3"), "reaches a weight several times"),
    ),
    "blocks that a backward pass calls by a method": (
        "Backwards",
        {"kind": "by a method"},
        {"fsdp": "a part of a block is called while the block itself does not run"},
    ),
    "blocks that a backward pass calls, as can be seen": ("Backwards", {"kind": "by a method that shows it"}, {}),
    "derivatives in forward mode": ("Backwards", {"kind": "forward"}, {"zero3": "in forward mode"}),
    "derivatives in an evaluation": ("Backwards", {"kind": "inner"}, {}),
    "a second view": ("SecondView", {}, {}),
    "a teacher that the task holds": ("HeldTeacher", {}, dict.fromkeys(SHARDED, READ)),
    "buffers that the first step makes": ("Observing", {}, {}),
    "a model without weights": ("Augmented", {}, {"zero3": "Hardtanh in models() has no parameters"}),
    "time first, summed": ("Reading", {}, {}),
    "masks in torch's encoder": ("Masked", {}, {}),
    "weights by their names": ("ByName", {}, {"zero3": READ}),
    "compiled": ("Compiled", {}, dict.fromkeys(SHARDED, "a part of it is compiled by torch.jit")),
}  # fmt: skip
CASES |= {f"having: {kind}": ("Having", {"kind": kind}, {}) for kind in ("all", *foreign_tasks.HAVING)}
HIDDEN = "holds tensors with gradients"
CASES |= {
    f"returning: {kind}": ("Returning", {"kind": kind}, dict.fromkeys(SHARDED, HIDDEN))
    for kind in ("function", "partial", "method", "object", "rows")
} | {f"returning: {kind}": ("Returning", {"kind": kind}, {}) for kind in ("mapping", "queue", "distribution")}
CASES["returning: weight"] = ("Returning", {"kind": "weight"}, {"zero3": "the model returns a weight"})
BY_KIND = {f"having: {kind}" for kind in foreign_tasks.HAVING}
LATER = {
    "a hook writes later": 3,
    "a hook writes its own": 3,
    "forward writes later": 3,
    "unfrozen": 2,
    "a weight after an evaluation": 3,
}
"""Cases that begin after the first step: the steps that were logged when they are refused."""
COUNTS = (
    "a count in a model's global",
    "a count in a global list",
    "a count in a class",
    "a count in a closure",
    "a count in a local function",
    "a count in a local class",
)
STATEFUL = {
    "a hook writes later",
    "state of the loss",
    "a teacher that the task holds",
    "a count in training",
    "noise of its own",
    "a scale that evaluations alone need",
    "a count in a buffer that is not saved",
    *COUNTS,
}
"""Cases whose tasks count steps, or keep something, in attributes."""
RIGHT = {
    **dict.fromkeys((*COUNTS, "noise of its own"), ("single",)),
    "auxiliary losses in attributes": ("fsdp",),
    "weights in the loss": ("zero2",),
    "a layer of two names": ("fsdp", "zero3"),
    "gathered weights in the loss": ("single", "fsdp", "zero3"),
    "clamped after a step": ENGINES,
    "norms after a step": ("ddp", "fsdp", "zero2", "zero3"),
    "an object after a step": ("single",),
    "parts in threads": ("ddp",),
    "in inference mode first": ("ddp",),
    "frozen for one call": ("ddp", "fsdp"),
    "attributes that the loss does not need": ("fsdp", "zero3"),
    "max_norm": ENGINES,
    "max_norm of a function": ("single",),
    "a limit of sums of rows": ENGINES,
    "a limit of a user's class": ENGINES,
    "an attribute called limit": ("single",),
    "a buffer that is replaced": ("single",),
    "features that hooks keep": ENGINES,
    "a compiled part": ("fsdp", "zero2"),
    "scalars": ("zero2", "zero3", "ddp", "fsdp", "stages", "stages of ZeRO-1"),
    "scalars of all kinds": ("fsdp", "zero3"),
    "clamped in forward": ("ddp",),
    "grown in forward": ("ddp",),
    "written by foreach": ("ddp",),
    "a gradient's hook reads": ("ddp",),
    "clamped in a stage": ("stages",),
    "clipped in a hook": ("ddp", "horovod"),
    "teacher": ("ddp", "zero2"),
    "weights in the loss, gathered for steps": ("fsdp", "zero3"),
    "prototypes": ("fsdp", "zero3"),
    "prototypes, gathered for steps": ("fsdp", "zero3"),
    "hidden derivatives, gathered for steps": ("fsdp", "zero3"),
    "a masked gradient": ("fsdp", "zero2", "zero3"),
    "a clipped gradient": ("single", "ddp", "horovod", "fsdp"),
    "derivatives": ENGINES,
    "collectives of its own": ENGINES,
    "two weights in one tensor": ("single", "fsdp", "zero3"),
    "a buffer that backward needs": ("single",),
    "an attribute is a weight's memory": ("single", "ddp"),
    "weights merged in evaluation mode": ("single", "ddp", "zero2"),
    "a count in a buffer that is not saved": ("single",),
    "a scale that evaluations alone need": ("single",),
    "an extra state": ENGINES,
    "an extra state of one rank": ("single",),
    "a buffer that grows": ENGINES,
    "an attribute of a parameter": ("zero3",),
    "sparse inputs": ("ddp", "zero3"),
    "nested inputs": ("fsdp",),
    "an attribute that was a weight's memory": ("fsdp", "zero2", "zero3"),
    "an equation": ENGINES,
    "consolidated": ENGINES,
    "derivatives by a transform": ("ddp", "fsdp", "zero3"),
    "a hook writes later": ("ddp",),
    "backward writes": ("ddp",),
    "recomputed by itself": ENGINES,
    "recomputed by itself, twice": ("single", "zero2"),
    "integers": ("fsdp", "zero3"),
    "a module beside the model": ("single", "fsdp"),
    "without elements": ("zero2",),
    "state of the loss": ("single",),
    "a centre of all ranks": ("ddp", "zero3"),
    "a count in training": ("single",),
    "a part is left out": ENGINES,
    "the model in the loss": ENGINES,
    "collectives in the loss": ("single", "ddp", "fsdp", "zero2", "zero3"),
    "the model in what is kept": ("ddp", "fsdp", "zero3"),
    "classes": ("ddp", "fsdp", "zero3"),
    "classes with slots": ("fsdp", "zero3"),
    "backward in the loss": ("single",),
    "a tied table with a limit": ENGINES,
    "a frozen table with a limit": ENGINES,
    "an output's gradient is turned": ("zero3", "fsdp"),
    "rows of length one": ("ddp",),
    "views that are written to": ("fsdp",),
    "set from the first batch": ("single",),
    "an adjoint method": ("fsdp", "zero3"),
    "a backward pass in the backward pass": ("single", "fsdp"),
    "blocks that a backward pass calls, as can be seen": ("single", "fsdp", "zero3"),
    "derivatives in an evaluation": ("fsdp", "zero3"),
    "a second view": ("single",),
    "buffers that the first step makes": ("ddp", "fsdp", "single"),
    "a teacher that the task holds": ("single", "ddp"),
    "time first, summed": ENGINES,
    "masks in torch's encoder": ENGINES,
    "weights by their names": ("ddp", "zero2"),
    **{case: ("ddp", "zero2") for case in CASES if case.startswith("returning: ")},
    **{f"returning: {kind}": ENGINES for kind in ("mapping", "queue", "distribution")},
    "returning: weight": ("ddp", "fsdp"),
    **{case: ENGINES for case in CASES if case.startswith("having: ")},
}


Case = str | tuple[str, dict[str, Any]]
"""One of CASES, or its task and options."""


def file(case, setup, **more):
    name, options, *_ = CASES[case] if isinstance(case, str) else case
    ours = {
        "task": {"name": f"tests.engines.foreign_tasks:{name}", "options": options},
        "steps": 4,
        "order": "sequential",
        "log_every_steps": 1,
        "run_dir": "run",
        **more,
    }
    changes = SETUPS[setup][1]
    return {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
        **changes,
        "dsframe": {**ours, **changes.get("dsframe", {})},
    }


def run(tmp_path, document, processes):
    """Goes on from the run before, if there is one."""
    write_json(tmp_path / "file.json", document)
    words = ["-m", "dsframe.train", "--config", "file.json", "--resume", "auto"]
    return run_ranks(warm(processes, words), cwd=tmp_path, timeout_seconds=150)


def by_hand(case):
    """The losses of a loop on one process."""
    name, options, *_ = CASES[case] if isinstance(case, str) else case
    task = getattr(foreign_tasks, name)(**options)
    generators.seed(0)
    model, data = task.model().train(), task.train_data()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
    found = []
    for step in range(4):
        inputs, targets = (task.collate or default_collate)([data[step * 8 + row] for row in range(8)])
        loss = task.loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                task.after_step(name, weight)
        for hook in task.hooks:
            hook.on_step(None)
        found.append(loss.item())
    return found


def each(setups_of):
    """Every case on the setup that shards most, on the others in the night; and so each of what one case has together."""
    return [
        pytest.param(case, setup, marks=[pytest.mark.long] * bool(place or case in BY_KIND))
        for case, setups in setups_of.items()
        for place, setup in enumerate(sorted(setups, reverse=True))
    ]


@pytest.mark.parametrize(("case", "setup"), each({case: refused for case, (_, _, refused) in CASES.items()}))
def test_it_is_refused_with_the_reason(case, setup, tmp_path):
    more = {"eval_every_steps": 3} if case == "a weight after an evaluation" else {}
    train = run if case == "what backward needs is written" else kept.train  # who names it is dsframe.train
    finished = train(tmp_path, file(case, setup, **more), SETUPS[setup][0])
    assert finished.returncode in (4, 5), finished
    said = (re.sub(r"^\[rank \d\] ", "", line) for line in finished.stderr.splitlines())
    (line,) = {line for line in said if line.startswith(("dsframe: error: ", "error: "))}
    words = CASES[case][2][setup].split("|")
    assert any(word in line for word in words), line
    rows = read_rows(tmp_path / "run" / "metrics.jsonl") if (tmp_path / "run" / "metrics.jsonl").exists() else []
    assert len([row for row in rows if "loss" in row]) <= LATER.get(case, 1), "a second update"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("case", "setup"), each(RIGHT))
def test_it_is_the_loop_by_hand(case, setup, tmp_path):
    """Over a restart, where the task has no state of its own."""
    for steps in (4,) if case in STATEFUL else (2, 4):
        kept.train(tmp_path, file(case, setup, steps=steps), SETUPS[setup][0]).check()
    found = losses(tmp_path / "run")
    assert list(found.values()) == pytest.approx(by_hand(case), rel=1e-6)


@pytest.mark.parametrize("case", ["the model in the loss", "the model in what is kept", "masks in torch's encoder"])
def test_ranks_call_the_same_where_an_evaluation_has_no_room_for_whole_weights(case, tmp_path):
    write_json(tmp_path / "file.json", file(case, "zero3"))
    words = ["-m", "tests.engines.ungathered", "--config", "file.json"]
    run_ranks(warm(2, words), cwd=tmp_path, timeout_seconds=60).check()
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(case), rel=1e-6)


@pytest.mark.parametrize(
    ("case", "setup"),
    [("an equation", setup) for setup in ("single", "zero2", "zero3", "fsdp")]
    + [("max_norm", "ddp"), ("max_norm", "zero3")],
)
def test_it_does_not_depend_on_accumulation(case, setup, tmp_path):
    kept.train(tmp_path, file(case, setup) | {"gradient_accumulation_steps": 2}, SETUPS[setup][0]).check()
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(case), rel=1e-6)


def test_a_teacher_that_no_checkpoint_has_is_refused_at_a_resume(tmp_path):
    document = file("a teacher that the task holds", "single", steps=2)
    kept.train(tmp_path, document, 1).check()
    document["dsframe"]["steps"] = 4
    finished = kept.train(tmp_path, document, 1)
    assert finished.returncode == 5
    assert "teacher.2.weight, a state that the task keeps: a resumed run would begin with another" in finished.stderr


@pytest.mark.parametrize("case", [*COUNTS, "a count in a buffer that is not saved"])
def test_a_count_that_no_checkpoint_has_is_refused_at_a_resume(case, tmp_path):
    finished = kept.train(tmp_path, file(case, "single", steps=2), 1).check()
    where = (
        "this program keeps values in globals, classes or closures"
        if case in COUNTS
        else "in attributes from one forward"
    )
    assert where in finished.stderr
    finished = kept.train(tmp_path, file(case, "single", steps=4), 1)
    assert finished.returncode == 5
    assert "its loss depends on them" in finished.stderr


@pytest.mark.parametrize(
    ("listed", "said", "refused"),
    [
        (True, *["loss of the same samples changes with each call"] * 2),
        (
            False,
            "model or loss draws with NumPy",
            "model or loss draws with a generator that the model or the task holds",
        ),
    ],
)
def test_a_generator_that_no_checkpoint_has_is_refused_at_a_resume(listed, said, refused, tmp_path):
    assert said in kept.train(tmp_path, file(("Noisy", {"listed": listed}), "single", steps=2), 1).check().stderr
    finished = kept.train(tmp_path, file(("Noisy", {"listed": listed}), "single", steps=4), 1)
    assert finished.returncode == 5
    assert refused in finished.stderr


@pytest.mark.parametrize(
    ("setup", "late", "said"),
    [
        ("single", False, "0.weight, 0.bias frozen or unfrozen in a hook"),
        ("zero2", False, "0.weight, 0.bias frozen or unfrozen in a hook"),
        ("single", True, "Phases.model sets hooks, which was read before"),
    ],
)
def test_what_a_hook_freezes_before_a_save_is_refused(setup, late, said, tmp_path):
    """The checkpoint could not be written, or a resumed run trained it (ZeRO-2); the hooks of model() were never called."""
    finished = kept.train(tmp_path, file(("Phases", {"late": late}), setup, steps=2), SETUPS[setup][0])
    assert finished.returncode == 5
    assert said in finished.stderr


def test_a_count_that_buffers_depend_on_is_refused_at_a_resume(tmp_path):
    text = "its buffers depend on them (calls, norm.momentum)"
    assert text in kept.train(tmp_path, file(("Slowing", {}), "single", steps=2), 1).check().stderr
    finished = kept.train(tmp_path, file(("Slowing", {}), "single", steps=4), 1)
    assert finished.returncode == 5
    assert text in finished.stderr


@pytest.mark.parametrize(
    ("what", "says"), [("always", {}), ("training", {}), ("branch", {}), ("always", {"batch_dependent": True})]
)
def test_rows_that_depend_on_other_rows_are_said(what, says, tmp_path):
    finished = kept.train(tmp_path, file(("Centred", {"what": what, **says}), "ddp"), 2).check()
    first_step = finished.stderr.partition("step 2/")[0]
    assert ("model or collate gives a row different outputs in different batches" in first_step) == (not says)
    assert ("outputs depend on the rest of a micro-batch" in finished.stderr) == bool(says)


@pytest.mark.parametrize(
    ("what", "setup", "said"),
    [("always", "ddp", 1), ("training", "fsdp", 1), ("nothing", "ddp", 0), ("nothing", "single", 0)],
)
def test_rows_of_a_stream_that_depend_on_each_other_are_said(what, setup, said, tmp_path):
    finished = kept.train(tmp_path, file(("Streamed", {"what": what}), setup), SETUPS[setup][0]).check()
    assert finished.stderr.count("model or collate gives a row different outputs in different batches") == said


@pytest.mark.parametrize("setup", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("loops", [False, True])
def test_rows_that_depend_on_other_rows_later_are_said(setup, loops, tmp_path):
    """Where the hardest row decides for all; not where each row has its own, whatever else is computed."""
    finished = kept.train(tmp_path, file(("Pondering", {"loops": loops}), setup, steps=5), SETUPS[setup][0]).check()
    text = "model or collate gives a row different outputs in different batches"
    assert finished.stderr.count(text) == (not loops), finished


@pytest.mark.parametrize("setup", ["single", "ddp"])
@pytest.mark.parametrize("loops", [False, True])
def test_rows_of_a_stream_that_depend_on_other_rows_later_are_said(setup, loops, tmp_path):
    document = file(("StreamedPondering", {"loops": loops}), setup, steps=5)
    said = kept.train(tmp_path, document, SETUPS[setup][0]).check().stderr
    assert said.count("model or collate gives a row different outputs in different batches") == (not loops)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("object", "mean of _RunningMean"),
        ("closure", "calls of a closure in foreign_tasks.py"),
        ("partial", "argument 0 of warm_by"),
        ("every module", "calls of a closure in foreign_tasks.py"),
    ],
)
def test_what_a_hook_keeps_is_a_state_of_the_program(what, names, tmp_path):
    """No look moves it: on one process the training is the loop by hand."""
    case = ("Hooked", {"what": what})
    finished = kept.train(tmp_path, file(case, "single"), 1).check()
    assert f"and its loss depends on them ({names}); no checkpoint has them" in finished.stderr
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(case), rel=1e-6)
    (tmp_path / "ddp").mkdir()
    finished = kept.train(tmp_path / "ddp", file(case, "ddp"), 2)
    assert finished.returncode == 5
    assert f"its loss depends on them ({names}): no checkpoint has them" in finished.stderr


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_a_gradients_hook_keeps_is_said(accumulation, tmp_path):
    document = file(("Hooked", {"what": "gradient"}), "ddp") | {"gradient_accumulation_steps": accumulation}
    finished = kept.train(tmp_path, document, 2).check()
    assert "in its backward pass (calls of a closure in foreign_tasks.py)" in finished.stderr


@pytest.mark.parametrize(
    ("options", "setup"),
    [
        ({"where": "model"}, "zero3"),
        ({"where": "loss"}, "ddp"),
        ({"where": "loss", "process": True}, "single"),
        ({}, "single"),
    ],
)
def test_random_numbers_that_come_later_are_said_once(options, setup, tmp_path):
    document = file(("DrawsLater", options), setup, steps=6)
    said = kept.train(tmp_path, document, SETUPS[setup][0]).check().stderr
    text = "this training draws random numbers in step 3, different ones on each rank"
    assert said.count(text) == said.count("draws random numbers") == bool(options)


def test_random_numbers_of_an_optimizer_are_said(tmp_path):
    document = file(("DrawsLater", {}), "single") | {"optimizer": {"type": "task", "params": {"lr": 0.1}}}
    assert "this training draws random numbers in step 2" in kept.train(tmp_path, document, 1).check().stderr


def test_numbers_that_come_later_and_belong_to_no_sample_are_refused(tmp_path):
    document = file(("DrawsLater", {"where": "model", "process": True}), "single", per_sample_randomness=True)
    finished = kept.train(tmp_path, document, 1)
    assert finished.returncode == 5
    assert "per_sample_randomness: step 3 draws numbers for no sample" in finished.stderr


@pytest.mark.parametrize(("dtype", "setup"), [("bfloat16", "single"), ("bfloat16", "ddp"), ("float16", "single")])
def test_a_loss_in_16_bits_is_a_mean(dtype, setup, tmp_path):
    finished = kept.train(tmp_path, file(("Rounded", {"dtype": dtype}), setup), SETUPS[setup][0]).check()
    assert "micro batch size" not in finished.stderr


@pytest.mark.parametrize("setup", ["single", "ddp"])
def test_a_loss_divided_by_itself_is_said(setup, tmp_path):
    finished = kept.train(tmp_path, file(("Normalised", {}), setup), SETUPS[setup][0]).check()
    assert finished.stderr.count("this task's loss is neither a mean nor a sum over rows") == 1


def test_a_sum_on_one_process_is_said_once(tmp_path):
    said = kept.train(tmp_path, file(("Total", {}), "single"), 1).check().stderr
    assert said.count("this task's loss is") == said.count("this task's loss is a sum over rows") == 1


def test_a_loss_over_labels_that_rarely_count_is_named(tmp_path):
    finished = kept.train(tmp_path, file(("RarelyIgnored", {}), "single", order="shuffled"), 1).check()
    assert finished.stderr.count("this task's loss is neither a mean nor a sum over rows") == 1
    assert "gives a row different outputs" not in finished.stderr


@pytest.mark.parametrize(
    "setup",
    [
        "single",
        "ddp",
        "fsdp",
        "zero3",
        *(pytest.param(setup, marks=pytest.mark.long) for setup in ("horovod", "zero2")),
    ],
)
def test_parameters_that_some_losses_do_not_use_are_said_alike(setup, tmp_path):
    said = []
    for name, (task, decay) in {
        "sometimes": ("Sometimes", 0.0),
        "never": ("Sometimes", 0.1),
        "never moved": ("Sometimes", 0.0),
        "two models": ("TwoSometimes", 0.1),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        options = {} if task == "TwoSometimes" else {"idle": name != "sometimes"}
        document = file((task, options), setup)
        document["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": decay}}
        lines = kept.train(folder, document, SETUPS[setup][0]).check().stderr.splitlines()
        said.append(
            [
                line.partition(": the gradient")[0].partition("note: ")[2]
                for line in lines
                if "some losses do not use" in line
            ]
        )
    assert said == [
        ["up to step 2 some losses do not use even.bias, even.weight, odd.bias, odd.weight"],
        ["up to step 1 some losses do not use even.bias, even.weight"],
        [],
        ["up to step 1 some losses do not use first.even.bias, first.even.weight"],
    ]


@pytest.mark.parametrize(("accumulation", "hard"), [(1, 17), (2, 22), (8, 23)])
def test_rows_that_depend_on_other_rows_later_are_said_at_once(accumulation, hard, tmp_path):
    """On one process, in a step that does not log; whichever micro-batch it is, of one row too."""
    document = file(("Pondering", {"hard": hard}), "single", steps=20, log_every_steps=10)
    said_by = kept.train(tmp_path, document | {"gradient_accumulation_steps": accumulation}, 1).check().stderr
    said = said_by.index("model or collate gives a row different outputs in different batches")
    assert said_by.index("step  2/20") < said < said_by.index("step  5/20")


def test_rows_that_depend_in_training_alone_are_said_of_one_row(tmp_path):
    document = file(("Centred", {"what": "training"}), "single") | {"gradient_accumulation_steps": 8}
    assert "gives a row different outputs in different batches" in kept.train(tmp_path, document, 1).check().stderr


def test_a_mean_over_few_rows_that_is_a_sum_later_is_said(tmp_path):
    document = file(("Chosen", {}), "single") | {"gradient_accumulation_steps": 2}
    finished = kept.train(tmp_path, document, 1).check()
    assert "this task's loss is a mean over rows at first, and a sum in step " in finished.stderr


@pytest.mark.parametrize("setup", ["single", "zero3"])
def test_a_sum_that_begins_later_is_said(setup, tmp_path):
    finished = kept.train(tmp_path, file(("LateSum", {}), setup), SETUPS[setup][0]).check()
    assert finished.stderr.count("this task's loss is a mean over rows at first, and a sum in step 2") == 1


@pytest.mark.parametrize(
    ("case", "setup", "said"),
    [
        (("OfRanks", {}), "ddp", "this model's code asks for the number of processes"),
        (("CountsUpdates", {}), "single", "in its after_step (updates); whether its updates depend on them"),
        (
            ("CountsAndWrites", {"alike": False}),
            "single",
            "in its forward pass (calls); whether its loss depends on them",
        ),
        (("CountsAndWrites", {"alike": True}), "single", "and its loss depends on them (calls)"),
        (("Slowed", {}), "single", "this model's backward pass changes 0.scale"),
        (("Grown", {}), "single", "0.weight was written in the forward pass or the loss of each micro-batch"),
        (("AskingForGradients", {"what": "batch"}), "ddp", "gives a row different outputs in different batches"),
        (("AskingForGradients", {"what": "batch"}), "fsdp", "code asks whether gradients are on"),
        (("AskingForGradients", {"what": "always"}), "fsdp", "gives a row different outputs in different batches"),
        (("AskingForGradients", {"what": "count"}), "single", "its loss depends on them (calls)"),
    ],
    ids=lambda value: "-".join(map(str, [value[0], *value[1].values()])) if isinstance(value, tuple) else "",
)
def test_what_looks_do_not_move_is_said(case, setup, said, tmp_path):
    document = file(case, setup) | {"gradient_accumulation_steps": 2 if setup == "single" else 1}
    finished = kept.train(tmp_path, document, SETUPS[setup][0]).check()
    assert finished.stderr.count(said) == finished.stderr.partition("step 2/")[0].count(said) == 1


def test_a_model_with_collectives_may_ask_for_the_number_of_processes(tmp_path):
    finished = kept.train(tmp_path, file(("Again", {"what": "communicates"}), "ddp"), 2).check()
    assert "asks for the number of processes" not in finished.stderr


def test_a_loss_that_a_model_computes_in_training_alone_is_of_its_kind_there(tmp_path):
    finished = kept.train(tmp_path, file(("LossInTraining", {}), "zero3"), 2)
    assert finished.returncode == 5
    assert "LossInTraining.loss gives a sum over the rows of a micro-batch" in finished.stderr
    found = []
    for setup, micro_batches in (("single", 1), ("single", 2), ("fsdp", 1)):
        folder = tmp_path / f"{setup} {micro_batches}"
        folder.mkdir()
        document = file(("LossInTraining", {"loss_is": "sum"}), setup)
        kept.train(folder, document | {"gradient_accumulation_steps": micro_batches}, SETUPS[setup][0]).check()
        found.append(list(losses(folder / "run").values()))
    assert found[1:] == [pytest.approx(found[0], rel=1e-6)] * 2


@pytest.mark.parametrize("setup", ["single", "ddp"])
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("Dropping", "model or collate gives a row different outputs in different batches"),
        ("Surgery", "loss is neither a mean nor a sum over rows"),
    ],
)
def test_what_the_first_rows_do_not_show_is_said_by_the_second_step(task, said, setup, tmp_path):
    """Although no forward pass has other operations than the first one, and no step logs."""
    document = file((task, {}), setup, steps=3, log_every_steps=3)
    assert kept.train(tmp_path, document, SETUPS[setup][0]).check().stderr.count(said) == 1


@pytest.mark.parametrize("setup", ["single", "fsdp"])
def test_a_mode_that_forward_sets_is_no_state(setup, tmp_path):
    for steps in (2, 4):
        finished = kept.train(tmp_path, file(("Modes", {}), setup, steps=steps), SETUPS[setup][0]).check()
        assert "changed in training" not in finished.stderr
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(("Modes", {})), rel=1e-6)


@pytest.mark.parametrize("setup", ["single", "ddp", "fsdp", "stages"])
def test_parameters_that_no_loss_uses_are_said_if_compiled_and_in_stages(setup, tmp_path):
    more = {} if setup == "stages" else {"model": {"compile": "blocks"}}
    document = file(("IdleParts", {}), setup, **more)
    document["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    said = kept.train(tmp_path, document, SETUPS[setup][0]).check().stderr
    names = "0.idle.bias, 0.idle.weight, 2.idle.bias, 2.idle.weight"
    assert said.count(f"up to step 1 some losses do not use {names}") == 1


@pytest.mark.parametrize("setup", ["single", "ddp", "zero3"])
def test_a_metric_that_the_task_holds_is_over_all_rows(setup, tmp_path):
    kept.train(tmp_path, file(("HeldMetric", {}), setup, eval_every_steps=2), SETUPS[setup][0]).check()
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    of_evaluations = [row["evaluation"] for row in rows if "evaluation" in row]
    assert len(of_evaluations) == 2
    for evaluation in of_evaluations:
        assert evaluation["held"] == pytest.approx(evaluation["right"])


def test_what_a_metric_counts_is_no_state_of_the_training(tmp_path):
    finished = kept.train(tmp_path, file(("CalledMetric", {}), "single", eval_every_steps=2), 1).check()
    assert "no checkpoint has it" not in finished.stderr


@pytest.mark.parametrize(("by", "setup"), [("scheduler", "ddp"), ("hook", "single"), ("optimizer", "fsdp")])
def test_a_rate_that_something_else_sets_is_refused(by, setup, tmp_path):
    document = file(("Rated", {"by": by}), setup) | {"optimizer": {"type": "task", "params": {"lr": 0.1}}}
    finished = kept.train(tmp_path, document, SETUPS[setup][0])
    assert finished.returncode == 5
    assert len(losses(tmp_path / "run")) == 1
    assert "something else has set the learning rate to 0.05 " in finished.stderr or by == "hook"
    assert "give its factor by schedule(updates)" in finished.stderr


@pytest.mark.parametrize(("where", "name"), [("function", "_Scale.calls"), ("hook", "calls")])
def test_what_a_backward_pass_counts_is_said(where, name, tmp_path):
    case = ("CountsBackward", {"where": where})
    finished = kept.train(tmp_path, file(case, "single") | {"gradient_accumulation_steps": 1}, 1).check()
    assert f"in its backward pass ({name}); whether its gradients depend on them was not examined" in finished.stderr
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(case), rel=1e-6)


def test_limits_hold_in_several_models(tmp_path):
    found = []
    for setup in ("single", "ddp", "zero3"):
        (tmp_path / setup).mkdir()
        kept.train(tmp_path / setup, file(("TwoTables", {}), setup), SETUPS[setup][0]).check()
        found.append(list(losses(tmp_path / setup / "run").values()))
    assert found[1:] == [pytest.approx(found[0], rel=1e-6)] * 2


@pytest.mark.parametrize("setup", ["single", "ddp", "horovod", "fsdp"])
def test_parts_of_a_model_stay_in_fp32(setup, tmp_path):
    document = file(("Routed", {}), setup, model={"keep_in_fp32": ["*norm*", "router.*"]}) | {"bf16": {"enabled": True}}
    finished = kept.train(tmp_path, document, SETUPS[setup][0]).check()
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(("Routed", {})), rel=2e-2)
    assert "bfloat16 for all parameters but *norm*, router.*, with fp32 masters" in finished.stderr
    if setup == "fsdp":
        document["dsframe"]["model"] = {"keep_in_fp32": ["router.scale"]}
        assert "router.scale is a part of one" in kept.train(tmp_path, document, 2).stderr


@pytest.mark.parametrize(
    ("case", "setups"),
    [
        ("derivatives", ("zero3", "fsdp")),
        ("norms after a step", ("zero3", "fsdp")),
        ("max_norm", ("zero2", "ddp")),
        ("gathered weights in the loss", ("fsdp", "zero3")),
        ("scalars of all kinds", ("fsdp", "zero3")),
        ("scalars of all kinds", ("zero3", "ddp")),
    ],
)
def test_it_goes_on_elsewhere(case, setups, tmp_path):
    for setup, steps in zip(setups, (2, 4), strict=True):
        document = file(case, setup)
        document["dsframe"] |= {"steps": steps, "checkpoints": {"at_end": True}}
        kept.train(tmp_path, document, SETUPS[setup][0]).check()
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(case), rel=1e-6)


@pytest.mark.parametrize("setup", ["single", "zero3", "fsdp"])
def test_recomputed_blocks_change_their_buffers_once(setup, tmp_path):
    found = {}
    for again in (False, True):
        folder = tmp_path / str(again)
        folder.mkdir()
        kept.train(
            folder, file(("Buffers", {}), setup, model={"activation_checkpointing": again}), SETUPS[setup][0]
        ).check()
        found[again] = losses(folder / "run")
    assert found[True] == found[False]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("clip", "changes the gradient of an output"),
        ("function", "_Clip.backward changes gradients"),
        ("helper", "_ClipByHelper.backward changes gradients"),
        ("module", "a backward hook of head changes gradients"),
        ("before a module", "a backward hook of head changes gradients"),
        ("turn", ""),
        ("look", ""),
        ("straight through", ""),
    ],
)
def test_what_clips_gradients_in_the_backward_pass_is_said(what, said, tmp_path):
    finished = kept.train(tmp_path, file(("Guarded", {"what": what}), "ddp"), 2).check()
    assert finished.stderr.count("and not linearly") == (1 if said else 0)
    assert f"{said}, and not linearly" in finished.stderr or not said


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("instance", "InstanceNorm keeps statistics of micro-batches"),
        ("own", "buffer 0.running_mean follows the samples"),
    ],
)
def test_statistics_of_samples_are_said(what, said, tmp_path):
    finished = kept.train(tmp_path, file(("Statistics", {"what": what}), "ddp"), 2).check()
    assert [line for line in finished.stderr.splitlines() if "this model's" in line and said in line]
    assert finished.stderr.count("this model's") == 1


@pytest.mark.parametrize("where", ["loss", "hook"])
def test_a_teacher_that_no_checkpoint_has_is_said(where, tmp_path):
    finished = kept.train(tmp_path, file(("HeldTeacher", {"where": where}), "single"), 1).check()
    (line,) = (line for line in finished.stderr.splitlines() if "which no checkpoint has" in line)
    assert "teacher.0.weight" in line
    assert ("a hook changes" in line) == (where == "hook")


def test_what_a_hook_changes_is_said(tmp_path):
    finished = kept.train(tmp_path, file(("Annealed", {}), "single", steps=1), 1).check()
    assert "a hook changes scale, weight, which no checkpoint has: a resumed run begins with another" in finished.stderr


@pytest.mark.parametrize("penalty", [None, 0.01])
def test_a_loss_of_the_mean_gradient_is_said(penalty, tmp_path):
    finished = kept.train(tmp_path, file(("Balanced", {"penalty": penalty}), "ddp"), 2).check()
    assert (
        "loss is neither a mean nor a sum over rows, so the training depends on the micro batch size" in finished.stderr
    )


@pytest.mark.parametrize("setup", ["ddp", "zero3"])
def test_a_fault_of_the_model_is_the_models_on_every_engine(setup, tmp_path):
    finished = run(tmp_path, file(("Narrow", {}), setup), SETUPS[setup][0])
    assert finished.returncode == 5, finished
    assert "error: the task's model raised RuntimeError: mat1 and mat2 shapes" in finished.stderr


def test_rows_of_padding_do_not_count_in_a_class(tmp_path):
    values = set()
    for setup in ("single", "ddp"):
        folder = tmp_path / setup
        folder.mkdir()
        kept.train(folder, file("classes", setup, eval_micro_batch_size=4), SETUPS[setup][0]).check()
        values.add(round(read_summary(folder / "run")["metrics"]["loss"], 6))
    assert len(values) == 1


@pytest.mark.parametrize(
    "setup", ["fsdp", pytest.param("ddp", marks=pytest.mark.long), pytest.param("zero3", marks=pytest.mark.long)]
)
def test_rows_of_padding_do_not_count_in_several_models(setup, tmp_path):
    document = file("classes", setup)
    document["dsframe"] |= {"task": {"name": "tests.engines.foreign_tasks:Judged"}, "eval_every_steps": 2}
    kept.train(tmp_path, document, SETUPS[setup][0]).check()
    first = torch.stack([rows[0] for rows, _ in foreign_tasks.Judged().eval_data()])
    metrics = read_summary(tmp_path / "run")["metrics"]
    assert metrics["number"] == 13
    assert metrics["first"] == pytest.approx(float(first.mean()), rel=1e-6)
