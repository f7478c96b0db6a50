"""What test_tensor.py runs on every rank: layers cut among two ranks, beside one process.

    torchrun --nproc-per-node=N -m tests.engines.tensor REPORT.json CASE...

Each case: six steps of both, their states compared; three more of both; then each goes on from the other's state after step six,
and the one of several ranks once more from its own.
"""

import functools
import json

import torch
import torch.distributed as dist

from dsframe.cluster import world as worlds
from dsframe.engines.deepspeed.imports import groups
from dsframe.model.ema import KEY
from dsframe.model.micro_batch import MicroBatch
from tests import text_files
from tests.engines import several
from tests.engines.snapshot import Snapshot, apart
from tests.files import zero

BF16 = {"bf16": {"enabled": True}}
LLAMA = {**text_files.LLAMA, "intermediate_size": 50}
TEXT = {"context": 16, "corpus": "synthetic", "samples": 500}
QWEN_MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
OPT = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"word_embed_proj_dim": 32, "dropout": 0.0}
TASKS = {
    "gpt": {"name": "language", "layers": 2, "heads": 4, "width": 32, **TEXT},
    "llama": {"name": "causal-language-model", "model": LLAMA, **TEXT},
    "tied": {"name": "causal-language-model", "model": {**LLAMA, "tie_word_embeddings": True}, **TEXT},
    "qwen3 moe": {"name": "causal-language-model", "model": QWEN_MOE, **TEXT},
    "mixtral": {"name": "causal-language-model", "model": MIXTRAL, **TEXT},
    "balanced mixtral": {"name": "causal-language-model", "model": {**MIXTRAL, **BALANCED}, **TEXT},
    "balanced qwen3 moe": {"name": "causal-language-model", "model": {**QWEN_MOE, **BALANCED}, **TEXT},
    "opt": {"name": "causal-language-model", "model": OPT, **TEXT},
}


EPS = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}}}
CUT = {"tensor_parallel": {"autotp_size": 2}}
CASES = {
    "gpt zero0": ("gpt", "deepspeed", {**CUT, **zero(0)}),
    "tied llama zero1": ("tied", "deepspeed", {**CUT, **zero(1)}),
    "llama zero3": ("llama", "deepspeed", {**CUT, **zero(3)}),
    "llama zero2 cpu": ("llama", "deepspeed", {**CUT, **zero(2, offload_optimizer={"device": "cpu"})}),
    "qwen3 moe zero1": ("qwen3 moe", "deepspeed", {**CUT, **zero(1)}),
    # With eps 1e-8 the first AdamW step divides a gradient of 5e-9 in one weight of layers.1.self_attn.o_proj, of which a tenth is
    # rounding: the weight is 2e-4 off and the next norm 4e-5 (relative); by SGD and with this eps no norm is more than 4e-7 off.
    "mixtral moe zero2": ("mixtral", "deepspeed", {**CUT, **zero(2), **EPS}),
    "opt zero3": ("opt", "deepspeed", {**CUT, **zero(3)}),
}


def build(kind, changes, engine, model=None, **settings):
    """**Collective** but for the single process. An engine, and its samples: the same global batches on each."""
    world = worlds.World() if engine == "single" else worlds.here()
    sharing = changes.get("pipeline", {}).get("stages", 1) * changes.get("tensor_parallel", {}).get("autotp_size", 1)
    file = {
        "train_micro_batch_size_per_gpu": 8 // (world.size // sharing),
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "dsframe": {"engine": engine, "task": TASKS[kind], "model": model or {}, **settings},
        **changes,
    }
    make, loader = several.prepare(file, engine, world)
    return make(), loader


def steps(made, first, last):
    """The global batch's loss and gradient norm at each step."""
    engine, loader = made
    average = engine.plan.config.settings.ema
    for step in range(first, last):
        result = engine.train_step(MicroBatch.of(loader.micro_batches(step)))
        if average:
            engine.average(average.decay)
        norm = None if result.gradient_norm is None else float(result.gradient_norm)
        yield float(engine.sum_over_ranks(result.loss.reshape(1).double())) / engine.plan.world.size, norm


def evaluated(made):
    """The mean loss over batches of another size than those of training."""
    engine, loader = made
    inputs, targets = (torch.cat(both) for both in zip(*loader.micro_batches(0), strict=True))
    found = engine.eval_step((inputs, targets), engine.plan.task.metrics).get("loss")
    own = [float(found.total), float(found.count)] if found else [0.0, 0.0]
    total, count = engine.sum_over_ranks(torch.tensor(own, dtype=torch.float64)).tolist()
    return total / count


def averaged(made):
    """Whether the model has its averages inside, and its weights again afterwards; and the loss of the averages."""
    engine = made[0]
    before = Snapshot(engine.state())
    with engine.averaged():
        loss, inside = evaluated(made), Snapshot(engine.state())
    after = Snapshot(engine.state())
    right = apart(before, after) == 0.0
    for name in before.shapes:
        was, held = before.parameter(name), inside.parameter(name)
        if KEY in was.moments:
            right &= torch.equal(held.weight, was.moments[KEY]) and torch.equal(held.moments[KEY], was.weight)
    return right, loss


@functools.cache
def one_process(kind, told):
    """The engine of one process, on rank 0 alone, which several cases are compared with, and what it trained. ``told``: JSON."""
    changes, settings = json.loads(told)
    made = build(kind, changes, "single", **settings)
    before, losses, kept = Snapshot(made[0].state()), list(steps(made, 0, 6)), Snapshot(made[0].state())
    means = averaged(made) if made[0].plan.config.settings.ema else None
    return made, before, losses, kept, evaluated(made), means, list(steps(made, 6, 9))


SHARDED = ("pipeline", "tensor_parallel", "zero_optimization")


def measure(kind, engine, changes, **settings):
    """``settings``: in the section "dsframe"."""
    if dist.is_initialized():  # those of the case before
        groups._release_process_group_references()
    whole = {key: value for key, value in changes.items() if key not in SHARDED}
    is_main = worlds.here().is_main
    alone, *found = one_process(kind, json.dumps([whole, settings])) if is_main else [None]
    cut = build(kind, changes, engine, **settings)
    everywhere = [found]
    dist.broadcast_object_list(everywhere)
    before, losses, kept_alone, loss, means, on = everywhere[0]
    report = {"description": cut[0].description}
    report["before"] = apart(Snapshot(cut[0].state()), before)
    report["alone"], report["cut"] = losses, list(steps(cut, 0, 6))
    kept_cut = Snapshot(cut[0].state())
    report["state"] = apart(kept_cut, kept_alone)
    report["evaluated"] = [loss, evaluated(cut)]
    if means:
        report["averaged"] = [means, averaged(cut)]
    report["on"], on_cut = on, list(steps(cut, 6, 9))
    cut[0].load_state(kept_alone)
    report["read_back"] = apart(Snapshot(cut[0].state()), kept_alone)
    report["on from the single"] = list(steps(cut, 6, 9))
    if is_main:
        alone[0].load_state(kept_cut)
        report["single on from it"] = list(steps(alone, 6, 9))
    cut[0].load_state(kept_cut)
    report["again"] = list(steps(cut, 6, 9)) == on_cut
    model = getattr(cut[0], "_model", None) or cut[0].model
    if is_main:
        held = sum(getattr(p, "ds_tensor", p).numel() for p in model.parameters())
        report["elements"] = [held, sum(p.numel() for p in alone[0].model.parameters())]
    return report


def of(case):
    return measure(*CASES[case])


if __name__ == "__main__":
    several.report(of, CASES)
