"""Facts of a run that a checkpoint records, and which of them may change before another run continues from it.

Each change is reported with its consequence.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

from dsframe.config.read import secrets
from dsframe.config.schema.optimizer import OF_TASK
from dsframe.errors import CheckpointError
from dsframe.tasks.sources import sources
from dsframe.text import Json, table_of

if TYPE_CHECKING:
    from dsframe.config.resolve.batch import Batch
    from dsframe.config.value import Config
    from dsframe.model.optimizers import OptimizerSpec
    from dsframe.tasks.task import Task

_TABLE = table_of(__file__)
FOLLOWS: Mapping[str, str] = _TABLE["follows"]
"""What may change between two runs, by the beginning of its name -> consequence; docs/resuming.md has the table."""
FIXED: Mapping[str, str] = _TABLE["fixed"]
"""What must not change -> reason."""
BATCH = "train_batch_size"
_ELSEWHERE = {"data_dir", "workers"}
"""Settings of a task that say where its data are and how they are read, not what they are."""
_FILE = {"gradient_clipping", "scheduler", "bf16", "fp16", "torch_autocast"}
_FILE |= {"communication_data_type", "gradient_allreduce_op", "data_types"}
_OWN: Json = {"model": {"sync_batch_norm", "keep_in_fp32"}, "ema": True}
_OWN |= dict.fromkeys(
    ("per_sample_randomness", "deterministic", "tf32", "on_nonfinite", "stop", "eval_every_steps"), True
)
"""Keys of the file, and of its dsframe section, that may change and are reported."""


def about(
    config: Config,
    task: Task,
    optimizer: OptimizerSpec,
    batch: Batch,
    *,
    samples: int,
    world_size: int,
    engine: str,
    package: str | None,
) -> Json:
    """Returns the run's part of the manifest. ``training`` must stay the same; changes of the rest are reported.

    ``samples``: number of training samples. ``engine``: its name in the table; ``package``: its package besides torch.
    """
    cls, settings = type(task), config.settings
    kept = json.loads(settings.model_dump_json(include=_OWN))
    if not settings.stop and getattr(config.deepspeed.scheduler, "type", "") != "ReduceLROnPlateau":
        kept.pop("eval_every_steps", None)  # evaluations change nothing
    return {
        "training": {
            "task": f"{cls.__module__}:{cls.__qualname__}",
            "task settings": secrets.without(json.loads(settings.task.model_dump_json(exclude=_ELSEWHERE))),
            "optimizer": kind_of(optimizer),
            "train_batch_size": batch.train_batch_size,
            "training samples": samples,
            "seed": settings.seed,
            "dataloader_drop_last": config.deepspeed.dataloader_drop_last,
            **({"order": "sequential"} if settings.order == "sequential" else {}),
        },
        "course": {
            "optimizer.params": course_of(optimizer),
            "learning rate": optimizer.learning_rate,
            **json.loads(config.deepspeed.model_dump_json(include=_FILE)),
            "communication": {"communication": settings.ddp.communication, "compression": settings.horovod.compression},
            **{key: value for key, value in kept.items() if key != "ema" or value},  # the weights show on or off
        },
        "run": {
            "engine": engine,
            "world_size": world_size,
            "micro_batch_size": batch.micro_batch_size,
            "config": config.shown(),
            "config_digest": config.digest,
        },
        "pretrained": task.pretrained(),
        "classes": [str(name) for name in task.class_names],
        "versions": {"python": platform.python_version(), **_versions(package)},
        "source": sources(),
    }


def kind_of(optimizer: OptimizerSpec) -> str:
    """Returns the optimizer's name in manifests."""
    name = optimizer.name.lower() if optimizer.kind != OF_TASK else OF_TASK
    if optimizer.cls is None and name == "adam" and optimizer.arguments.get("adam_w_mode", True):
        return "adamw"  # DeepSpeed's Adam decouples weight decay by default
    return name


def course_of(optimizer: OptimizerSpec) -> Json:
    """Returns the optimizer's arguments that may change and are reported."""
    return {key: value for key, value in optimizer.arguments.items() if key not in ("fused", "torch_adam", "lr")}


def _versions(engines: str | None) -> dict[str, str | None]:
    """Returns the versions of dsframe, torch, the engine's package and libraries that the task has imported."""
    versions: dict[str, str | None] = {}
    names = ["dsframe", "torch", engines, *(name for name in ("torchvision", "transformers") if name in sys.modules)]
    for name in filter(None, names):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def differences(manifest: Json, mine: Json) -> list[str]:
    """Returns a line for each permitted change, with its consequence. Ignores what an older checkpoint does not record.

    Raises CheckpointError, naming every difference, if the checkpoint belongs to another training.
    """
    current = json.loads(json.dumps(mine))
    compare_classes(manifest, current.get("classes", ()))
    wrong = [
        f"{line} ({FIXED.get(key, 'it must stay')})"
        for key in {**current["training"], **manifest["training"]}
        if key != BATCH
        for line in _changes(key, manifest["training"].get(key), current["training"].get(key))
    ]
    if wrong:
        raise CheckpointError(
            f"the checkpoint is of another training: {'; '.join(wrong)}. Change it back, or start over with --resume never"
        )
    compare_adapters(manifest, current.get("adapter", ""))
    changed = []
    if new_batch(manifest, current):
        line = _changes(BATCH, manifest["training"][BATCH], current["training"][BATCH])[0]
        steps = f"step {manifest['step']} is step {step_now(manifest, current)} now, and less than a batch is read once more"
        changed.append(f"{line}: {steps}; {FOLLOWS[BATCH]}")
    changed += _lines_of(manifest["course"], current["course"])
    changed += _lines_of(_of_run(manifest), _of_run(current))
    changed += _lines_of(manifest.get("versions", {}), current.get("versions", {}), "versions")
    if modules := _unlike(manifest.get("source", {}), current.get("source", {})):
        changed.append(f"the source of {', '.join(sorted(modules))} was changed: {FOLLOWS['source']}")
    if samples := _unlike(manifest.get("data", {}), current.get("data", {})):
        changed.append(f"the training data: sample {samples[0]} was another one: {FOLLOWS['training data']}")
    for name, held_out in current.get("evaluation data", {}).items():
        if others := _unlike(manifest.get("evaluation data", {}).get(name, {}), held_out):
            where = f"the evaluation data {name}".rstrip()
            changed.append(f"{where}: {others[0]} was another one: {FOLLOWS['evaluation data']}")
    return changed


def compare_classes(manifest: Json, names: Sequence[str]) -> None:
    """Raises CheckpointError if the data's classes have other names, or another order, than in the training."""
    trained = manifest.get("classes") or []
    if not (trained and names) or list(names) == trained:
        return
    gone, new = sorted(set(trained) - set(names)), sorted(set(names) - set(trained))
    what = f"; {', '.join(gone)} missing" * bool(gone) + f"; {', '.join(new)} new" * bool(new)
    raise CheckpointError(
        f"the data's classes are {', '.join(names)}, but the checkpoint was trained with {', '.join(trained)}{what}: "
        "rename the folders as they were, or train again"
    )


def compare_adapters(manifest: Json, settings: str) -> None:
    """Raises CheckpointError if the scale of the adapter (``settings``: peft's, as JSON) differs from the training's:
    neither names nor shapes show it."""
    was, now = (json.loads(text or "{}") for text in (manifest.get("adapter"), settings))
    keys = [key for key in ("lora_alpha", "alpha_pattern", "use_rslora") if key in was and key in now]
    if lines := [line for key in keys for line in _changes(f"adapter.{key}", was[key], now[key])]:
        raise CheckpointError(
            f"the checkpoint has another adapter: {'; '.join(lines)}. Give the settings, or the folder, of the training"
        )


def _of_run(manifest: Json) -> Json:
    names = {"engine": "engine", "world_size": "number of ranks", "micro_batch_size": "micro-batch size"}
    return {name: manifest["run"][key] for key, name in names.items() if key in manifest["run"]}


def _lines_of(before: Json, now: Json, follows: str = "") -> list[str]:
    return [
        f"{line}: {FOLLOWS[follows or key]}"
        for key in _unlike(before, now)
        for line in _changes(key, before[key], now[key])
    ]


def _unlike(before: Json, now: Json) -> list[str]:
    return [key for key in now if key in before and before[key] != now[key]]


def _changes(name: str, before: Any, now: Any) -> list[str]:
    """Returns ``name was A, is B``; for sections one line for each key that differs."""
    if before == now:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        both = {**now, **before}
        return [line for key in both for line in _changes(f"{name}.{key}", before.get(key), now.get(key))]
    return [f"{name} was {json.dumps(before)}, is {json.dumps(now)}"]


def new_batch(manifest: Json, mine: Json) -> bool:
    """True if this run's global batch differs from the saved one."""
    return bool(manifest["training"].get(BATCH) != mine["training"].get(BATCH))


def step_now(manifest: Json, mine: Json) -> int:
    """Returns this run's step at the saved position in the data: the number of its batches that fit into what was read.
    The remainder, less than a batch, is read again."""
    step = manifest["step"]
    if not new_batch(manifest, mine):
        return int(step)
    before, now = manifest["training"][BATCH], mine["training"][BATCH]
    if not mine["training"]["dataloader_drop_last"]:
        return int(step * before // now)
    samples = mine["training"]["training samples"]
    epoch, batches = divmod(step, samples // before)
    return int(epoch * (samples // now) + batches * before // now)
