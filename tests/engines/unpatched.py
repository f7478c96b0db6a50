"""What test_patches.py runs on two ranks: DeepSpeed without and with each of dsframe's patches.

torchrun --nproc-per-node=2 -m tests.engines.unpatched    # rank 0 prints {patch: what is wrong, or ""} as JSON

Each function is called like its patch and shows the fault in DeepSpeed alone; and that the patch mends it, where the tests of
the engines cannot see that.
"""

import contextlib
import functools
import gc
import inspect
import itertools
import json
import math
import os
import sys
import tempfile
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

NOT_NEEDED = "no longer needed: DeepSpeed does right by itself"


def mlflow():
    folder = Path(tempfile.mkdtemp())
    (folder / "mlflow").mkdir()
    (folder / "mlflow" / "__init__.py").write_text("")
    sys.path.insert(0, str(folder))
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    import deepspeed

    assert deepspeed.autotuning.autotuner.has_mlflow, NOT_NEEDED


def shm_comm():
    import deepspeed

    from dsframe.engines.deepspeed import patches

    patches.leave_out_shm_comm()
    assert sys.modules["deepspeed.comm.torch"].build_shm_op() is None
    assert "__compatible_ops__" not in vars(deepspeed.ops), "no op is probed"
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"], NOT_NEEDED


def debug_symbols():
    import cpuinfo
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    from dsframe.engines.deepspeed import patches

    builders = AsyncIOBuilder(), CPUAdamBuilder()
    # A look at the processor takes a second, and each call takes two.
    with mock.patch.object(cpuinfo, "get_cpu_info", functools.cache(cpuinfo.get_cpu_info)):
        before = [builder.cxx_args() for builder in builders]
        assert all("-g" in options for options in before), NOT_NEEDED
        for _ in range(2):
            patches.leave_out_debug_symbols()
        after = [builder.cxx_args() for builder in builders]
    assert after == [[one for one in options if one != "-g"] for options in before]


def started(model, zero, optimizer="SGD", **changes):
    import deepspeed

    params = {"lr": 1.0} if optimizer == "SGD" else {"lr": 1.0, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": optimizer, "params": params},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "log_level": "error",
        **changes,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    return engine


def linear_model():
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))


def step(engine, factor=1.0):
    import torch

    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(1, 4, dtype=dtype)).float().sum() * factor)
    engine.step()


def scalars():
    """test_foreign.py trains them."""
    import torch

    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, rows):
            return super().forward(rows) * self.scale

    for stage in (1, 3):
        with contextlib.suppress(RuntimeError):
            started(Scaled(), {"stage": stage})
            raise AssertionError(NOT_NEEDED)


def torch_warnings():
    from dsframe.engines.deepspeed import patches

    def deprecated():
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            warnings.simplefilter("always")
            if silent:
                patches.silence_torch_warnings()
            step(started(linear_model(), {"stage": 1}))
        return [str(one.message) for one in caught if issubclass(one.category, FutureWarning)]

    silent = False
    assert any("_tensor" in text and "is deprecated" in text for text in deprecated()), NOT_NEEDED
    silent = True
    assert deprecated() == []


def norm():
    """test_groups.py compares norms."""
    engine = started(linear_model(), {"stage": 0})
    step(engine)
    assert not engine.get_global_grad_norm(), NOT_NEEDED


def loss_scale():
    """test_pipeline.py compares updates."""
    import torch

    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4))

        def forward(self, inputs):
            return (self.weight * inputs).sum()

    engine = started(One(), {"stage": 1}, fp16={"enabled": True, "initial_scale_power": 2, "loss_scale_window": 2})
    weights = [0.0]
    for _ in range(6):
        step(engine)
        weights.append(float(engine.module.weight[0]))
    assert {before - after for before, after in itertools.pairwise(weights)} != {1.0}, NOT_NEEDED


def nonfinite():
    """test_nonfinite.py has an update left out."""
    import torch

    engine = started(linear_model(), {"stage": 0})
    step(engine, float("nan"))
    assert engine.was_step_applied(), NOT_NEEDED
    assert not torch.isfinite(engine.module[0].weight).all(), NOT_NEEDED


def order():
    import torch

    from dsframe.engines.deepspeed import patches

    class First(torch.nn.Module):
        """Layers of which one is called."""

        def __init__(self):
            super().__init__()
            self.layers = linear_model()

        def forward(self, inputs):
            return self.layers[0](inputs)

    def reduced(patch):
        engine, came = started(First(), {"stage": 2}), []
        original = engine.optimizer.reduce_independent_p_g_buckets_and_remove_grads

        def reduce(parameter, group):
            came.append(places[parameter])
            original(parameter, group)

        engine.optimizer.reduce_independent_p_g_buckets_and_remove_grads = reduce
        places = {parameter: place for place, parameter in enumerate(engine.module.parameters())}
        patch(engine)
        step(engine)
        return came

    assert len(reduced(lambda _: None)) == 2, NOT_NEEDED
    assert reduced(patches.reduce_in_order) == [7, 6, 5, 4, 3, 2, 1, 0]


def unused():
    """tests/faults/test_calls.py compares such trainings with those of other engines."""
    import torch

    class Shorter(torch.nn.Module):
        """In its second pass it leaves out its last layer."""

        def __init__(self):
            super().__init__()
            self.layers, self.passes = linear_model(), 0

        def forward(self, inputs):
            self.passes += 1
            return self.layers[: 5 - self.passes](inputs)

    engine = started(Shorter(), {"stage": 3})
    step(engine)
    last = engine.module.layers[3].weight
    before = last.ds_tensor.clone()
    step(engine)
    assert not torch.equal(last.ds_tensor, before), NOT_NEEDED


def leaf():
    """test_foreign.py trains such modules (Units)."""
    import torch
    from deepspeed.utils import set_z3_leaf_module

    class Model(torch.nn.Sequential):
        def forward(self, inputs):
            return self[1][0](self[0](inputs))

    model = Model(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4)))
    set_z3_leaf_module(model[1], True)
    engine = started(model, {"stage": 3})
    engine.backward(engine(torch.ones(1, 4)).sum())
    assert engine.module[1][0].weight.grad is not None, NOT_NEEDED  # else it is reduced


def lists():
    """test_foreign.py trains with what modules add to one (Filled)."""
    import torch

    class Adds(torch.nn.Linear):
        def forward(self, inputs, outputs):
            outputs.append(super().forward(inputs))

    class Model(torch.nn.Sequential):
        def forward(self, inputs):
            self[0](inputs, outputs := [])
            return outputs

    engine = started(Model(Adds(4, 4)), {"stage": 3})
    assert not engine(torch.ones(1, 4)), NOT_NEEDED


def writes():
    """test_foreign.py trains with modules that write to their inputs (Units)."""
    import torch

    class Doubles(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs.mul_(2.0))

    class Model(torch.nn.Sequential):
        def forward(self, inputs):
            self[1](hidden := self[0](inputs))
            return hidden

    model = Model(torch.nn.Linear(4, 4), Doubles(4, 4))
    torch.nn.init.ones_(model[0].weight)
    engine = started(model, {"stage": 3})
    rows = torch.ones(1, 4, requires_grad=True)
    engine.backward(engine(rows).sum())
    assert rows.grad.tolist() == [[4.0] * 4], NOT_NEEDED  # else 8


def outputs():
    """test_foreign.py trains with modules that keep their output (Units)."""
    import torch

    class Keeps(torch.nn.Linear):
        def forward(self, inputs):
            self.kept = super().forward(inputs)
            return self.kept

    engine = started(torch.nn.Sequential(Keeps(4, 4)), {"stage": 3})
    assert engine(torch.ones(1, 4)) is not engine.module[0].kept, NOT_NEEDED


def hidden_step():
    """test_groups.py compares the moments of "zero0 bf16"."""
    engine = started(linear_model(), {"stage": 0}, "Adam", bf16={"enabled": True})
    assert engine.basic_optimizer.state, NOT_NEEDED


@contextlib.contextmanager
def gathers_counted():
    """One entry for each collective by which ZeRO-3 gathers parameters."""
    from deepspeed.runtime.zero import partition_parameters

    called = []

    def counted(name):
        original = getattr(partition_parameters.dist, name)

        def call(*arguments, **options):
            called.append(name)
            return original(*arguments, **options)

        return call

    names = ("all_gather", "all_gather_into_tensor", "allgather_fn")
    with mock.patch.multiple(partition_parameters.dist, **{name: counted(name) for name in names}):
        yield called


def gathers():
    from dsframe.engines.deepspeed import patches

    def collectives(patch):
        engine = started(linear_model(), {"stage": 3})
        patch(engine)
        step(engine)
        kept = engine.optimizer.persistent_parameters
        assert len(kept) == 8
        for parameter in kept:
            parameter.partition()
        with gathers_counted() as called:
            kept[0].all_gather(kept)
        return len(called)

    assert collectives(lambda _: None) == 8, NOT_NEEDED
    assert collectives(patches.coalesce_gathers) == 1


def evaluation():
    import torch

    from dsframe.engines.deepspeed import patches

    def sent(patch):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
        engine = started(linear_model(), zero)
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(1, 4))
        engine.train()
        patch(engine)
        step(engine)
        step(engine)
        with gathers_counted() as called:
            step(engine)
        return len(called)

    assert sent(lambda _: None) > sent(patches.forget_evaluation), NOT_NEEDED


def muon_dtype():
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.muon import original_muon

    from dsframe.engines.deepspeed import patches

    with (
        mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True),
        mock.patch.object(get_accelerator(), "is_bf16_supported", return_value=True),
    ):
        before = [original_muon.ns_compute_dtype(method) for method in ("gram", "standard")]
        assert torch.float32 not in before, NOT_NEEDED
        patches.orthogonalize_in_fp32()
        assert {original_muon.ns_compute_dtype(method) for method in ("gram", "standard")} == {torch.float32}


def hooks_set_aside():
    import torch
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload as Offload

    from dsframe.engines.deepspeed import patches

    called, users = [], []
    original = Offload.pre_sub_module_forward_function

    def counted(self, module):
        called.append(module)
        original(self, module)

    def evaluated(around):
        engine = started(linear_model(), {"stage": 3})
        users_hook = engine.module[0].register_forward_hook(lambda *_: users.append("called"))
        step(engine)
        hooks = engine.module[0]._forward_hooks
        before = [key for key in hooks if key != users_hook.id]
        called.clear()
        engine.eval()
        with around(engine), torch.no_grad():
            outputs = engine(torch.ones(1, 4))
            engine.module[0].register_forward_hook(lambda *_: users.append("added"))
            users_hook.remove()
        of_evaluation = len(called)
        engine.train()
        step(engine)
        assert len(called) > of_evaluation, "training has its hooks again"
        assert list(hooks)[:-1] == before, "in the old order, and the one that was added in an evaluation last"
        return of_evaluation, outputs

    with mock.patch.object(Offload, "pre_sub_module_forward_function", counted):
        plain, expected = evaluated(lambda _: contextlib.nullcontext())
        aside, found = evaluated(patches.hooks_set_aside)
    assert plain > 0, NOT_NEEDED
    assert aside == 0
    assert users == ["called", "called", "added"] * 2
    assert torch.equal(expected, found)


def pipeline_bounds():
    from deepspeed.runtime.pipe.module import PipelineModule

    topology = SimpleNamespace(get_dim=lambda _: 2, get_coord=lambda _: SimpleNamespace(pipe=0))
    module = SimpleNamespace(_topo=topology, global_rank=1, stage_id=0)
    try:
        PipelineModule._partition_layers(module, [0, 1, 2])
    except AttributeError:
        return
    raise AssertionError(NOT_NEEDED)


def pipeline_recompute():
    import torch
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from dsframe.engines.deepspeed import patches

    stage = torch.nn.Sequential(torch.nn.Linear(2, 2))
    engine = SimpleNamespace(module=stage)
    stage.activation_checkpoint_interval = 1
    patches.recompute_once(engine, stage)  # torch's function, which is not reentrant
    assert PipelineEngine._reentrant_activation_checkpointing(engine), NOT_NEEDED
    assert not engine._reentrant_activation_checkpointing()


def pipeline_clipping():
    """test_pipeline.py compares the norm that clips."""
    import torch
    from deepspeed.runtime.utils import is_model_parallel_parameter

    assert not is_model_parallel_parameter(torch.nn.Linear(2, 2).weight), NOT_NEEDED


def pipeline_groups():
    """test_pipeline.py shows that the norm is that of all stages, and that no stage waits for another."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    calls = inspect.getsource(DeepSpeedZeroOptimizer.get_grad_norm_direct)
    assert "self._model_parallel_all_reduce" in calls, NOT_NEEDED


def pipeline_evaluation():
    from deepspeed.runtime.pipe.engine import PipelineEngine

    assert "reset_activation_shape" not in inspect.getsource(PipelineEngine.eval_batch), NOT_NEEDED


def pipeline_sizes():
    """test_pipeline.py shows when stages announce, and that losses are the same."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    for name in ("_exec_send_activations", "_exec_recv_activations", "_exec_recv_grads"):
        assert "self.dynamic_shape" in inspect.getsource(getattr(PipelineEngine, name)), NOT_NEEDED


def mixture():
    """A small Mixtral, its experts spread over both ranks."""
    import torch

    from dsframe.tasks import _transformers
    from tests.text_files import LLAMA

    settings = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
    torch.manual_seed(0)
    config = _transformers.configure("AutoModelForCausalLM", settings, {"vocab_size": 32})
    experts = {"enabled": True, "autoep_size": 2, "use_grouped_mm": False}
    return started(_transformers.build("AutoModelForCausalLM", config, None), {"stage": 0}, expert_parallel=experts)


def recorded_routers():
    """test_experts.py trains such models."""
    with contextlib.suppress(TypeError):
        mixture()
        raise AssertionError(NOT_NEEDED)


def expert_norm():
    """test_experts.py compares norms."""
    import torch
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.runtime.utils import clip_grad_norm_
    from torch import distributed as dist

    from dsframe.engines.deepspeed import patches

    with patches.recorded_routers():
        engine = mixture()
    tokens = torch.arange(8).view(1, 8) + 8 * dist.get_rank()
    engine.backward(engine(tokens).logits.square().mean())
    square = torch.zeros(2)
    for parameter in engine.module.parameters():
        if is_moe_param(parameter):
            parameter.grad.mul_(100 + dist.get_rank())  # else they hardly count
        square[int(is_moe_param(parameter))] += parameter.grad.square().sum()
    dist.all_reduce(square)
    right = float(square[0] / 2 + square[1]) ** 0.5
    theirs = float(clip_grad_norm_(engine.module.parameters(), max_norm=math.inf))
    assert abs(theirs - right) > 0.01 * right, NOT_NEEDED


def prologue():
    """test_foreign.py trains such losses with accumulation."""
    import torch

    engine = started(linear_model(), {"stage": 1}, gradient_accumulation_steps=2)
    inputs = torch.ones(1, 4, requires_grad=True)
    (slopes,) = torch.autograd.grad(engine(inputs).sum(), inputs, create_graph=True)
    (right,) = torch.autograd.grad(linear_model()(inputs).sum(), inputs)
    assert abs(slopes.sum() - right.sum() / 2) < 1e-6, NOT_NEEDED


def models():
    import torch

    from dsframe.engines.deepspeed import patches

    def trained(*, patched):
        engine = started(linear_model(), {"stage": 3, "stage3_param_persistence_threshold": 0})
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        model = engine.module
        engine.destroy()
        if patched:
            patches.release_model(model)
        return weakref.ref(model)

    held, released = trained(patched=False), trained(patched=True)
    gc.collect()
    assert held() is not None, NOT_NEEDED
    assert released() is None


def groups():
    from deepspeed.utils import groups as module
    from torch import distributed as dist

    from dsframe.engines.deepspeed import patches

    engine = started(linear_model(), {"stage": 1})
    held = module._get_data_parallel_group()
    assert held is not None
    engine.destroy()
    dist.destroy_process_group()
    assert module._WORLD_GROUP is not None, NOT_NEEDED
    patches.release_groups()
    assert module._WORLD_GROUP is None


EARLY = (mlflow, shm_comm)
"""Before anything else is imported, in this order."""
LATER = (
    debug_symbols, scalars,
    torch_warnings, norm, loss_scale, nonfinite, order, unused, leaf, lists, writes, outputs, hidden_step, gathers, evaluation,
    muon_dtype, hooks_set_aside, pipeline_bounds,
    pipeline_recompute, pipeline_clipping, pipeline_groups, pipeline_evaluation, pipeline_sizes,
    recorded_routers, expert_norm, prologue, models, groups,
)  # fmt: skip
"""``groups`` last: it ends the process group."""


def main():
    found = {}
    for check in (*EARLY, *LATER):
        if check is LATER[0]:
            meet()
        try:
            check()
            found[check.__name__] = ""
        except Exception as error:  # any is this patch's finding, and must not hide the others'
            found[check.__name__] = f"{type(error).__name__}: {error}"
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def meet():
    """The ranks meet; and fp16 where this processor would refuse it."""
    import deepspeed
    import torch.distributed as dist

    dist.init_process_group("gloo")
    deepspeed.init_distributed(dist_init_required=False)
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


if __name__ == "__main__":
    main()
