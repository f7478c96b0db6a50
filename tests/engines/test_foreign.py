"""What programs do with weights that their engine does not see: the loop by hand, or refused with the reason."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from dsframe.host import generators
from dsframe.model.forward import call
from dsframe.run_dir.record import read_summary
from dsframe.tools.compare import losses
from tests import kept
from tests.engines import foreign_tasks
from tests.files import ds_config, read_rows, write_json
from tests.processes import run_ranks, warm

ZERO_3 = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
SETUPS = {
    "single": (1, {"dsframe": {"engine": "single"}}),
    "ddp": (2, {"dsframe": {"engine": "ddp"}}),
    "horovod": (2, {"dsframe": {"engine": "horovod"}}),
    "fsdp": (2, {"dsframe": {"engine": "fsdp"}}),
    "zero2": (2, {"zero_optimization": {"stage": 2}}),
    "zero3": (2, {"zero_optimization": ZERO_3}),
    "zero3 persistent": (2, {"zero_optimization": {"stage": 3}}),
    "zero3 units": (2, {"zero_optimization": {**ZERO_3, "leaf_module": {"classes": ["_Unit"]}}}),
    "fsdp units": (2, {"dsframe": {"engine": "fsdp", "fsdp": {"wrap": ["_Unit"]}}}),
    "stages": (2, {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2}),
    "zero0": (2, {"zero_optimization": {"stage": 0}}),
    "stages of ZeRO-1": (2, {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}),
}
ENGINES = tuple(SETUPS)[:6]
READ = "outside of its module's forward pass"
MOVED = "in the memory that body.weight had when the model was built"
WRITTEN = "only to a copy|was written|were written|writes to its weight"
SHARDED = {"fsdp", "zero3"}
CASES = {
    # name: (task, options, what is refused: set-up -> words of the message, where it is the loop by hand)
    "weights in the loss": ("Penalty", {}, dict.fromkeys(SHARDED, READ), ("zero2",)),
    "a layer of two names": ("TwoNames", {}, {}, ("fsdp", "zero3")),
    "gathered weights in the loss": ("Gathered", {}, {}, ("single", "fsdp", "zero3")),
    "gathered weights written": ("WrittenInside", {}, dict.fromkeys(SHARDED, "which changes only a copy"), ("ddp",)),
    "gathered weights called": ("CalledInside", {}, dict.fromkeys(SHARDED, "is called inside of dsframe.gathered()"), ()),
    "clamped after a step": ("After", {"what": "clamp"}, {}, ENGINES),
    "norms after a step": ("After", {"what": "norms"}, {}, ("ddp", "fsdp", "zero2", "zero3")),
    "not by element": ("After", {"what": "wrong"}, dict.fromkeys(("single", "zero2"), "is not element-wise"), ()),
    "an object after a step": ("AfterByObject", {}, {}, ("single",)),
    "parts in threads": ("InThreads", {}, dict.fromkeys(SHARDED, "is called in a thread of its own"), ("ddp",)),
    "in inference mode first": ("Inferred", {}, dict.fromkeys(SHARDED, "write torch.no_grad()"), ("ddp",)),
    "in inference mode first, with an evaluation": ("Inferred", {}, {"fsdp": "write torch.no_grad()"}, ()),
    **{
        f"a unit: {what}": ("Units", {"what": what}, {}, ("zero3 units",))
        for what in ("dict", "keywords", "twice", "one call too many", "in place")
    },
    **{
        f"a unit: {what}": ("Units", {"what": what}, {}, ("zero3", "single")) for what in ("writes", "memory", "itself")
    },
    **{
        f"a unit: {what}": ("Units", {"what": what}, {}, ("zero3",))
        for what in ("a view", "remembers", "gets a tensor twice", "gets a view", "gives back", "gives back a part")
    },
    **{
        f"a unit: {what}": ("Units", {"what": what}, {}, ("zero3 units",))
        for what in ("nothing uses it", "remembers, a part")
    },
    **{
        f"a unit of fsdp: {what}": ("Units", {"what": what}, {}, ("fsdp units",))
        for what in ("a view", "remembers, a part", "gives back", "gives back a part")
    },
    "a penalty in a hook": ("Escaping", {"part": "1.inner"}, {}, ("zero3", "ddp")),
    "a penalty in a hook of a unit": ("Escaping", {"part": "1"}, {}, ("zero3 units",)),
    "a penalty in a hook of a unit of fsdp": ("Escaping", {"part": "1"}, {}, ("fsdp units",)),
    "a penalty that begins later": ("Escaping", {"part": "1", "late": True}, {"fsdp units": "from this step on the loss"}, ()),
    "a unit of fsdp: writes": ("Units", {"what": "writes"}, {}, ("fsdp units",)),
    "a unit of fsdp: memory": ("Units", {"what": "memory"}, {}, ("fsdp units",)),
    **{
        f"a unit: first{what}": ("Units", {"what": f"first{what}"}, {}, ("zero3 units",))
        for what in ("", ", idle", ", in place", ", keeps")
    },
    "a unit: returns its weight": ("Units", {"what": "returns its weight"}, {}, ("fsdp units",)),
    "a unit: returns it detached": ("Units", {"what": "returns it detached"}, {}, ("fsdp units",)),
    "a list that layers add to": ("Filled", {}, {}, ("zero3",)),
    "a list that units add to": ("Filled", {}, {}, ("fsdp",)),
    **{
        f"a unit: {what}": ("Units", {"what": what}, {}, ("zero3 units", "fsdp units"))
        for what in ("adds", "first, adds")
    },
    "a unit: method": ("Units", {"what": "method"}, {"zero3 units": "while it did not run itself", "fsdp units": READ}, ()),
    "frozen for one call": ("Toggling", {}, {}, ("ddp", "fsdp")),
    "a state in an attribute": ("Remembers", {}, dict.fromkeys(("ddp", "horovod", "fsdp", "zero3"), "depends on them"), ()),
    "attributes that the loss does not need": ("Remembers", {"what": "nothing"}, {}, ("fsdp", "zero3")),
    "max_norm": ("MaxNorm", {}, {}, ENGINES),
    "max_norm of a function": (
        "MaxNorm", {"function": True},
        {"ddp": "not the same numbers", "zero2": "overwrites", "zero3": "max_norm", "fsdp": "max_norm"},
        ("single",),
    ),
    "a limit of sums of rows": ("Limits", {"of": "bag"}, {}, ENGINES),
    "a limit of a user's class": ("Limits", {"of": "class"}, {}, ENGINES),
    "weights that hooks make": ("Spectral", {}, {}, ("zero3 persistent",)),
    "a buffer that is replaced": ("Averaging", {}, {}, ("single",)),
    "features that hooks keep": ("Features", {}, {}, ENGINES),
    "scalars": ("Scaled", {}, {}, ("zero2", "zero3", "ddp", "fsdp", "stages", "stages of ZeRO-1")),
    "scalars of all kinds": ("Temperatures", {}, {}, ("fsdp", "zero3")),
    "a layer that is not registered": ("Unregistered", {}, {"fsdp": "not the model's"}, ()),
    "a compiled part": ("Features", {"compiled": True}, {"zero3": "that is compiled already"}, ("fsdp", "zero2")),
    "clamped in forward": ("Clamped", {}, {"zero2": "overwrites", "zero3": WRITTEN, "fsdp": WRITTEN}, ("ddp",)),
    "grown in forward": ("Grown", {}, {"zero2": "in the forward pass or the loss of each"}, ("ddp",)),
    **{
        f"written by {how}": ("Written", {"how": how}, {"fsdp": WRITTEN}, ("ddp",) if how == "foreach" else ())
        for how in ("foreach", "out", "index", "init")
    },
    "a gradient's hook reads": ("Decayed", {}, {"fsdp": "by a reference from before the training"}, ("ddp",)),
    "a copy in a hook": ("Copied", {}, {"fsdp": "copy.deepcopy of a module whose weights"}, ()),
    "clamped in a stage": ("Layered", {}, {"stages of ZeRO-1": "0.weight was written in the forward pass"}, ("stages",)),
    "clipped in a hook": ("Clipped", {}, {"zero2": "overwrites", "zero3": READ, "fsdp": READ}, ("ddp", "horovod")),
    "converted in a hook": ("Converted", {}, dict.fromkeys(("ddp", "fsdp"), "was converted from torch.float32"), ()),
    "teacher": ("Teacher", {}, dict.fromkeys(SHARDED, f"{READ}|{WRITTEN}"), ("ddp", "zero2")),
    "prototypes": ("Prototypes", {}, {}, ("fsdp", "zero3")),
    "derivatives": ("Forces", {}, {}, ENGINES),
    "an equation": ("Equation", {}, {}, ENGINES),
    "a masked gradient": ("GradientHook", {"what": "mask"}, {}, ("fsdp", "zero2", "zero3")),
    "a clipped gradient": (
        "GradientHook", {"what": "clip"}, dict.fromkeys(("zero2", "zero3"), "is not linear"),
        ("single", "ddp", "horovod", "fsdp"),
    ),
    "a gradient where it lies": ("GradientHook", {"what": "late"}, dict.fromkeys(("single", "fsdp"), "use register_hook"), ()),
    "hidden derivatives": ("Hidden", {}, dict.fromkeys(SHARDED, "whole_weights = True"), ()),
    "hidden derivatives, gathered for steps": ("Hidden", {"whole": True}, {}, ("fsdp", "zero3")),
    "an equation, summed": ("Equation", {"summed": True}, dict.fromkeys(("ddp", "zero3"), "gives a sum over the rows"), ()),
    "derivatives by a transform": ("Transformed", {}, {}, ("ddp", "fsdp", "zero3")),
    "a hook adds a layer": ("Growing", {}, dict.fromkeys(("single", "zero3"), "made in a hook"), ()),
    "a hook writes later": ("Later", {}, {"zero2": "overwrites", "fsdp": READ}, ("ddp",)),
    "backward writes": (
        "Later", {"what": "backward"}, {"zero2": "in the backward pass", "zero3": WRITTEN}, ("ddp",),
    ),
    "backward writes to a shard": ("Later", {"what": "backward"}, {"fsdp": WRITTEN}, ()),
    **{
        f"a {what} replaces numbers in the backward pass": (
            "Later", {"what": what}, dict.fromkeys(SHARDED, READ), ("ddp",),
        )
        for what in ("gradient", "function")
    },
    "a gradient replaces numbers of a copy": ("Later", {"what": "gradient"}, {"zero2": "in the backward pass ("}, ()),
    "forward writes later": ("WrittenLater", {}, dict.fromkeys(("fsdp", "zero2", "zero3"), "in the forward pass or the l"), ()),
    "a hook replaces a layer": ("Growing", {"replaces": True}, dict.fromkeys(("single", "ddp", "zero2"), "replaced in a hook"), ()),
    "a hook clips one of two models": ("ClippedOne", {}, {"zero2": "overwrites", "fsdp": READ}, ()),
    "other parameters": ("Overridden", {}, {"single": "gives other parameters than the model has"}, ()),
    "recomputed by itself": ("Recomputed", {"calls": 1}, {}, ENGINES),
    "recomputed by itself, twice": (
        "Recomputed", {"calls": 2}, dict.fromkeys(("ddp", "horovod", "fsdp", "zero3"), "use_reentrant=False"),
        ("single", "zero2"),
    ),
    "complex": ("Unusual", {"kind": "complex"}, dict.fromkeys(("ddp", "zero3"), "turn is complex"), ()),
    "collectives of its own": ("Codebook", {}, {}, ENGINES),
    "a buffer is a weight's memory": ("Shared", {"kind": "buffer"}, dict.fromkeys(("single", "zero2"), "in the same memory"), ()),
    "an attribute is a weight's memory": (
        "Shared", {"kind": "attribute"}, dict.fromkeys(("fsdp", "zero2", "zero3"), MOVED),
        ("single", "ddp"),
    ),
    "an attribute that was a weight's memory": ("Shared", {"kind": "replaced"}, {}, ("fsdp", "zero2", "zero3")),
    "weights merged in evaluation mode": ("Merging", {}, dict.fromkeys(SHARDED, READ), ("single", "ddp", "zero2")),
    "a count in a buffer that is not saved": (
        "Transient", {}, dict.fromkeys(("ddp", "zero3"), "depends on them (calls)"),
        ("single",),
    ),
    "a scale that evaluations alone need": (
        "Scaling", {}, dict.fromkeys(("ddp", "zero3"), "its evaluation depends on them"),
        ("single",),
    ),
    "an extra state": ("ExtraState", {}, {}, ENGINES),
    "an extra state of one rank": (
        "ExtraState", {"by_rank": True}, {"ddp": "(0._extra_state, 0.scales): each rank keeps its own"},
        ("single",),
    ),
    "a buffer that grows": ("GrowingBuffer", {}, {}, ENGINES),
    "an attribute of a parameter": ("Tagged", {}, {"fsdp": "asks a parameter for an attribute"}, ("zero3",)),
    "sparse inputs": ("Batches", {"nested": False}, {}, ("ddp", "zero3")),
    "nested inputs": ("Batches", {"nested": True}, {"zero3": "gets a nested tensor"}, ("fsdp",)),
    "two weights in one memory": ("Shared", {"kind": "memory"}, dict.fromkeys(("ddp",), "in the same memory"), ()),
    "two weights in one tensor": ("Shared", {"kind": "columns"}, {}, ("single", "fsdp", "zero3")),
    "integers": ("Unusual", {"kind": "integer"}, {}, ("fsdp", "zero3")),
    "without elements": ("Unusual", {"kind": "empty"}, dict.fromkeys(SHARDED, "which has no elements"), ("zero2",)),
    "a loss that the model computes in training": (
        "LossInTraining", {}, {"zero3": "LossInTraining.loss gives a sum over the rows of a micro-batch"}, (),
    ),
    "late": ("Unusual", {"kind": "late"}, dict.fromkeys(("single", "ddp", "fsdp", "zero2", "zero3"), "made in"), ()),
    "lazy": ("Unusual", {"kind": "lazy"}, dict.fromkeys(("single", "zero3"), "no shape before the first forward pass"), ()),
    "replaced": ("Unusual", {"kind": "replaced"}, dict.fromkeys(("ddp", "fsdp"), "scale replaced in"), ()),
    "without memory": ("Unusual", {"kind": "meta"}, dict.fromkeys(("single", "fsdp"), "body.bias have no memory"), ()),
    "unfrozen": ("Unusual", {"kind": "unfrozen"}, dict.fromkeys(("single", "ddp", "fsdp"), "frozen or unfrozen in"), ()),
    "sparse": ("Sparse", {}, dict.fromkeys(("single", "ddp", "zero3"), "a sparse gradient"), ()),
    "weights of the loss": ("Proxies", {}, dict.fromkeys(("single", "fsdp", "zero2"), "that are not the model's"), ()),
    "a module beside the model": ("Beside", {}, {}, ("single", "fsdp")),
    "a weight after an evaluation": ("Reported", {}, {"zero3": READ}, ()),
    "state of the loss": ("Centre", {}, dict.fromkeys(("ddp", "zero3"), "its loss depends on them (centre)"), ("single",)),
    "a count in training": (
        "Counted", {"where": "training"}, dict.fromkeys(("ddp", "zero3"), "depends on them (calls)"),
        ("single",),
    ),
    "a count elsewhere": ("Counted", {"where": "global"}, dict.fromkeys(("ddp", "zero3"), "(_COUNT of foreign_tasks.py)"), ()),
    "a count in an object": ("Counted", {"where": "object"}, {"ddp": "a value outside of the attributes"}, ()),
    "a count in a model's global": ("WarmedUp", {"where": "global"}, dict.fromkeys(("ddp", "zero3"), "(_FORWARDS of"), ("single",)),
    "a count in a class": ("WarmedUp", {"where": "class"}, dict.fromkeys(("ddp", "zero2"), "them (Warming.calls)"), ("single",)),
    "a count in a local function": (
        "WarmedUp", {"where": "local function"}, {"ddp": "(count of a closure in foreign"},
        ("single",),
    ),
    "a count in a local class": ("WarmedUp", {"where": "local class"}, {"ddp": "them (Counter.calls)"}, ("single",)),
    "a rank in the loss": ("ByRank", {}, dict.fromkeys(("ddp", "zero3"), "not the same on each rank"), ()),
    "noise of its own": ("Noisy", {}, {}, ("single",)),
    "auxiliary losses in attributes": ("Auxiliary", {}, {}, ("fsdp",)),
    "auxiliary losses in a global": ("Auxiliary", {"where": "global"}, {}, ("zero3", "fsdp")),
    "a part is left out": ("Leaving", {}, {}, ENGINES),
    "the model in the loss": ("Again", {"what": "model"}, {}, ENGINES),
    "collectives in the loss": ("Again", {"what": "communicates"}, {}, ("single", "ddp", "fsdp", "zero2", "zero3")),
    "the model in what is kept": ("Again", {"what": "keeps"}, {}, ("ddp", "fsdp", "zero3")),
    "a centre of all ranks": ("ModelCentre", {}, {}, ("ddp", "zero3")),
    "a centre of one rank": ("ModelCentre", {"all_ranks": False}, {"ddp": "changes centre, a state"}, ()),
    "a loss over the rows of all ranks": ("Contrastive", {}, {}, ENGINES),
    "classes": ("Classes", {}, {}, ("ddp", "fsdp", "zero3")),
    "backward in the loss": ("Adversarial", {}, dict.fromkeys(("ddp", "zero3"), "calls backward() itself"), ("single",)),
    "a tied table with a limit": ("TiedTable", {}, {}, ENGINES),
    "views that are written to": ("Residual", {}, {}, ("fsdp",)),
    "a frozen table with a limit": ("FrozenTable", {}, {}, ENGINES),
    "an output's gradient is turned": ("Guarded", {"what": "turn"}, {}, ("zero3", "fsdp")),
    "what backward needs is written": (
        "Guarded", {"what": "spoilt"}, dict.fromkeys(ENGINES, "the backward pass of the task's model raised RuntimeError"),
        (),
    ),
    "an adjoint method": ("Backwards", {"kind": "adjoint"}, {}, ("fsdp", "zero3")),
    "a backward pass in the backward pass": (
        "Backwards", {"kind": "reversible"}, dict.fromkeys(("ddp", "zero3"), "reaches a weight several times"),
        ("single", "fsdp"),
    ),
    "blocks that a backward pass calls by a method": (
        "Backwards", {"kind": "by a method"}, {"fsdp": READ},
        (),
    ),
    "blocks that a backward pass calls, as can be seen": (
        "Backwards", {"kind": "by a method that shows it"}, {},
        ("single", "fsdp", "zero3"),
    ),
    "derivatives in forward mode": ("Backwards", {"kind": "forward"}, {"zero3": "in forward mode"}, ()),
    "derivatives in an evaluation": ("Backwards", {"kind": "inner"}, {}, ("fsdp", "zero3")),
    "a second view": ("SecondView", {}, {}, ("single",)),
    "a teacher that the task holds": ("HeldTeacher", {}, dict.fromkeys(SHARDED, READ), ("single", "ddp")),
    "buffers that the first step makes": ("Observing", {}, {}, ("ddp", "fsdp", "single")),
    "a model without weights": ("Augmented", {}, {"zero3": "Hardtanh in models() has no parameters"}, ()),
    "time first, summed": ("Reading", {}, {}, ENGINES),
    "masks in torch's encoder": ("Masked", {}, {}, ENGINES),
    "weights by their names": ("ByName", {}, {"zero3": READ}, ("ddp", "zero2")),
    "buffers and parameters of all kinds": ("Having", {}, {}, ENGINES),
    "compiled": ("Compiled", {}, dict.fromkeys(SHARDED, "a part of it is compiled by torch.jit"), ()),
}  # fmt: skip
HIDDEN = "holds tensors with gradients"
CASES |= {
    f"returning: {kind}": ("Returning", {"kind": kind}, dict.fromkeys(SHARDED, HIDDEN), ("ddp", "zero2"))
    for kind in ("function", "object", "rows")
} | {f"returning: {kind}": ("Returning", {"kind": kind}, {}, ENGINES) for kind in ("mapping", "distribution")}
CASES["returning: weight"] = ("Returning", {"kind": "weight"}, {"zero3": READ}, ("ddp", "fsdp"))
LATER = {
    "a hook writes later": 3,
    "forward writes later": 2,
    "a penalty that begins later": 2,
    "unfrozen": 2,
    "a weight after an evaluation": 3,
}
"""Cases that begin after the first step: the steps that were logged when they are refused."""
COUNTS = (
    "a count in a model's global",
    "a count in a class",
    "a count in a local function",
    "a count in a local class",
)
ON_STATE = "its loss depends on them"
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


Case = str | tuple[str, dict[str, Any]]
"""One of CASES, or its task and options."""


def file(case, setup, *, accumulation=None, decay=0.0, **more):
    name, options, *_ = CASES[case] if isinstance(case, str) else case
    sections = {"gradient_clipping": 0.5, **SETUPS[setup][1]}
    if accumulation:
        sections["gradient_accumulation_steps"] = accumulation
    ours = {
        "task": {"name": f"tests.engines.foreign_tasks:{name}", "options": options},
        "steps": 4,
        "order": "sequential",
        "log_every_steps": 1,
        "run_dir": "run",
        **more,
        **sections.pop("dsframe", {}),
    }
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": decay}}
    return ds_config(8, optimizer, sections=sections, **ours)


def run(tmp_path, document, processes):
    """Goes on from the run before, if there is one."""
    write_json(tmp_path / "file.json", document)
    words = ["-m", "dsframe.train", "--config", "file.json", "--resume", "auto"]
    return run_ranks(warm(processes, words), cwd=tmp_path, timeout_seconds=150)


def by_hand(case, tasks=foreign_tasks):
    """The losses of a loop on one process."""
    name, options, *_ = CASES[case] if isinstance(case, str) else case
    task = getattr(tasks, name)(**options)
    generators.seed(0)
    model, data = task.model().train(), task.train_data()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
    found = []
    for step in range(4):
        batch = (task.collate or default_collate)([data[step * 8 + row] for row in range(8)])
        inputs, targets = ({"rows": batch["rows"]}, batch["labels"]) if isinstance(batch, dict) else batch
        loss = task.loss(call(model, inputs), targets)
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
    """Every case on the setup that shards most, on the others in the night."""
    return [
        pytest.param(case, setup, marks=[pytest.mark.long] * bool(place))
        for case, setups in setups_of.items()
        for place, setup in enumerate(sorted(setups, reverse=True))
    ]


@pytest.mark.parametrize(("case", "setup"), each({case: refused for case, (_, _, refused, _) in CASES.items()}))
def test_it_is_refused_with_the_reason(case, setup, tmp_path):
    more = {"eval_every_steps": 3} if "an evaluation" in case else {}
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
@pytest.mark.parametrize(("case", "setup"), each({case: right for case, (*_, right) in CASES.items()}))
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
    kept.train(tmp_path, file(case, setup, accumulation=2), SETUPS[setup][0]).check()
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(case), rel=1e-6)


@pytest.mark.parametrize(
    ("case", "said", "refused"),
    [
        (("HeldTeacher", {}), "teacher.0.weight", "teacher.2.weight, a state that the task keeps: a resumed run"),
        *((case, "this program keeps values in globals, classes or closures", ON_STATE) for case in COUNTS),
        ("a count in a buffer that is not saved", "in attributes from one forward", ON_STATE),
        (("Slowing", {}), *["its buffers depend on them (calls, norm.momentum)"] * 2),
        (("Noisy", {"listed": True}), *["loss of the same samples changes with each call"] * 2),
        (("Noisy", {}), "draws with NumPy", "draws with a generator that the model or the task holds"),
    ],
    ids=lambda value: "-".join(map(str, [value[0], *value[1].values()])) if isinstance(value, tuple) else None,
)
def test_a_state_that_no_checkpoint_has_is_said_and_refused_at_a_resume(case, said, refused, tmp_path):
    assert said in kept.train(tmp_path, file(case, "single", steps=2), 1).check().stderr
    finished = kept.train(tmp_path, file(case, "single", steps=4), 1)
    assert finished.returncode == 5
    assert refused in finished.stderr


ROWS = "model or collate gives a row different outputs in different batches"
KIND = "loss is neither a mean nor a sum over rows"
RANDOM = "this training draws random numbers in step 3, different ones on each rank"
IDLE = "up to step 1 some losses do not use 0.idle.bias, 0.idle.weight, 2.idle.bias, 2.idle.weight"
DECAYED = {"decay": 0.1}
COMPILED = {**DECAYED, "model": {"compile": "blocks"}}
SAID = {
    # name: (task, options, setups, what is said, what the file adds)
    "rows that depend on each other": ("Centred", {"what": "always"}, ["ddp"], ROWS, {}),
    "rows that depend in training": ("Centred", {"what": "training"}, ["ddp"], ROWS, {}),
    "rows that decide for each other": ("Centred", {"what": "branch"}, ["ddp"], ROWS, {}),
    "rows whose task says it": (
        "Centred", {"what": "always", "batch_dependent": True}, ["ddp"], "outputs depend on the rest of a micro-batch", {},
    ),
    "one row in training": ("Centred", {"what": "training"}, ["single"], ROWS, {"accumulation": 8}),
    "rows of a stream": ("Streamed", {"what": "always"}, ["ddp"], ROWS, {}),
    "rows of a stream in training": ("Streamed", {"what": "training"}, ["fsdp"], ROWS, {}),
    "rows that depend later": ("Pondering", {}, ["single", "ddp", "fsdp"], ROWS, {"steps": 5}),
    "rows of a stream later": ("StreamedPondering", {}, ["single", "ddp"], ROWS, {"steps": 5}),
    # No forward pass has other operations than the first one, and no step logs.
    "rows that are dropped": ("Dropping", {}, ["single", "ddp"], ROWS, {"steps": 3, "log_every_steps": 3}),
    "surgery on gradients": ("Surgery", {}, ["single", "ddp"], KIND, {"steps": 3, "log_every_steps": 3}),
    "gradients asked for, rows": ("AskingForGradients", {"what": "batch"}, ["ddp"], ROWS, {}),
    "gradients asked for, shards": ("AskingForGradients", {"what": "batch"}, ["fsdp"], "asks whether gradients are on", {}),
    "gradients asked for, always": ("AskingForGradients", {"what": "always"}, ["fsdp"], ROWS, {}),
    "gradients asked for, a count": ("AskingForGradients", {"what": "count"}, ["single"], "depends on them (calls)", {}),
    "ranks that a loss counts": ("OfRanks", {}, ["ddp"], "this model's code asks for the number of processes", {}),
    "updates that are counted": (
        "CountsUpdates",
        {},
        ["single"],
        "in its after_step (updates); whether its updates depend on them",
        {"accumulation": 2},
    ),
    "a count that is not compared": (
        "CountsAndWrites",
        {"alike": False},
        ["single"],
        "in its forward pass (calls); whether its loss depends on them",
        {"accumulation": 2},
    ),
    "a count beside writes": (
        "CountsAndWrites",
        {"alike": True},
        ["single"],
        "and its loss depends on them (calls)",
        {"accumulation": 2},
    ),
    "a buffer of the backward pass": ("Slowed", {}, ["single"], "backward pass changes 0.scale", {"accumulation": 2}),
    "a weight that grows": (
        "Grown",
        {},
        ["single"],
        "0.weight was written in the forward pass or the loss of each micro-batch",
        {"accumulation": 2},
    ),
    "a hook of a gradient": ("Hooked", {"what": "gradient"}, ["ddp"], "backward pass (calls of a closure in", {}),
    "a hook of sums of gradients": (
        "Hooked",
        {"what": "gradient"},
        ["ddp"],
        "in its backward pass (calls of a closure in foreign_tasks.py)",
        {"accumulation": 2},
    ),
    "a tied table with a limit": ("TiedTable", {}, ["ddp"], "with a max_norm, is used by other modules", {"accumulation": 2}),
    "a hook that counts": ("Later", {}, ["single"], "a hook changes calls of _Resetting", {}),
    "a teacher that a hook moves": ("HeldTeacher", {"where": "hook"}, ["single"], "a hook changes teacher.0.", {}),
    "random numbers of a model": ("DrawsLater", {"where": "model"}, ["zero3"], RANDOM, {"steps": 6}),
    "random numbers of a loss": ("DrawsLater", {"where": "loss"}, ["ddp"], RANDOM, {"steps": 6}),
    "random numbers of NumPy": ("DrawsLater", {"where": "loss", "process": True}, ["single"], RANDOM, {"steps": 6}),
    "a loss divided by itself": ("Normalised", {}, ["single", "ddp"], KIND, {}),
    "a mean gradient": ("Balanced", {}, ["ddp"], KIND, {}),
    "a mean gradient beside a penalty": ("Balanced", {"penalty": 0.01}, ["ddp"], KIND, {}),
    "labels that rarely count": ("RarelyIgnored", {}, ["single"], KIND, {"order": "shuffled"}),
    "a sum": ("Total", {}, ["single"], "this task's loss is a sum over rows", {}),
    "a sum of few rows": ("Chosen", {}, ["single"], "is a mean over rows at first, and a sum in step ", {"accumulation": 2}),
    "a sum that begins later": ("LateSum", {}, ["single", "zero3"], "a mean over rows at first, and a sum in step 2", {}),
    "a clip by a hook": ("Guarded", {"what": "clip"}, ["ddp"], "changes the gradient of an output, and not linearly", {}),
    "a clip by a method": ("Guarded", {"what": "method"}, ["fsdp"], "changes the gradient of an output, and not linearly", {}),
    "a clip by a function": ("Guarded", {"what": "function"}, ["ddp"], "_Clip.backward changes gradients, and not", {}),
    "a clip by a helper": ("Guarded", {"what": "helper"}, ["ddp"], "_ClipByHelper.backward changes gradients, and not", {}),
    "a clip by a module's hook": ("Guarded", {"what": "module"}, ["ddp"], "hook of head changes gradients, and not", {}),
    "statistics of torch's": ("Statistics", {"what": "instance"}, ["ddp"], "InstanceNorm keeps statistics of micro-", {}),
    "statistics of its own": ("Statistics", {"what": "own"}, ["ddp"], "buffer 0.running_mean follows the samples", {}),
    "layers of every second step": (
        "Sometimes",
        {"idle": False},
        ["single", "ddp", "fsdp", "zero3"],
        "up to step 2 some losses do not use even.bias, even.weight, odd.bias, odd.weight",
        {},
    ),
    "idle layers": ("Sometimes", {"idle": True}, ENGINES, "up to step 1 some losses do not use even.bias, even.weight", DECAYED),
    "idle layers of two models": (
        "TwoSometimes",
        {},
        ["single", "ddp", "fsdp", "zero3"],
        "up to step 1 some losses do not use first.even.bias, first.even.weight",
        DECAYED,
    ),
    "idle parameters of compiled blocks": ("IdleParts", {}, ["single", "ddp", "fsdp"], IDLE, COMPILED),
    "idle parameters of stages": ("IdleParts", {}, ["stages"], IDLE, DECAYED),
}  # fmt: skip
LATER_ON = {"a sum of few rows", "a sum that begins later", "layers of every second step"}
"""What is not said before the second step, beside what takes more steps."""
KINDS = (
    "this task's loss is",
    "this model's",
    "draws random numbers",
    ROWS,
    "and not linearly",
    "some losses do not use",
)
"""Of which a program gets one line at most."""


@pytest.mark.parametrize(
    ("name", "setup"), [(name, setup) for name, (_, _, setups, _, _) in SAID.items() for setup in setups]
)
def test_what_would_train_otherwise_is_said_once(name, setup, tmp_path):
    task, options, _, said, more = SAID[name]
    stderr = kept.train(tmp_path, file((task, options), setup, **more), SETUPS[setup][0]).check().stderr
    assert stderr.count(said) == 1, stderr
    assert max(map(stderr.count, KINDS)) <= 1, stderr
    if name not in LATER_ON and "steps" not in more:
        assert said in stderr.partition("step 2/")[0]


SILENT = {
    # name: (task, options, setups, what is not said, what the file adds)
    "rows whose task says it": ("Centred", {"what": "always", "batch_dependent": True}, ["ddp"], ROWS, {}),
    "rows of a stream": ("Streamed", {"what": "nothing"}, ["ddp", "single"], ROWS, {}),
    "a table with a limit": ("MaxNorm", {}, ["single"], "with a max_norm", {"accumulation": 2}),
    "rows of their own later": ("Pondering", {"loops": True}, ["single", "ddp", "fsdp"], ROWS, {"steps": 5}),
    "rows of a stream later": ("StreamedPondering", {"loops": True}, ["single", "ddp"], ROWS, {"steps": 5}),
    "ranks of a model with collectives": ("Again", {"what": "communicates"}, ["ddp"], "asks for the number of proc", {}),
    "labels that rarely count": ("RarelyIgnored", {}, ["single"], ROWS, {"order": "shuffled"}),
    "no random numbers": ("DrawsLater", {}, ["single"], "draws random numbers", {"steps": 6}),
    "a loss in bf16": ("Rounded", {"dtype": "bfloat16"}, ["single", "ddp"], "micro batch size", {}),
    "a loss in fp16": ("Rounded", {"dtype": "float16"}, ["single"], "micro batch size", {}),
    "gradients that are turned": ("Guarded", {"what": "turn"}, ["ddp"], "and not linearly", {}),
    "gradients straight through": ("Guarded", {"what": "straight through"}, ["ddp"], "and not linearly", {}),
    "idle layers that nothing moves": ("Sometimes", {"idle": True}, ["single", "ddp", "fsdp", "zero3"], "do not use", {}),
    "what a metric counts": ("CalledMetric", {}, ["single"], "no checkpoint has it", {"eval_every_steps": 2}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "setup"), [(name, setup) for name, (_, _, setups, _, _) in SILENT.items() for setup in setups]
)
def test_what_trains_alike_is_not_said(name, setup, tmp_path):
    task, options, _, said, more = SILENT[name]
    assert said not in kept.train(tmp_path, file((task, options), setup, **more), SETUPS[setup][0]).check().stderr


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


def test_random_numbers_of_an_optimizer_are_said(tmp_path):
    document = file(("DrawsLater", {}), "single") | {"optimizer": {"type": "task", "params": {"lr": 0.1}}}
    assert "this training draws random numbers in step 2" in kept.train(tmp_path, document, 1).check().stderr


def test_numbers_that_come_later_and_belong_to_no_sample_are_refused(tmp_path):
    document = file(("DrawsLater", {"where": "model", "process": True}), "single", per_sample_randomness=True)
    finished = kept.train(tmp_path, document, 1)
    assert finished.returncode == 5
    assert "per_sample_randomness: step 3 draws numbers for no sample" in finished.stderr


@pytest.mark.parametrize(("accumulation", "hard"), [(1, 17), (2, 22), (8, 23)])
def test_rows_that_depend_on_other_rows_later_are_said_at_once(accumulation, hard, tmp_path):
    """On one process, in a step that does not log; whichever micro-batch it is, of one row too."""
    document = file(("Pondering", {"hard": hard}), "single", accumulation=accumulation, steps=20, log_every_steps=10)
    said_by = kept.train(tmp_path, document, 1).check().stderr
    said = said_by.index(ROWS)
    assert said_by.index("step  2/20") < said < said_by.index("step  5/20")


def curve(folder, case, setup, **more):
    """The losses of a training in a folder of its own."""
    own = folder / f"{setup} {len(more)}"
    own.mkdir()
    kept.train(own, file(case, setup, **more), SETUPS[setup][0]).check()
    return list(losses(own / "run").values())


@pytest.mark.parametrize(
    ("case", "ways"),
    [
        (("TwoTables", {}), [("ddp", {}), ("zero0", {}), ("zero3", {})]),
        (("LossInTraining", {"loss_is": "sum"}), [("single", {"accumulation": 2}), ("fsdp", {})]),
    ],
    ids=["limits in several models", "a loss that a model computes in training"],
)
def test_it_trains_as_one_process_does(case, ways, tmp_path):
    alone = curve(tmp_path, case, "single")
    for setup, more in ways:
        assert curve(tmp_path, case, setup, **more) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("setup", ["single", "fsdp"])
def test_a_mode_that_forward_sets_is_no_state(setup, tmp_path):
    for steps in (2, 4):
        finished = kept.train(tmp_path, file(("Modes", {}), setup, steps=steps), SETUPS[setup][0]).check()
        assert "changed in training" not in finished.stderr
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(("Modes", {})), rel=1e-6)


@pytest.mark.parametrize("setup", ["single", "ddp", "zero3"])
def test_a_metric_that_the_task_holds_is_over_all_rows(setup, tmp_path):
    kept.train(tmp_path, file(("HeldMetric", {}), setup, eval_every_steps=2), SETUPS[setup][0]).check()
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    of_evaluations = [row["evaluation"] for row in rows if "evaluation" in row]
    assert len(of_evaluations) == 2
    for evaluation in of_evaluations:
        assert evaluation["held"] == pytest.approx(evaluation["right"])


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
    finished = kept.train(tmp_path, file(case, "single"), 1).check()
    assert f"in its backward pass ({name}); whether its gradients depend on them was not examined" in finished.stderr
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(case), rel=1e-6)


@pytest.mark.parametrize("setup", ["single", "ddp", "horovod", "fsdp"])
def test_parts_of_a_model_stay_in_fp32(setup, tmp_path):
    document = file(("Routed", {}), setup, model={"keep_in_fp32": ["*norm*", "router.*"]}) | {"bf16": {"enabled": True}}
    finished = kept.train(tmp_path, document, SETUPS[setup][0]).check()
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(("Routed", {})), rel=2e-2)
    assert "bfloat16 for all parameters but *norm*, router.*, with fp32 masters" in finished.stderr
    if setup == "fsdp":
        document["dsframe"]["model"] = {"keep_in_fp32": ["router.scale"]}
        assert "router.scale is a part of one" in kept.train(tmp_path, document, 2).stderr


@pytest.mark.parametrize("setup", ["zero3 units", "fsdp units"])
def test_units_that_a_model_does_not_have_are_refused(setup, tmp_path):
    finished = kept.train(tmp_path, file("scalars", setup), 2)
    assert finished.returncode == 4
    assert "this model has no " in finished.stderr


@pytest.mark.parametrize("setup", ["zero2", "zero3", "fsdp"])
def test_a_mask_in_fp32_takes_gradients_in_16_bits(setup, tmp_path):
    case = ("GradientHook", {"what": "mask"})
    kept.train(tmp_path, file(case, setup) | {"bf16": {"enabled": True}}, 2).check()
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(case), rel=5e-3)


@pytest.mark.parametrize(
    "case", [("Units", {"what": "first, idle"}), ("Sometimes", {"idle": False})], ids=["never", "now and then"]
)
def test_gradients_that_are_missing_in_a_micro_batch_are_added_up_in_16_bits(case, tmp_path):
    document = file(case, "fsdp", accumulation=2, fsdp={}) | {"bf16": {"enabled": True}}
    kept.train(tmp_path, document, 2).check()
    assert list(losses(tmp_path / "run").values()) == pytest.approx(curve(tmp_path, case, "single"), rel=2e-2)


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


def test_a_unit_with_a_limit_is_named_by_the_class_that_the_model_names(tmp_path):
    found = curve(tmp_path, "max_norm", "fsdp", fsdp={"wrap": ["Embedding"]})
    assert found == pytest.approx(by_hand("max_norm"), rel=1e-6)


def test_no_look_shortens_rows_that_are_used_later(tmp_path):
    case = ("MaxNorm", {"words": 100})
    assert curve(tmp_path, case, "single") == pytest.approx(by_hand(case), rel=1e-6)


@pytest.mark.parametrize("setup", ["single", "zero3"])
def test_a_recomputed_table_keeps_its_limit(setup, tmp_path):
    found = curve(tmp_path, "max_norm", setup, model={"activation_checkpointing": ["Embedding"]})
    assert found == pytest.approx(by_hand("max_norm"), rel=1e-6)


@pytest.mark.parametrize("setup", ["single", "zero3", "fsdp"])
def test_recomputed_blocks_change_their_buffers_once(setup, tmp_path):
    recomputed = curve(tmp_path, ("Buffers", {}), setup, model={"activation_checkpointing": True})
    assert recomputed == curve(tmp_path, ("Buffers", {}), setup)


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


def test_rows_of_padding_do_not_count_in_several_models(tmp_path):
    kept.train(tmp_path, file(("Judged", {}), "fsdp", eval_every_steps=2), 2).check()
    first = torch.stack([rows[0] for rows, _ in foreign_tasks.Judged().eval_data()])
    metrics = read_summary(tmp_path / "run")["metrics"]
    assert metrics["number"] == 13
    assert metrics["first"] == pytest.approx(float(first.mean()), rel=1e-6)
