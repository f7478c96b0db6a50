"""The only module that imports Hugging Face transformers: configurations, models and tokenizers, from the file or a
local folder.

Uses no network: during a run the library is offline, and every call requests only local files (``hub:NAME``: hub.py).
Never runs code from a folder (``trust_remote_code=False``), and reads weights from safetensors, never from pickles.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dsframe.data import _torchvision
from dsframe.errors import TaskError
from dsframe.host.restored import at_end
from dsframe.tasks import hub
from dsframe.text import Json, Say, one_line
from dsframe.user_class import close_match

MAPPINGS = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}
"""Class that builds a model, and the mapping of the configurations that it accepts."""

_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Transformers' variable that makes it read weights one by one."""
_TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "special_tokens*", "added_tokens*"),
    *("chat_template*", "*.jinja", "additional_chat_templates/*"),
    *("tekken.json", "normalizer.json", "*.codes", "*.vocab", "dict*", "sentencepiece*"),
)


@cache
def transformers() -> Any:
    """Returns the package, offline and silent until the run ends. Raises TaskError if it cannot be imported."""
    if importlib.util.find_spec("transformers") is None:
        raise TaskError('transformers is not installed; pip install "dsframe[transformers]"')
    if importlib.util.find_spec("torchvision"):
        _torchvision.torchvision()  # transformers imports it, which needs help with a CPU torch
    try:
        package = importlib.import_module("transformers")
        _silence(package.utils.logging, importlib.import_module("huggingface_hub.constants"))
    except (ImportError, RuntimeError) as error:
        raise TaskError(f"cannot import transformers with torch {torch.__version__}: {error}") from error
    at_end(transformers.cache_clear)  # the next run silences it again
    return package


def _silence(logs: Any, hub_constants: Any) -> None:
    """Disables network, warnings and progress bars. Does not use HF_HUB_OFFLINE, because packages that read it on
    import would stay offline."""
    at_end(_restore_offline, hub_constants, hub_constants.HF_HUB_OFFLINE, "datasets.config" in sys.modules)
    at_end(logs.set_verbosity, logs.get_verbosity())
    if logs.is_progress_bar_enabled():
        at_end(logs.enable_progress_bar)
    hub_constants.HF_HUB_OFFLINE = True
    logs.set_verbosity_error()
    logs.disable_progress_bar()


def _restore_offline(hub_constants: Any, offline: bool, had_datasets: bool) -> None:
    hub_constants.HF_HUB_OFFLINE = offline
    datasets = sys.modules.get("datasets.config")
    if datasets and not had_datasets and "HF_DATASETS_OFFLINE" not in os.environ:  # it has copied the hub's setting
        datasets.HF_HUB_OFFLINE = datasets.HF_DATASETS_OFFLINE = offline  # type: ignore[attr-defined]


def configure(auto: str, model: Json | str, facts: Json) -> Any:
    """Returns the configuration of a model for the class ``auto`` (a key of MAPPINGS). ``model``: settings with
    ``model_type``, or a local folder. ``facts``: sizes known from the data, used where the configuration has them and
    the settings do not. Raises TaskError."""
    config = _from_folder(model) if isinstance(model, str) else _from_settings(model, facts)
    mapping = getattr(transformers(), MAPPINGS[auto])
    if type(config) not in mapping:
        raise TaskError(f'model_type "{config.model_type}": transformers has no {auto} for it')
    if auto == "AutoModelForCausalLM" and _is_bidirectional(config):
        remedy = '; write "is_decoder": true into its configuration' * hasattr(config, "is_decoder")
        raise TaskError(
            f'task.model: in model_type "{config.model_type}" tokens see those behind them, their targets{remedy}'
        )
    several = mapping[type(config)]  # of some there are two
    names = [cls.__name__ for cls in (several if isinstance(several, tuple) else (several,))]
    config.architectures = [next((name for name in config.architectures or () if name in names), names[0])]
    return config


def _is_bidirectional(config: Any) -> bool:
    """Returns True for encoders, which transformers accepts as language models."""
    masked = type(config) in transformers().MODEL_FOR_MASKED_LM_MAPPING
    encoder = masked or config.model_type in ("bert-generation", "cpmant", "xlnet")
    return encoder and not any(getattr(config, name, False) for name in ("is_decoder", "is_encoder_decoder", "causal"))


def _from_settings(model: Json, facts: Json) -> Any:
    settings = dict(model)
    model_type = settings.pop("model_type", None)
    known = transformers().models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if not isinstance(model_type, str) or model_type not in known:
        what = (
            f'model_type "{model_type}": not known to transformers {transformers().__version__}'
            if model_type
            else "no model_type"
        )
        raise TaskError(
            f"task.model: {what}{close_match(str(model_type), known) or '; such as llama, qwen3, gpt2, vit'}"
        )
    defaults = transformers().AutoConfig.for_model(model_type)
    strange = [name for name in settings if not hasattr(defaults, name)]
    if strange:
        name = type(defaults).__name__
        raise TaskError(f"task.model.{strange[0]}: no setting of {name}{close_match(strange[0], vars(defaults))}")
    settings = {name: value for name, value in facts.items() if hasattr(defaults, name)} | settings
    try:
        return transformers().AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # their validators raise unrelated exceptions
        raise TaskError(f"task.model: {one_line(error)}") from error


def folder(path: str, what: str = "a model") -> Path:
    """Returns an existing local folder, or a hub model's. Raises TaskError, also if reading it would block."""
    if path.startswith(hub.HUB):
        return hub.snapshot(path)
    local = Path(path).expanduser()
    if not local.is_dir():
        raise TaskError(f"task: {path} is not a local folder with {what}; of the Hugging Face hub: hub:{path}")
    if odd := [entry.name for entry in local.iterdir() if not entry.is_file() and not entry.is_dir()]:
        raise TaskError(f"task: {local / odd[0]} is neither a file nor a folder (a pipe, a broken link?); remove it")
    return local


def origin(model: Any) -> list[str] | None:
    """Returns name and commit of a hub model for the manifest; None for other models."""
    of_hub = hub.origin(str(folder(model))) if isinstance(model, str) else None
    return list(of_hub) if of_hub else None


def _from_folder(path: str) -> Any:
    model_folder = folder(path)
    if not (model_folder / "config.json").is_file():
        raise TaskError(f"task.model: {model_folder} has no config.json; name the folder that save_pretrained wrote")
    if (model_folder / "adapter_config.json").is_file():  # transformers would add it and freeze the rest
        raise TaskError(
            f'task.model: {model_folder} has an adapter next to the model; move it into a folder of its own, for "adapter.folder"'
        )
    try:
        config = transformers().AutoConfig.from_pretrained(model_folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise TaskError(f"task.model: {model_folder / 'config.json'}: {_reason(model_folder, error)}") from error
    if getattr(config, "quantization_config", None):
        raise TaskError(
            f"task.model: the weights of {model_folder} are quantised (quantization_config); name a folder with those of 16 or 32 "
            'bits, and "adapter.base_format" for 4 bits in the training'
        )
    return config


def build(
    auto: str, config: Any, weights: str | None, dtype: torch.dtype = torch.float32, say: Say = lambda line: None
) -> nn.Module:
    """Returns a model in fp32 and training mode, with new weights or those of a local folder. ``say`` is told which of
    the folder's the model does not have, as transformers would print.

    New weights, including a new output layer, are drawn from torch's global generator. A folder's weights are read one
    tensor at a time; on the device "meta" none are read. A language model whose files all have the 16-bit ``dtype``
    keeps it. Raises TaskError.
    """
    cls = getattr(transformers(), auto)
    config = copy.deepcopy(config)
    config.use_cache = False  # the key-value cache is for generation only
    planned = torch.empty(0).device.type == "meta"  # only sizes are needed, and transformers loads nothing there
    if weights is None or planned:
        return _with_supported_experts(cls.from_config(config, dtype=torch.float32, trust_remote_code=False))
    weights_folder = folder(weights)
    stored = _stored_dtypes(weights_folder)
    short = auto == "AutoModelForCausalLM" and stored == {dtype}
    model, loading_report = _from_files(cls, weights_folder, config, dtype if short else torch.float32)
    if short and any(buffer.dtype == dtype for buffer in model.buffers()):  # buffers are to be computed in fp32
        model, loading_report = _from_files(cls, weights_folder, config, torch.float32)
    new = {str(name) for name in loading_report["missing_keys"]} | {
        str(entry[0]) for entry in loading_report["mismatched_keys"]
    }
    parameters = {} if auto == "AutoModelForCausalLM" else dict(model.named_parameters())
    classes = config.num_labels
    wrong = sorted(name for name in new if name not in parameters or parameters[name].shape[0] != classes)
    if wrong:  # a classifier may have a new output layer
        raise TaskError(f"task.model: {weights} has no weights, or of another shape, for {', '.join(wrong[:3])}")
    if unread := sorted(map(str, loading_report["unexpected_keys"])):
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        say(f"note: task.model: {weights} has weights that this model does not have: {', '.join(unread[:3])}{more}")
    return _with_supported_experts(model.train())  # from_pretrained returns it in evaluation mode


def resize(model: Any, vocabulary: int) -> None:
    """Extends embeddings and output layer by rows drawn around the mean of the others, as transformers does."""
    planned = next(model.parameters()).device.type == "meta"
    model.resize_token_embeddings(vocabulary, mean_resizing=not planned)


def _with_supported_experts(model: Any) -> nn.Module:
    """Returns the model, without stacked experts if torch's grouped product does not support their row size: it needs
    multiples of 16 bytes, and raises in the first step."""
    stacked = [parameter for name, parameter in model.named_parameters() if ".experts." in name and parameter.ndim == 3]
    if any(size % 8 for parameter in stacked for size in parameter.shape[1:]):
        model.set_experts_implementation("eager")
    return model  # type: ignore[no-any-return]


def _stored_dtypes(model_folder: Path) -> set[torch.dtype]:
    """Returns the dtypes of a folder's weights. Raises TaskError if weights are missing, truncated or pickled."""
    files = sorted(model_folder.glob("*.safetensors"))
    if not files:
        pickled = next(
            (file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in model_folder.glob(pattern)), None
        )
        why = (
            f"{pickled} is pickled, a format that can contain code; if you know who wrote it, convert it once: load it with "
            "transformers' from_pretrained, and save_pretrained into another folder"
            if pickled
            else "there is no .safetensors file"
        )
        raise TaskError(f"task.model: {model_folder}: {why}")
    index = model_folder / "model.safetensors.index.json"
    weight_map = _read_json(index).get("weight_map")
    known_files = [file.name for file in files]
    named = weight_map.values() if isinstance(weight_map, dict) else ()
    if strange := [name for name in named if name not in known_files]:
        raise TaskError(f"task.model: {index} names {strange[0]!r}, and there is no such file next to it")
    dtypes = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                dtypes |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise TaskError(
                f"task.model: {file}: {one_line(error)}; the file is truncated or damaged: copy it again"
            ) from error
    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return {known.get(stored_name, torch.float32) for stored_name in dtypes}


def _from_files(cls: Any, model_folder: Path, config: Any, dtype: torch.dtype | str) -> tuple[Any, Json]:
    """Returns the model and transformers' loading report. Raises TaskError."""
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"  # else its threads read ahead, up to the whole model
    try:
        return cls.from_pretrained(  # type: ignore[no-any-return]
            model_folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # as above
        raise TaskError(f"task.model: {model_folder}: {one_line(error)}") from error
    finally:
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before


def write(config: Json, weights: Mapping[str, Tensor], dtype: str, out: Path, shard_size: str) -> None:
    """Writes a model like ``save_pretrained``, whose names and tied weights may differ from the model's in memory.
    ``config``: of the model, with its class. ``weights``: its full state_dict, of ``dtype``; the model itself needs no
    memory. Raises TaskError if transformers has no such model, or if the weights do not fit."""
    cls, read, what = _classes(config)
    if cls is None:
        raise TaskError(f"transformers {transformers().__version__} has no {what}")
    name = cls.__name__
    try:
        model = _empty(cls, read({**config, "dtype": dtype}))
        ties = model.all_tied_weights_keys.items()
        if any(
            not torch.equal(weights[copy], weights[source]) for copy, source in ties if {copy, source} <= weights.keys()
        ):
            model = _empty(cls, _untied(read({**config, "dtype": dtype})))
    except Exception as error:  # as above: also for a configuration unknown to this version
        raise TaskError(f"transformers cannot build {name}: {one_line(error)}") from error
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise TaskError(f"the checkpoint's weights are not those of {name}: {one_line(error)}") from error
    model.tie_weights()
    model.save_pretrained(out, max_shard_size=shard_size)


def parameter_names(config: Json) -> set[str]:
    """Returns all names of a model's parameters; empty if transformers does not have its class."""
    cls, read, _ = _classes(config)
    return set(dict(_empty(cls, read(config)).named_parameters(remove_duplicate=False))) if cls else set()


def _classes(config: Any) -> tuple[Any, Callable[[Json], Any], str]:
    """Returns the class of a configuration's model (None if transformers has none), a function that reads the
    configuration, and a description of both."""
    of_dict = config if isinstance(config, Mapping) else {}
    model_type, names = str(of_dict.get("model_type")), of_dict.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    cls = getattr(transformers(), name, None)
    known = transformers().models.auto.configuration_auto.CONFIG_MAPPING
    theirs = isinstance(cls, type) and issubclass(cls, transformers().PreTrainedModel) and model_type in known
    read = known[model_type].from_dict if theirs else dict
    return cls if theirs else None, read, f"model {name!r} of model_type {model_type!r}"


def _empty(cls: Any, config: Any) -> Any:
    with torch.device("meta"):
        return cls(config)


def _untied(config: Any) -> Any:
    """Returns the configuration with separate input and output embeddings."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.tie_word_embeddings = False
    return config


def load(path: Path) -> nn.Module:
    """Loads the model of an exported folder as its users would, with its own class."""
    config = transformers().AutoConfig.from_pretrained(path, local_files_only=True)
    cls = getattr(transformers(), config.architectures[0])
    return _from_files(cls, path, None, "auto")[0]  # type: ignore[no-any-return]


def generation_config(path: str) -> str | None:
    """Returns the text of a model folder's generation_config.json; None if there is none."""
    settings = _read_json(folder(path) / "generation_config.json")
    return json.dumps(settings, indent=2) if settings else None


def preprocessor(path: str) -> Json:
    """Returns a model folder's preprocessor_config.json; empty if there is none."""
    return _read_json(folder(path) / "preprocessor_config.json")


def _read_json(file: Path) -> Json:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def loss(name: str) -> Callable[..., Tensor]:
    """Returns transformers' own loss called ``name``: ``ForCausalLM``, ``ForImageClassification``."""
    transformers()
    loss_function: Callable[..., Tensor] = importlib.import_module("transformers.loss.loss_utils").LOSS_MAPPING[name]
    return loss_function


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Registers ``function`` as an attention that models can select by ``name``; it gets no mask."""
    transformers()
    importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.register(name, function)


def tokenizer(path: str | None, model: Json | str) -> tuple[Any, str] | None:
    """Returns the tokenizer of folder ``path``, by default of the model's folder, and a digest of its files; None if
    there is none. Raises TaskError if the named folder has none."""
    tokenizer_folder = None
    if path:
        tokenizer_folder = folder(path, "a tokenizer")
    elif isinstance(model, str):
        tokenizer_folder = folder(model)
    files = (
        sorted({file for pattern in _TOKENIZER_FILES for file in tokenizer_folder.glob(pattern)})
        if tokenizer_folder
        else []
    )
    if not files:
        if path:
            raise TaskError(f"task.tokenizer: {path} has no tokenizer.json; without a tokenizer a token is a byte")
        return None
    try:
        loaded = transformers().AutoTokenizer.from_pretrained(
            tokenizer_folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # as above
        raise TaskError(f"task.tokenizer: {tokenizer_folder}: {_reason(tokenizer_folder, error)}") from error
    if drawn := getattr(getattr(getattr(loaded, "backend_tokenizer", None), "model", None), "dropout", None):
        raise TaskError(
            f"task.tokenizer: {tokenizer_folder} draws tokens by chance (BPE dropout {drawn:g}): each start would train on "
            'others; write "dropout": null into its tokenizer.json'
        )
    config = _read_json(tokenizer_folder / "config.json")  # type: ignore[operator]  # there are files in it
    digest = hashlib.sha256(repr([config.get(key) for key in ("model_type", "tokenizer_class")]).encode())
    for file in files:
        if file.is_file():
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return loaded, digest.hexdigest()


def _reason(model_folder: Path | None, error: Exception) -> str:
    """Returns why a folder cannot be read. Transformers' own message would suggest to run its code."""
    assert model_folder is not None
    if any(_read_json(model_folder / name).get("auto_map") for name in ("config.json", "tokenizer_config.json")):
        return 'it needs code that lies in the folder ("auto_map"), which dsframe does not run; write a task whose model() does'
    return one_line(error)
