"""Our schema beside the installed DeepSpeed, field by field: a new release shows up here."""

import enum
import inspect
import warnings

import pytest

from docs.schema import json_schema
from dsframe.config.read.legacy import REMOVED, RENAMED
from dsframe.config.schema import monitor, parallel, precision, system, zero
from dsframe.config.schema.deepspeed import DeepSpeed
from dsframe.config.schema.file import shape
from dsframe.config.schema.parameters import (
    DEEPSPEED_OPTIMIZERS,
    DEEPSPEED_SCHEDULERS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    WITHOUT_ROUTE,
)
from dsframe.config.schema.settings_training import Ema
from tests.files import read_json
from tests.processes import REPOSITORY

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

PAIRS = [
    (zero.Zero, "deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    (zero.OffloadParam, "deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    (zero.OffloadOptimizer, "deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
    (zero.LeafModule, "deepspeed.runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig"),
    (precision.Fp16, "deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    (precision.Bf16, "deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    (parallel.TensorParallel, "deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    (parallel.TensorParallelGroup, "deepspeed.runtime.tensor_parallel.config", "TPConfig"),
    (monitor.TensorBoard, "deepspeed.monitor.config", "TensorBoardConfig"),
    (monitor.Wandb, "deepspeed.monitor.config", "WandbConfig"),
]

# What a file cannot hold: objects of Python.
NOT_IN_A_FILE = {"TPTrainingConfig.dtype", "TPConfig.mpu", "TPConfig.tp_group"}


@pytest.fixture(scope="module", autouse=True)
def _quiet_import():
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("DS_ACCELERATOR", "cpu")
        import deepspeed  # noqa: F401


def theirs(module, name):
    import importlib

    return getattr(importlib.import_module(module), name)


def plain(value):
    if isinstance(value, enum.Enum):
        return value.value
    if hasattr(value, "model_dump"):
        return value.model_dump()
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def default(field):
    return plain(field.get_default(call_default_factory=True, validated_data={}))


@pytest.mark.parametrize(("ours", "module", "name"), PAIRS, ids=[pair[2] for pair in PAIRS])
def test_pydantic_sections(ours, module, name):
    model = theirs(module, name)
    expected = {field.alias or key: (key, field) for key, field in model.model_fields.items()}
    expected = {key: pair for key, pair in expected.items() if f"{name}.{pair[0]}" not in NOT_IN_A_FILE}
    assert set(ours.model_fields) == set(expected)
    assert ours.coerced
    for key, (original, field) in expected.items():
        mine = shape(ours, key)
        label = f"{name}.{original}"
        if not mine.section:
            assert default(ours.model_fields[key]) == default(field), label
        if key != original:
            section = "zero_optimization" if ours is zero.Zero else "tensor_parallel"
            assert RENAMED[f"{section}.{original}"] == f"{section}.{key}"


def test_each_default_and_bound_is_that_of_the_schema_for_editors():
    assert json_schema() == read_json(REPOSITORY / "ds_configs" / "dsframe.schema.json")


def test_an_average_begins_with_the_weights_of_its_first_step():
    assert Ema(start_step=3).decay_at(3) == 0.0


def test_plain_sections_have_their_defaults():
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    def same(ours, original, but=frozenset()):
        mine = {key: default(field) for key, field in ours.model_fields.items()}
        assert {key: value for key, value in mine.items() if key not in but} == {
            key: value for key, value in original.items() if key not in but
        }

    same(system.ActivationCheckpointing, dict(ACT_CHKPT_DEFAULT))
    same(system.Aio, dict(AIO_DEFAULT_DICT))
    experts = {key: value for key, value in vars(parse_autoep_config({})).items() if not key.startswith("_")}
    same(parallel.ExpertParallel, experts, {"expert_w3"})


class Recorder(dict):
    """A dictionary that remembers which keys were asked for."""

    def __init__(self, content, seen):
        super().__init__(content)
        self.seen = seen

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.seen.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key):
        self.seen.add(key)
        return super().__getitem__(key)

    def keys(self):
        """DeepSpeed goes through them and asks what is in them, as of a dictionary."""
        return self

    def __copy__(self):
        return Recorder(dict(self), self.seen)


def test_top_level_keys_are_what_deepspeed_reads():
    from deepspeed.runtime.config import DeepSpeedConfig

    seen = set()
    for content in ({"train_batch_size": 1}, {"train_batch_size": 1, "zero_optimization": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            DeepSpeedConfig(Recorder(dict(content), seen))
    removed = {path for path in REMOVED if "." not in path}
    # Read outside DeepSpeedConfig: deepspeed/__init__.py makes the device mesh of these two.
    read_elsewhere = {"sequence_parallel_size", "data_parallel_size"}
    assert seen | read_elsewhere == set(DeepSpeed.model_fields) | removed | {"bfloat16"}


def test_top_level_defaults():
    from deepspeed.runtime.config import DeepSpeedConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = vars(DeepSpeedConfig({"train_batch_size": 1}))
    other_names = {"zero_optimization": None, "datastates_ckpt": None, "optimizer": None, "scheduler": None}
    compared = 0
    for key, field in DeepSpeed.model_fields.items():
        if key in parsed and key not in other_names and not shape(DeepSpeed, key).section:
            if key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
                continue
            original = parsed[key]
            if key == "seq_parallel_communication_data_type":
                original = str(original).replace("torch.float32", "fp32")
            assert default(field) == original, key
            compared += 1
    assert compared >= 17


def test_removed_keys_are_deepspeeds():
    from deepspeed.runtime import config

    top = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    inside = {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    assert set(REMOVED) == top | inside


def arguments(function, *but):
    """Name -> default."""
    found = inspect.signature(function).parameters
    return {name: plain(one.default) for name, one in found.items() if name not in ("self", *but)}


def defaults(parameters):
    return {
        key: inspect.Parameter.empty if field.is_required() else default(field)
        for key, field in parameters.model_fields.items()
    }


def classes(module, base):
    return {name: cls for name, cls in vars(module).items() if inspect.isclass(cls) and issubclass(cls, base)}


def test_optimizers_are_deepspeeds_and_torchs():
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS as ORIGINAL

    muadam, without = {"muadam", "muadamw", "musgd"}, WITHOUT_ROUTE["optimizer.type"]
    assert muadam <= without.keys()
    assert set(DEEPSPEED_OPTIMIZERS) == set(ORIGINAL) - muadam
    torchs = classes(torch.optim, torch.optim.Optimizer)
    known = {name for name in torchs if name.lower() in {*DEEPSPEED_OPTIMIZERS, *without}}
    assert set(TORCH_OPTIMIZERS) == set(torchs) - known - {"Optimizer"}
    for name, parameters in TORCH_OPTIMIZERS.items():
        assert defaults(parameters) == arguments(torchs[name], "params"), name
    adagrad = arguments(torch.optim.Adagrad, "params")
    assert adagrad.items() <= defaults(DEEPSPEED_OPTIMIZERS["adagrad"]).items()


def test_adam_takes_what_its_kernels_take():
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    fields = set(DEEPSPEED_OPTIMIZERS["adam"].model_fields)
    accepted = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
    for cls in (FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW):
        accepted |= set(inspect.signature(cls.__init__).parameters) - {"self", "params", "model_params", "adamw_mode"}
    assert fields == accepted


def test_schedulers_are_deepspeeds_and_torchs():
    import torch
    from deepspeed.runtime import lr_schedules

    gone = {"OneCycle", "LRRangeTest"}
    assert set(DEEPSPEED_SCHEDULERS) == set(lr_schedules.VALID_LR_SCHEDULES) - gone
    for name, parameters in DEEPSPEED_SCHEDULERS.items():
        assert defaults(parameters) == arguments(getattr(lr_schedules, name).__init__, "optimizer"), name
    torchs = classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    refused = set(WITHOUT_ROUTE["scheduler.type"])
    assert gone <= refused
    without = {name for name in refused - gone if name[0].isupper()}  # the others: Hugging Face's names
    assert set(TORCH_SCHEDULERS) | without == set(torchs) - {"LRScheduler", "_LRScheduler"}
    for name, parameters in TORCH_SCHEDULERS.items():
        assert set(parameters.model_fields) == set(arguments(torchs[name], "optimizer", "scale_fn")), name
