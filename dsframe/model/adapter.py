"""Adapters by peft: a few new weights in a model whose own weights, the base, are frozen and in no checkpoint.

The adapter's layers are put into the task's model where it is built, so every engine trains them as it trains a model with frozen
parameters. A checkpoint has the adapter and names the base by a digest.

Source: peft 0.21.2, ``mapping.py`` (inject_adapter_in_model) and ``utils/save_and_load.py`` (names in adapter_model.safetensors).
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from dsframe.config.read.suggest import closest
from dsframe.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from dsframe.config import Config

NAME = "default"
"""peft's name of the adapter, which is part of its parameters' names."""
_FILE, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_SAVED_MODULE = f".modules_to_save.{NAME}."
_LEFT_OUT = "_dsframe_left_out"
_BY_PEFT = "give a folder that peft has written"
_PREFIX = "base_model.model."
"""Before every name in peft's files."""


@dataclass(frozen=True)
class Adapter:
    """An adapter in a model."""

    settings: Mapping[str, Any]
    """The file's section, without what is not set."""
    peft: str
    """peft's own settings, as JSON: the ``adapter_config.json`` of an export."""
    digest: str
    """Digest of the base's values as float32, the same on any number of ranks and in any number format that holds them."""
    line: str
    """Sizes, for the first lines of a run."""

    @property
    def training(self) -> dict[str, Any]:
        """Returns what must be the same for a run to continue from a checkpoint."""
        kept = {key: value for key, value in self.settings.items() if key != "folder"}
        return {"adapter": kept, "adapter's base": self.digest}


def add(config: Config, model: nn.Module) -> str:
    """Puts the file's adapter into ``model`` and freezes the rest; returns peft's settings as JSON, empty without an adapter.

    Draws from torch's generator. The model may be without numbers (device "meta"). Raises ConfigError where peft is missing or
    refuses, a module that the file names is not there, or the folder is no adapter for this model.
    """
    section = config.settings.adapter
    if section is None:
        return ""
    peft = _library(config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if section.folder is not None:
                settings = _read(config, peft, Path(section.folder))
            else:
                settings = peft.LoraConfig(**section.peft(), task_type=_kind(model))
                _check_modules(config, model, settings)
            peft.inject_adapter_in_model(settings, model, NAME)
    except (ValueError, TypeError) as error:
        raise _wrong(config, f"peft refuses it: {' '.join(str(error).split())}", "change the section") from None
    if section.folder is not None:
        _load(config, model, Path(section.folder))
    return json.dumps(_plain(settings.to_dict()), sort_keys=True)


def settle_adapter(
    config: Config,
    model: nn.Module,
    peft: str,
    share: tuple[int, int],
    exchange: Callable[[str], Sequence[str]],
    touched: Callable[[int], None],
) -> Adapter:
    """**Collective.** Leaves the base out of checkpoints; returns the adapter with the base's digest.

    Args:
        config: The run's file.
        model: As :func:`add` has left it, whole on every rank.
        peft: What :func:`add` returned.
        share: This rank and the number of ranks: each computes the digests of its share of the parameters.
        exchange: Returns the texts of all ranks.
        touched: Is told the bytes of each parameter that was read.
    """
    section = config.settings.adapter
    assert section is not None
    base = base_of(model)
    digests: dict[str, str] = {}
    for name in sorted(base)[share[0] :: share[1]]:
        digests[name] = _digest(base[name])
        touched(base[name].nbytes)
    digest_of = {name: value for text in exchange(json.dumps(digests)) for name, value in json.loads(text).items()}
    leave_out(model, base)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in base.values())
    return Adapter(
        json.loads(section.model_dump_json(exclude_none=True)),
        peft,
        _combined(digest_of),
        f"{trained:,} parameters of an adapter ({section.type}) train, {frozen:,} are frozen",
    )


def quantise(config: Config, model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces the frozen linear layers by layers of bitsandbytes in 4 bits, one after the other, where the file asks for it.

    As transformers does, the layer that gives logits stays as it is, and so do weights that other modules use too. Products are
    computed in ``dtype``. Raises ConfigError where bitsandbytes is missing.
    """
    number_format = config.settings.adapter.base_format if config.settings.adapter else None
    if number_format is None:
        return
    bitsandbytes = _bitsandbytes(config)
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
        setattr(model.get_submodule(parent), attribute, layer.to("cpu"))  # this is where it is rounded


def base_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns what is frozen and no part of the adapter: a group may freeze some of that too, and checkpoints have it."""
    every = model.named_parameters()
    return {name: parameter for name, parameter in every if not (parameter.requires_grad or is_adapters(name))}


def leave_out(model: nn.Module, names: Iterable[str]) -> None:
    """Checkpoints have none of these parameters of ``model``, which are frozen and built anew at each start."""
    setattr(model, _LEFT_OUT, frozenset(names))


def left_out(model: nn.Module) -> frozenset[str]:
    """The names that :func:`leave_out` was given."""
    excluded: frozenset[str] = getattr(model, _LEFT_OUT, frozenset())
    return excluded


def digest_of(model: nn.Module) -> str:
    """The base's digest, of a model that this process has whole."""
    return digest(base_of(model))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest of tensors by their names, which this process has whole: of their values as float32."""
    return _combined({name: _digest(tensor) for name, tensor in tensors.items()})


def compare(manifest: Mapping[str, Any], digest: str, where: object) -> None:
    """Raises CheckpointError where the checkpoint's adapter was trained with another base."""
    saved = manifest["training"].get("adapter's base")
    if saved is not None and saved != digest:
        raise CheckpointError(
            f"{where} has an adapter that was trained with another base model: its weights have the digest {saved}, those that "
            f"were built here {digest}. Give the task the model, the seed and the weights of that training"
        )


def merge(model: nn.Module) -> nn.Module:
    """Adds the adapter to the base, in place; the model has its own layers and names again."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            whole: Any = module.get_base_layer()
        elif isinstance(module, ModulesToSaveWrapper):
            whole = module.modules_to_save[NAME]
        else:
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, whole)
    return model.requires_grad_(True)


def write(manifest: Mapping[str, Any], weights: Mapping[str, Tensor], out: Path) -> None:
    """Writes the folder ``out`` for ``PeftModel.from_pretrained``. Raises CheckpointError where the checkpoint has no adapter."""
    from safetensors.torch import save_file

    saved_settings = manifest.get("adapter")
    if not isinstance(saved_settings, str):
        raise CheckpointError('the checkpoint has no adapter: its training had no "adapter"; choose another format')
    try:
        settings = json.loads(saved_settings)
        if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
            raise ValueError("no settings of peft's")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the manifest's 'adapter' is not what dsframe has written: {error}") from None
    out.mkdir()
    tensors = {_PREFIX + peft_name(name): tensor.contiguous() for name, tensor in weights.items() if is_adapters(name)}
    save_file(tensors, out / _FILE, {"format": "pt"})
    (out / _SETTINGS).write_text(json.dumps({**settings, "inference_mode": True}, indent=2, sort_keys=True) + "\n")


def is_adapters(name: str) -> bool:
    """True for the name of an adapter's own parameter."""
    return f".{NAME}." in name


def peft_name(name: str) -> str:
    """The name in peft's files, without its prefix."""
    return name.replace(_SAVED_MODULE, ".").replace(f".{NAME}.", ".")


def _wrong(config: Config, message: str, remedy: str) -> ConfigError:
    """An error about the section."""
    return ConfigError([config.error(("dsframe", "adapter"), message, remedy, code="model")])


def _library(config: Config) -> Any:
    try:
        import peft
    except ImportError:
        remedy = "pip install 'dsframe[adapters]'"
        raise _wrong(config, "needs the library peft, which is not installed", remedy) from None
    return peft


def _bitsandbytes(config: Config) -> Any:
    try:
        import bitsandbytes
    except ImportError:
        remedy = "pip install 'dsframe[quantized]'"
        raise _wrong(config, "base_format needs the library bitsandbytes, which is not installed", remedy) from None
    return bitsandbytes


def _kind(model: nn.Module) -> str | None:
    """peft's name for what the model does, which says as what class others load the adapter."""
    name = type(model).__name__
    kinds = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
    return next((kind for ending, kind in kinds.items() if name.endswith(ending)), None)


def _check_modules(config: Config, model: nn.Module, settings: Any) -> None:
    """Raises ConfigError for a module that is not there: peft says nothing where another one of the list is."""
    named = [name for name, _ in model.named_modules() if name]
    if settings.target_modules == "all-linear" and not hasattr(model, "get_output_embeddings"):
        # peft knows only the layers of transformers' models.
        settings.target_modules = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    known = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)})
    for key in ("target_modules", "modules_to_save"):
        wanted = getattr(settings, key) or ()
        for name_wanted in () if isinstance(wanted, str) else wanted:
            if not any(name == name_wanted or name.endswith(f".{name_wanted}") for name in named):
                near = closest(name_wanted, {*named, *(name.rpartition(".")[2] for name in named)})
                hint = f'write "{near}"' if near else f"linear layers of this model are {', '.join(known)}"
                raise _wrong(config, f'{key}: the model has no module "{name_wanted}"', hint)


def _read(config: Config, peft: Any, folder: Path) -> Any:
    try:
        settings = peft.PeftConfig.from_pretrained(str(folder)) if (folder / _SETTINGS).is_file() else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _wrong(config, f"{folder / _SETTINGS} cannot be read: {error}", _BY_PEFT) from None
    if settings is None or not (folder / _FILE).is_file():
        raise _wrong(config, f"{folder} has no {_SETTINGS} and {_FILE}", _BY_PEFT)
    if settings.peft_type != "LORA":
        raise _wrong(config, f"{folder} is an adapter of type {settings.peft_type}", "give one of type LORA")
    settings.inference_mode = False
    return settings


def _load(config: Config, model: nn.Module, folder: Path) -> None:
    """The saved values. Raises ConfigError where names or shapes are others."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        saved = load_file(folder / _FILE)
    except (OSError, SafetensorError) as error:
        raise _wrong(config, f"{folder / _FILE} cannot be read: {error}", _BY_PEFT) from None
    parameters = {
        _PREFIX + peft_name(name): parameter for name, parameter in model.named_parameters() if is_adapters(name)
    }
    differing = sorted(parameters.keys() ^ saved.keys()) or [
        name for name, parameter in parameters.items() if parameter.shape != saved[name].shape
    ]
    if differing:
        message = f"{folder} is an adapter of another model: {differing[0]} differs"
        raise _wrong(config, message, "give the model that it was trained for")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if not parameter.is_meta:
                parameter.copy_(saved[name])


def _digest(parameter: Tensor) -> str:
    state = xxhash.xxh3_128()
    for piece in _pieces(parameter.detach()):
        state.update(piece.to("cpu", torch.float32).contiguous().view(torch.uint8).numpy().data)
    return f"{list(parameter.shape)} {state.hexdigest()}"


def _pieces(tensor: Tensor, elements: int = 1 << 22) -> Iterator[Tensor]:
    yield from torch.split(tensor.reshape(-1), elements)


def _combined(digests: Mapping[str, str]) -> str:
    lines = (f"{_without_wrappers(name)} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _without_wrappers(name: str) -> str:
    """The name in the model without an adapter: which layers have one does not make another base."""
    return re.sub(r"\.(base_layer|original_module)\.", ".", name)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(getattr(value, "value", value))
