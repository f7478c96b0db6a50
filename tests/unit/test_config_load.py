"""From a file to a ``Config``: defaults, overrides, "auto", batch sizes, and what DeepSpeed gets."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsframe.config import Facts, LanguageTask, find, load
from dsframe.config.read import secrets
from dsframe.errors import ConfigError
from dsframe.tools import check

MICRO, STEPS, TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
CUT = {"tensor_parallel": {"autotp_size": 2}, "dsframe": {"task": {"name": "language"}}}


def write(folder, content, name="c.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    return path


def messages(caught):
    return [str(problem) for problem in caught.value.problems]


def test_a_file_may_say_auto_for_the_engine(tmp_path):
    assert load(write(tmp_path, {"train_batch_size": 8, "dsframe": {"engine": "auto"}})).settings.engine == "auto"


def test_all_errors_at_once_in_the_order_of_the_file(tmp_path):
    path = write(
        tmp_path,
        '{\n  "train_batch_size": "8",\n  "zero_optimisation": {\n    "stage": 9\n  },\n'
        '  "offload_optimizer": {"device": "cup"},\n  "gradient_clipping": -1\n}\n',
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert messages(caught) == [
        f'{path}:2:23: error: train_batch_size: "8" must be a whole number; write 8 without quotes [type]',
        f'{path}:3:3: error: zero_optimisation: unknown key; did you mean "zero_optimization"? [unknown-key]',
        f"{path}:4:14: error: zero_optimisation.stage: 9 must be 0, 1, 2 or 3 [value]",
        f'{path}:6:3: error: offload_optimizer: belongs under "zero_optimization" [misplaced-key]',
        f'{path}:6:35: error: offload_optimizer.device: "cup" must be "none", "cpu" or "nvme"; did you mean "cpu"? [value]',
        f"{path}:7:24: error: gradient_clipping: -1 must be at least 0 [range]",
    ]
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


# Overrides


def test_overrides_win_and_are_checked():
    base = {TRAIN: 8, "zero_optimization": {"stage": 1}, "dsframe": {"epochs": 3}}
    config = load(base, overrides=["zero_optimization.stage=3", "dsframe.steps=5", "dsframe.task.name=language"])
    assert config.deepspeed.zero_optimization.stage == 3
    assert (config.settings.steps, config.settings.epochs) == (5, None)  # the command line replaces the length
    assert isinstance(config.settings.task, LanguageTask)
    with pytest.raises(ConfigError) as caught:
        load(base, overrides=["zero_optimization.stagee=3", "gradient_clipping=abc", "nonsense", "zero.stage=1"])
    assert sorted(messages(caught)) == [
        '--set: error: gradient_clipping: "abc" must be a number [type]',
        '--set: error: nonsense: does not have the form dotted.key=value; write for example "dsframe.steps=50" '
        "[override]",
        '--set: error: zero: unknown key; did you mean "zero_optimization"? [unknown-key]',
        '--set: error: zero_optimization.stagee: unknown key; did you mean "stage"? [unknown-key]',
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("null", None), ("[1, 2]", [1, 2]), ("NaN", "NaN"), ("a=b", "a=b")],
)
def test_override_values(text, value):
    config = load({TRAIN: 8, "dsframe": {"task": {"name": "a:B"}}}, overrides=[f"dsframe.task.options.x={text}"])
    assert config.settings.task.options == {"x": value}


# What DeepSpeed gets


def test_deepspeed_gets_what_the_user_wrote():
    content = {
        "$schema": "x", "_comment": "y", MICRO: 4, "zero_optimization": {"stage": 2, "cpu_offload": True},
        "bfloat16": {"enabled": True}, "wibble": 1, "pipeline": {"mine": 2},
        "dsframe": {"pass_through": ["wibble", "pipeline.mine"]},
    }  # fmt: skip
    config = load(content)
    assert config.for_deepspeed(2) == {
        TRAIN: 8, MICRO: 4, STEPS: 1, "bf16": {"enabled": True}, "wibble": 1, "pipeline": {"mine": 2},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }  # fmt: skip
    handed = config.for_deepspeed(2)
    handed["zero_optimization"]["stage"] = 0
    assert config.for_deepspeed(2)["zero_optimization"]["stage"] == 2


def test_the_digest_tells_files_apart_and_not_spellings(tmp_path):
    one = load(write(tmp_path, '{"train_batch_size": 8, "steps_per_print": 1}', "a.json"))
    same = load(write(tmp_path, "{steps_per_print: 1 // comment\n train_batch_size: 8}", "b.json"))
    other = load(one.path or "", overrides=["steps_per_print=2"])
    assert one.digest == same.digest != other.digest


# "auto"


HF = {
    TRAIN: "auto", MICRO: "auto", STEPS: "auto", "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "overlap_comm": "auto",
    },
}  # fmt: skip


def test_auto_is_resolved_once_the_model_and_the_data_are_known():
    first = load(HF)
    assert '"auto"' not in json.dumps(first.for_deepspeed(2))
    waiting = [problem.path for problem in first.problems if problem.code == "auto-later"]
    assert waiting == [
        "scheduler.params.total_num_steps",
    ]
    config = first.resolve(Facts(world_size=2, total_steps=300))
    assert config.for_deepspeed(2) == {
        TRAIN: 16, MICRO: 8, STEPS: 1, "gradient_clipping": 1.0, "fp16": {"enabled": False}, "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 300, "warmup_min_lr": 0.0, "warmup_max_lr": 5e-5, "warmup_num_steps": 1},
        },
        "zero_optimization": {"stage": 3},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "params", "scheduler", "rate"),
    [
        ("Muon", {"muon_lr": 0.02, "adam_lr": 3e-4}, "WarmupLR", None),
        ("Muon", {"adam_lr": 0.02}, "WarmupDecayLR", 0.02),
        ("Muon", {"lr": 0.1, "muon_lr": 0.04, "adam_lr": 0.04}, "WarmupDecayLR", 0.04),
        ("SGD", {"lr": 0.1}, "WarmupLR", 0.1),
    ],
)
def test_auto_is_the_rate_of_the_optimizer(optimizer, params, scheduler, rate):
    """None is as where the key is left out: the optimizer's rates, several with Muon, are reached in proportion."""
    course = {"warmup_max_lr": "auto", **({"total_num_steps": 5000} if scheduler == "WarmupDecayLR" else {})}
    sections = {"optimizer": {"type": optimizer, "params": params}, "scheduler": {"type": scheduler, "params": course}}
    found = load({TRAIN: 8, **sections}).deepspeed.scheduler
    assert found.params["warmup_max_lr"] == rate


@pytest.mark.parametrize(
    ("kind", "key"), [("WarmupLR", "warmup_num_steps"), ("constant_with_warmup", "num_warmup_steps")]
)
def test_a_warm_up_may_be_a_part_of_the_training(kind, key):
    """Rounded up, as transformers counts it."""
    file = {TRAIN: 8, "scheduler": {"type": kind, "params": {key: 0.25}}, "dsframe": {}}
    assert load(file).resolve(Facts(1, total_steps=10)).deepspeed.scheduler.params[key] == 3
    for part, steps in ((1.0, 1), (0.25, 3)):
        file["scheduler"]["params"][key] = part
        assert load(file, overrides=["dsframe.steps=10"]).deepspeed.scheduler.params[key] == steps
    del file["dsframe"]
    with pytest.raises(ConfigError, match=rf"{key}: a part of the training is dsframe's way to count steps"):
        load(file)


# The batch triangle


COUNTS = st.integers(1, 4)


@settings(deadline=None)
@given(COUNTS, COUNTS, COUNTS, st.sampled_from([{}, CUT, {"sequence_parallel_size": 2}]), st.data())
def test_a_batch_is_micro_batches_of_all_ranks(micro, accumulation, ranks, cut, data):
    """Whichever of the three the file gives; "auto" is as where the key is left out."""
    stages = 1 if cut else data.draw(COUNTS)
    tensor, sharing = (2 if cut is CUT else 1), (2 if cut else 1)
    whole = {TRAIN: micro * accumulation * ranks * tensor, MICRO: micro, STEPS: accumulation}  # as DeepSpeed counts
    written = data.draw(
        st.sets(st.sampled_from([TRAIN, MICRO, STEPS]), min_size=1).filter(lambda keys: keys != {STEPS})
    )
    silent = data.draw(st.sampled_from([{}, {key: "auto" for key in whole if key not in written}]))
    config = load({**silent, **{key: whole[key] for key in written}, "pipeline": {"stages": stages}, **cut})
    batch = config.batch(ranks * stages * sharing)
    assert batch.data_parallel_size == ranks
    assert batch.train_batch_size == batch.micro_batch_size * batch.accumulation_steps * ranks
    assert MICRO not in written or batch.micro_batch_size == micro
    assert STEPS not in written or batch.accumulation_steps == accumulation
    assert TRAIN not in written or batch.train_batch_size * tensor == whole[TRAIN]
    assert config.for_deepspeed(ranks * stages * sharing)[TRAIN] == batch.train_batch_size * tensor
    assert silent or len(batch.derived) == 3 - len(written)


@pytest.mark.parametrize("cut", [{"pipeline": {"stages": 2}}, CUT, {"sequence_parallel_size": 2}])
def test_the_samples_of_a_step_do_not_depend_on_who_cuts_the_model(cut):
    """The same file on an engine of full replicas: other ranks read, but a step has the same samples."""
    config = load({TRAIN: 16, STEPS: 2, **cut})
    cutting, replicas = config.batch(2), config.batch(2, replicas=True)
    assert (cutting.data_parallel_size, replicas.data_parallel_size) == (1, 2)
    assert cutting.train_batch_size == replicas.train_batch_size
    assert config.batch(1, replicas=True).train_batch_size == cutting.train_batch_size
    assert config.resolve(Facts(world_size=1, replicas=True)).batch(1).train_batch_size == cutting.train_batch_size


@pytest.mark.parametrize(
    ("file", "replicas", "data_ranks"),
    [
        ({"pipeline": {"stages": 2}}, False, [0, 1, 0, 1]),
        (CUT, False, [0, 0, 1, 1]),
        ({}, False, [0, 1, 2, 3]),
        ({"sequence_parallel_size": 2}, False, [0, 0, 1, 1]),
        ({"sequence_parallel_size": 2}, True, [0, 1, 2, 3]),
    ],
)
def test_ranks_that_split_a_model_read_the_same_samples(file, replicas, data_ranks):
    """In DeepSpeed's order of ranks: pipe, data, tensor."""
    batch = load({MICRO: 1, **file}).batch(4, replicas=replicas)
    assert [batch.data_rank(rank) for rank in range(4)] == data_ranks


@pytest.mark.parametrize(
    ("given", "world", "message"),
    [
        (
            {TRAIN: 100, MICRO: 8, STEPS: 4},
            3,
            "error: train_batch_size: 100 is not divisible by 8 (micro) x 4 (accumulation), on any number of processes; "
            "write 96 or 128 [batch]",
        ),
        (
            {TRAIN: 2},
            4,
            "error: train_batch_size: 2 is not divisible by 4 (data-parallel ranks); write 4 [batch]",
        ),
        (
            {TRAIN: 8, "pipeline": {"stages": 3}},
            4,
            "error: pipeline.stages: 4 processes are not divisible by 3 (pipeline.stages); start 3 or 6 [world]",
        ),
    ],
)
def test_batch_sizes_that_cannot_be(given, world, message):
    with pytest.raises(ConfigError) as caught:
        load(given).batch(world)
    assert messages(caught) == [message]


def test_groups_that_cannot_be():
    with pytest.raises(ConfigError, match="4 x sequence_parallel_size 2 is not 4 processes: DeepSpeed raises; write 2"):
        load({MICRO: 1, "sequence_parallel_size": 2, "data_parallel_size": 4}, facts=Facts(4))
    hybrid = {"engine": "fsdp", "fsdp": {"sharding": "hybrid", "shard_size": 4}}
    with pytest.raises(ConfigError, match=r"shard_size: 4 does not divide 6 processes; choose a number that does"):
        load({MICRO: 1, "dsframe": hybrid}, facts=Facts(6))


# Finding files


def test_find(here):
    shipped = find("zero3.json")
    assert shipped.is_absolute()
    assert find("zero3") == shipped
    (here / "ds_configs").mkdir()
    write(here / "ds_configs", {}, "zero3.json")
    assert find("zero3.json") == Path("ds_configs/zero3.json")
    write(here, {}, "zero3.json")
    assert find("zero3.json") == Path("zero3.json")
    with pytest.raises(
        ConfigError,
        match=r"^zreo3.json: error: no such file, here or in ds_configs/; did you mean zero3.json\? \[missing-file\]$",
    ):
        find("zreo3.json")
    with pytest.raises(ConfigError, match=r"choose from (?!.*schema).*, zero3.json"):
        find("nothing")


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 7\); save the file as UTF-8"):
        load(path)
    with pytest.raises(ConfigError, match="NaN must be a whole number"):
        load({TRAIN: float("nan")})


# Features


def test_features_name_what_is_on(tmp_path):
    path = write(
        tmp_path,
        {
            TRAIN: 8, "bf16": {"enabled": True}, "wandb": {"enabled": False}, "tensorboard": {"enabled": True},
            "zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "offload_param": {"device": "cpu"},
            },
            "optimizer": {"type": "Lion", "params": {}}, "communication_data_type": "fp32",
            "dsframe": {"horovod": {"compression": "fp16"}},
        },
    )  # fmt: skip
    found = load(path).features
    assert [feature.name for feature in found] == [
        "zero3", "offload_optimizer_nvme", "offload_param_cpu", "bf16", "communication_data_type", "fp16_compression",
        "lion",
    ]  # fmt: skip
    assert all(feature.line for feature in found)
    assert load({TRAIN: 8}).features == ()


def test_keys_of_accounts_are_neither_shown_nor_kept():
    file = {MICRO: 1, "comet": {"api_key": "the-key", "project": "p"}}
    file["wandb"] = {"enabled": True, "project": "https://me:the-key@host:5000/x@y"}
    found = load(file, overrides=["dsframe.steps=2"])
    assert found.written()["comet"] == file["comet"]
    assert found.shown()["comet"] == {"project": "p"}
    assert found.written()["wandb"]["project"] == "https://me:the-key@host:5000/x@y"
    assert found.shown()["wandb"]["project"] == "https://host:5000/x@y"
    assert "the-key" not in check.resolved(found, 1) + repr(found.shown())
    assert load(found.shown()).digest == found.digest  # the same training again


@pytest.mark.parametrize(
    "name", ["github_token", "API_KEY", "deploy_key", "my_secret_thing", "db_password", "credentials", "PWD"]
)  # fmt: skip
def test_what_opens_something_is_a_secret(name):
    for value in ("the-key", {"user": "me", "value": "the-key"}, ["the-key"]):
        assert secrets.without({"a": {name: value, "b": 1}}) == {"a": {"b": 1}}
    assert secrets.is_secret(f"--{name.replace('_', '-')}")


@pytest.mark.parametrize(
    "name", ["eos_token", "max_tokens", "eos_token_id", "experiment_key", "text_key", "key"]
)  # fmt: skip
def test_what_is_known_to_be_none_is_kept(name):
    assert secrets.without({name: "x"}) == {name: "x"}
    assert secrets.without({"num_key": 3, "use_auth_token": False}) == {"num_key": 3, "use_auth_token": False}


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://host/x?token=the-key&page=2", "https://host/x?token=***&page=2"),
        ("s3://b/x?X-Amz-Signature=the-key&X-Amz-Date=1", "s3://b/x?X-Amz-Signature=***&X-Amz-Date=***"),
        ("https://me:the-key@host/x?page=2#y", "https://host/x?page=2#y"),
        ("what? token=the-word", "what? token=the-word"),
    ],
)
def test_addresses_open_nothing(address, shown):
    assert secrets.without({"data": [address]}) == {"data": [shown]}
    assert secrets.redact(["--from", address])[1] == shown


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("--set comet.api_key=the-key --set dsframe.steps=2", "--set comet.api_key=*** --set dsframe.steps=2"),
        ("--set=comet.api_key=the-key", "--set=comet.api_key=***"),
        ('--set comet={"api_key":"the-key","mode":"get"}', '--set comet={"mode": "get"}'),
        ("--set m.tracking_uri=https://me:the-key@host/x", "--set m.tracking_uri=https://host/x"),
        ('--set m={"a":"http://me:the-key@host","b":"x@y"}', '--set m={"a":"http://host","b":"x@y"}'),
        ("--server https://me:the@key@host --from ftp://host/a@b", "--server https://host --from ftp://host/a@b"),
        ("train.py --api-key the-key --password=the-key --token", "train.py --api-key *** --password=*** --token"),
        ("--set dsframe.task.eos_token=2 --set a=b=c", "--set dsframe.task.eos_token=2 --set a=b=c"),
    ],
)
def test_keys_of_accounts_are_hidden_in_commands(typed, shown):
    assert " ".join(secrets.redact(typed.split())) == shown
