"""Adapters by peft: a few new weights in a model whose own weights, the base, are frozen and not in checkpoints.

The adapter's layers are inserted when the task's model is built, so every engine trains it like a model with frozen
parameters. A checkpoint has the adapter and a digest of the base.

Source: peft 0.21.2, ``mapping.py`` (inject_adapter_in_model) and ``utils/save_and_load.py`` (names in
adapter_model.safetensors).
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dsframe.config.read.suggest import closest
from dsframe.errors import CheckpointError, ConfigError, DsframeError
from dsframe.model.built import Adapter
from dsframe.model.digests import combined, digest, digest_of_one
from dsframe.model.persistent import leave_out
from dsframe.text import Json, one_line
from dsframe.values import elements, trainable

if TYPE_CHECKING:
    from dsframe.config.value import Config

NAME = "default"
"""peft's name of the adapter, which is part of its parameters' names."""
FILE, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_OF_ADAPTER = re.compile(rf"\.(lora_\w+|modules_to_save|trainable_tokens\w*)\.{NAME}(\.|$)")
"""Matches the names of an adapter's own parameters. A base may also have a module called "default"."""
_HEADS = ("classifier", "score", "qa_outputs")
"""Output layers that peft trains completely, by the end of their names (peft_model.py)."""
_BY_ITS_MODEL = ("alora_invocation_tokens", "monteclora_config", "kasa_config", "arrow_config")
"""Settings that are partly implemented in the forward pass or the loss of peft's own model."""
_BY_PEFT = "give a folder that peft has written"
PREFIX = "base_model.model."
"""Prefix of every name in peft's files."""


def add(config: Config, model: nn.Module) -> str:
    """Inserts the file's adapter into ``model`` and freezes the rest. Returns peft's settings as JSON, "" without an
    adapter. Draws from torch's generator. The model may be on the meta device. Raises ConfigError if peft is missing or
    refuses, if a module that the file names does not exist, or if the folder has no adapter for this model."""
    section = config.settings.adapter
    if section is None:
        return ""
    peft = _import_peft(config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if section.folder is not None:
                settings = _read(config, peft, Path(section.folder))
            else:
                settings = peft.LoraConfig(**section.peft(), task_type=_task_type(model))
                _check_modules(config, model, settings)
                whole = [*(settings.modules_to_save or ()), *_heads(model)]
                settings.modules_to_save = list(dict.fromkeys(whole)) or None
            _check_new_rows(config, model, settings)
            peft.inject_adapter_in_model(settings, model, NAME)
            if section.folder is not None:
                _load(config, model, peft, Path(section.folder))
    except DsframeError:
        raise
    except Exception as error:  # peft's checks, and the packages that some settings need, raise anything
        raise _config_error(config, f"peft refuses it: {one_line(error)}", "change the section") from None
    return json.dumps(settings.to_dict(), sort_keys=True, default=sorted)  # sets


def settle_adapter(
    config: Config,
    model: nn.Module,
    peft: str,
    share: tuple[int, int],
    exchange: Callable[[str], Sequence[str]],
    touched: Callable[[int], None],
) -> Adapter:
    """**Collective.** Excludes the base from checkpoints; returns the adapter with the base's digest.

    Args:
        config: The run's file.
        model: The complete model after :func:`add`.
        peft: Result of :func:`add`.
        share: This rank and the number of ranks: each computes the digests of its part of the parameters.
        exchange: Returns the texts of all ranks.
        touched: Called with the size in bytes of each parameter that was read.
    """
    section = config.settings.adapter
    assert section is not None
    base = base_of(model)
    digests: dict[str, str] = {}
    for name in sorted(base)[share[0] :: share[1]]:
        digests[name] = digest_of_one(base[name])
        touched(base[name].nbytes)
    digest_of = {name: value for text in exchange(json.dumps(digests)) for name, value in json.loads(text).items()}
    leave_out(model, base)
    trained = elements(trainable(model))
    frozen = elements(base.values())
    return Adapter(
        json.loads(section.model_dump_json(exclude_none=True)),
        peft,
        combined(digest_of),
        f"{trained:,} parameters of an adapter ({section.type}) train, {frozen:,} are frozen",
        partial(add, config),
    )


def quantise(config: Config, model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces the frozen linear layers by 4-bit layers of bitsandbytes, one at a time, if the file asks for it. Keeps
    the output layer and shared weights, as transformers does. Products are computed in ``dtype``. Raises ConfigError if
    bitsandbytes is missing."""
    number_format = config.settings.adapter.base_format if config.settings.adapter else None
    if number_format is None:
        return
    bitsandbytes = _import_bitsandbytes(config)
    ask: Any = getattr(model, "get_output_embeddings", None)
    logits = ask() if ask else None
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    for name, module in list(model.named_modules()):
        whole = type(module) is nn.Linear and module is not logits and owners[id(module.weight)] == 1
        if not whole or module.weight.requires_grad:
            continue
        layer = bitsandbytes.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=False,
            compute_dtype=dtype,
            quant_type=number_format,
            device="meta",
        )
        layer.weight = bitsandbytes.nn.Params4bit(
            module.weight.data, requires_grad=False, quant_type=number_format, module=layer
        )
        layer.bias = module.bias
        layer.support_avx512bf16_for_cpu = False  # an evaluation would repack the weights, which training then reads
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer.to("cpu"))  # this quantizes


def base_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the frozen parameters outside the adapter. Frozen adapter parameters are in checkpoints."""
    every = model.named_parameters()
    return {name: parameter for name, parameter in every if not (parameter.requires_grad or is_adapters(name))}


def digest_of(model: nn.Module) -> str:
    """Returns the base's digest, for a complete model on this process."""
    return digest(base_of(model))


def compare(manifest: Json, digest: str, where: object) -> None:
    """Raises CheckpointError if the checkpoint's adapter was trained with another base."""
    saved = manifest["training"].get("adapter's base")
    if saved is not None and saved != digest:
        raise CheckpointError(
            f"{where} has an adapter that was trained with another base model: its weights have the digest {saved}, those that "
            f"were built here {digest}. Give the task the model, the seed and the weights of that training"
        )


def is_adapters(name: str) -> bool:
    """Returns True for the name of an adapter's own parameter."""
    return _OF_ADAPTER.search(name) is not None


def _config_error(config: Config, message: str, remedy: str) -> ConfigError:
    return ConfigError([config.error(("dsframe", "adapter"), message, remedy, code="model")])


def _import_peft(config: Config) -> Any:
    try:
        import peft
    except ImportError:
        remedy = "pip install 'dsframe[adapters]'"
        raise _config_error(config, "needs the library peft, which is not installed", remedy) from None
    return peft


def _import_bitsandbytes(config: Config) -> Any:
    try:
        import bitsandbytes
    except ImportError:
        remedy = "pip install 'dsframe[quantized]'"
        raise _config_error(
            config, "base_format needs the library bitsandbytes, which is not installed", remedy
        ) from None
    return bitsandbytes


def _task_type(model: nn.Module) -> str | None:
    """Returns peft's name of the model's purpose, which determines the class with which others load the adapter."""
    name = type(model).__name__
    kinds = {
        "ForCausalLM": "CAUSAL_LM",
        "ForSequenceClassification": "SEQ_CLS",
        "ForTokenClassification": "TOKEN_CLS",
        "ForQuestionAnswering": "QUESTION_ANS",
    }
    return next((kind for ending, kind in kinds.items() if name.endswith(ending)), None)


def _heads(model: nn.Module) -> list[str]:
    """Returns the output layers of a transformers classifier, which are new if its model folder has none."""
    if not re.search(r"For\w*(Classification|QuestionAnswering)", type(model).__name__):
        return []
    classes, base = getattr(getattr(model, "config", None), "num_labels", None), getattr(model, "base_model_prefix", "")

    def scores(name: str, child: nn.Module) -> bool:
        linear = [module for module in child.modules() if isinstance(module, nn.Linear)]
        return name != base and any(module.out_features == classes for module in linear)

    return [name for name, child in model.named_children() if name.endswith(_HEADS) or scores(name, child)]


def _check_modules(config: Config, model: nn.Module, settings: Any) -> None:
    """Raises ConfigError for a missing module. peft does not report it if another module in the list exists."""
    named = [name for name, _ in model.named_modules() if name]
    if settings.target_modules == "all-linear" and not hasattr(model, "get_output_embeddings"):
        # peft knows only the layers of transformers models.
        settings.target_modules = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    known = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)})
    for key in ("target_modules", "modules_to_save"):
        wanted = getattr(settings, key) or ()
        for name_wanted in () if isinstance(wanted, str) else wanted:
            if not any(name == name_wanted or name.endswith(f".{name_wanted}") for name in named):
                near = closest(name_wanted, {*named, *(name.rpartition(".")[2] for name in named)})
                hint = f'write "{near}"' if near else f"linear layers of this model are {', '.join(known)}"
                raise _config_error(config, f'{key}: the model has no module "{name_wanted}"', hint)


def _check_new_rows(config: Config, model: Any, settings: Any) -> None:
    """Raises ConfigError if the rows of new tokens would not be trained."""
    if not getattr(config.settings.task, "resize_embeddings", False):
        return
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if module in layers]
    if missing := sorted(set(names) - set(settings.modules_to_save or ())):
        message = "resize_embeddings adds rows that the adapter leaves as they were drawn"
        raise _config_error(config, message, f"add to modules_to_save: {', '.join(missing)}")


def _read(config: Config, peft: Any, folder: Path) -> Any:
    try:
        settings = peft.PeftConfig.from_pretrained(str(folder)) if (folder / _SETTINGS).is_file() else None
    except Exception as error:  # as above
        raise _config_error(config, f"{folder / _SETTINGS} cannot be read: {one_line(error)}", _BY_PEFT) from None
    if settings is None or not (folder / FILE).is_file():
        raise _config_error(config, f"{folder} has no {_SETTINGS} and {FILE}", _BY_PEFT)
    if settings.peft_type != "LORA":
        raise _config_error(config, f"{folder} is an adapter of type {settings.peft_type}", "give one of type LORA")
    if odd := [key for key in _BY_ITS_MODEL if getattr(settings, key, None)]:
        raise _config_error(
            config, f"{folder} has {odd[0]}, which peft computes outside of the layers", "train it with peft"
        )
    if str(settings.init_lora_weights).startswith("pissa_niter"):  # the base changes by random numbers, at each load
        message = f"{folder} has init_lora_weights {settings.init_lora_weights!r}, with which peft loads another base each time"
        raise _config_error(
            config,
            message,
            'train it with "pissa", or convert it (save_pretrained with path_initial_model_for_weight_conversion)',
        )
    settings.inference_mode = False
    return settings


def _load(config: Config, model: nn.Module, peft: Any, folder: Path) -> None:
    """Loads the saved adapter. Raises ConfigError if names or shapes differ."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        saved = load_file(folder / FILE)
    except (OSError, SafetensorError) as error:
        raise _config_error(config, f"{folder / FILE} cannot be read: {error}", _BY_PEFT) from None
    saved = {name.removeprefix(PREFIX): tensor for name, tensor in saved.items()}
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    parameters = {**model.state_dict(), **expected}  # peft also saves the base's embeddings if they have an adapter
    differing = sorted(expected.keys() - saved.keys()) or [
        name for name, tensor in saved.items() if name not in parameters or parameters[name].shape != tensor.shape
    ]
    if differing:
        message = f"{folder} is an adapter of another model: {PREFIX}{differing[0]} differs"
        raise _config_error(config, message, "give the model that it was trained for")
    peft.set_peft_model_state_dict(model, saved)
