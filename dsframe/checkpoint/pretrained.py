"""Writes a checkpoint's model for transformers' ``from_pretrained``: config.json, safetensors, the tokenizer's files.

The rest that transformers needs was asked of the task when the checkpoint was saved (``Task.pretrained``) and is in its
manifest, so the training's file and model folder are not needed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from dsframe.errors import CheckpointError, TaskError
from dsframe.tasks import _transformers
from dsframe.text import Json, Say, one_line


class _PretrainedRecord(BaseModel):
    """The manifest's entry about the model; validated, because anyone may have written it."""

    model_config = ConfigDict(strict=True, defer_build=True)

    config: str
    tokenizer: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")] | None
    tokenizer_sha256: str | None
    chat_template: str | None = None
    """The training's template, if its file named one."""
    generation_config: str | None = None
    """The model folder's, as JSON text."""
    preprocessor_config: str | None = None
    """Conversion of images to numbers, as JSON text."""


def write(
    manifest: Json,
    weights: Mapping[str, Tensor],
    dtype: str,
    out: Path,
    shard_size: str,
    say: Say,
) -> None:
    """Writes the folder ``out``. ``weights``: a state_dict of ``dtype``. ``say``: prints why there is no tokenizer.

    Raises OSError, TaskError if transformers is missing, and CheckpointError if the model is not one of transformers.
    """
    recorded = manifest.get("pretrained")
    if recorded is None:
        raise CheckpointError(
            f"{manifest['training']['task']} does not say that its model is of transformers: write pretrained() in the task "
            "(docs/coming_from/hf_trainer.md) and train on with --resume auto, or use --to safetensors"
        )
    try:
        record = _PretrainedRecord.model_validate(recorded)
        config = json.loads(record.config)
    except (ValueError, RecursionError) as error:
        why = one_line(error)
        raise CheckpointError(f"the manifest's 'pretrained' is not what dsframe has written: {why}") from None
    _transformers.write(config, weights, dtype, out, shard_size)
    _write_others(record, out, say)
    if "do_center_crop" in (record.preprocessor_config or ""):  # resized images
        say(
            'load its image processor with backend="pil", which gives the pixels of the training; the default of transformers '
            "resizes with torchvision, which rounds otherwise"
        )


def beside_weights(manifest: Json, say: Say) -> dict[str, bytes]:
    """Returns the files (name -> content) that make a checkpoint's folder readable by ``from_pretrained``. Empty if the
    model is not one of transformers, only its adapter is saved, or the weights have other names. ``say``: prints why
    there is no config.json or tokenizer."""
    if manifest.get("pretrained") is None or "adapter" in manifest:
        return {}
    try:
        record = _PretrainedRecord.model_validate(manifest["pretrained"])
        config = {**json.loads(record.config), "dtype": "float32"}
        names, aliases = manifest["parameters"], manifest["aliases"]
        if missing := _transformers.parameter_names(config) - {*names, *aliases}:  # from_pretrained draws these
            raise TaskError(
                f"{config['architectures'][0]} has {min(missing)}, and the checkpoint has {', '.join(sorted(names)[:1])}; let the "
                "task's model() return the model of transformers itself, or leave out pretrained()"
            )
        if not {*names}.intersection(aliases.values()):  # the configuration may tie parameters that are separate
            for part in (config, config.get("text_config")):
                if isinstance(part, dict) and part.get("tie_word_embeddings"):
                    part["tie_word_embeddings"] = False
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
            _write_others(record, Path(folder), say)
            return {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}
    except Exception as error:  # a tokenizer may raise anything; the checkpoint is complete without it
        say(f"warning: checkpoints have no config.json for from_pretrained: {one_line(error)}")
        return {}


def _write_others(record: _PretrainedRecord, out: Path, say: Say) -> None:
    """Writes the files of a model folder other than weights and config.json."""
    for name in ("generation_config", "preprocessor_config"):
        if (text := getattr(record, name)) is not None:
            (out / f"{name}.json").write_text(text, encoding="utf-8")
    if record.tokenizer is None:
        return
    try:
        tokenizer = _transformers.tokenizer(record.tokenizer, {})
    except TaskError as error:
        say(f"no tokenizer is written: {error}")
        return
    assert tokenizer is not None  # a folder was named
    if tokenizer[1] != record.tokenizer_sha256:
        say(f"no tokenizer is written: {record.tokenizer} has changed since the training")
        return
    if record.chat_template is not None:
        tokenizer[0].chat_template = record.chat_template
    tokenizer[0].save_pretrained(out)
