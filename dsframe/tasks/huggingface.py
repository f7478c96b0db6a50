"""Trains models of Hugging Face transformers: language models and image classifiers. Parameters keep transformers'
names, so a checkpoint has the weights of ``save_pretrained``."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsframe.data import encoders, text
from dsframe.data.packed import IGNORED
from dsframe.errors import DataError, TaskError
from dsframe.tasks import _transformers, decoder, experts, partitions, shared_sequences
from dsframe.tasks.layers import Layer
from dsframe.tasks.task import Attention, Sum, Sums, Task, accuracy
from dsframe.tasks.vision import ImagesTask
from dsframe.text import Json, Say

if TYPE_CHECKING:
    from dsframe.config.schema import settings as sections

_BYTES = 256
"""Vocabulary size without a tokenizer; documents from files have one more token, the end."""


class CausalLanguageModelTask(Task):
    """Predicts next tokens, with transformers' loss. Reports loss (nats per token), bits per token, accuracy."""

    unit = "tokens"

    def __init__(self, settings: sections.CausalLanguageModelTask, seed: int) -> None:
        """Raises TaskError if there is no such model, or if it does not fit the tokenizer or the context."""
        self.settings, self.seed = settings, seed
        loaded = _transformers.tokenizer(settings.tokenizer, settings.model)
        self.tokenizer: Any = loaded[0] if loaded else None
        self._digest = loaded[1] if loaded else ""
        facts = {"vocab_size": len(self.tokenizer) if self.tokenizer is not None else _BYTES}
        if settings.data is not None and self.tokenizer is None:
            facts = {"vocab_size": _BYTES + 1, "eos_token_id": encoders.END_OF_BYTES}
        vocabulary = facts["vocab_size"]
        self.pretrained_config = _transformers.configure("AutoModelForCausalLM", settings.model, facts)
        self._check_sizes(vocabulary)
        self._criterion = _transformers.loss("ForCausalLM")
        self.units_per_sample = settings.context
        self.hidden_size = getattr(self.pretrained_config, "hidden_size", None)
        self.partition_config = partitions.BY_MODEL_TYPE.get(self.pretrained_config.model_type)
        self._balances = bool(getattr(self.pretrained_config, "output_router_logits", False))
        if self._balances:
            self.over_micro_batches = "the balance of a mixture's experts"
        self._mask: Tensor | None = None
        self._positions: Tensor | None = None
        self._sequences: shared_sequences.Sequences | None = None
        self._sources: tuple[text.TextSource, text.TextSource] | None = None

    def _check_sizes(self, vocabulary: int) -> None:
        config, context = self.pretrained_config, self.settings.context
        self._stored_config = config
        if config.vocab_size < vocabulary and self.settings.resize_embeddings and isinstance(self.settings.model, str):
            self.pretrained_config = copy.deepcopy(config)
            self.pretrained_config.vocab_size = vocabulary
        elif config.vocab_size < vocabulary:
            what = "the tokenizer has" if self.tokenizer is not None else "without a tokenizer there are"
            message = f"task.model: vocab_size {config.vocab_size} is too small: {what} {vocabulary} tokens"
            raise TaskError(message + '; write "resize_embeddings": true' * isinstance(self.settings.model, str))
        limit = getattr(config, "max_position_embeddings", None)
        if isinstance(limit, int) and 0 < limit < context:
            raise TaskError(f"task.context: {context} tokens, but the model's max_position_embeddings is {limit}")

    def model(self) -> nn.Module:
        weights = self.settings.model if isinstance(self.settings.model, str) else None
        say = functools.partial(_say, self)
        model = _transformers.build("AutoModelForCausalLM", self._stored_config, weights, self.context.dtype, say)
        if self.pretrained_config is not self._stored_config:
            _transformers.resize(model, self.pretrained_config.vocab_size)
        if self._balances:
            model.register_forward_pre_hook(self._note_padding, with_kwargs=True)
        return model

    def _note_padding(self, model: nn.Module, inputs: Any, named: Mapping[str, Any]) -> None:
        """Remembers the inputs that show padding, because the loss does not get the inputs."""
        self._mask, self._positions = named.get("attention_mask"), named.get("position_ids")

    def _routed(self, targets: Tensor) -> Tensor | None:
        """Returns which tokens are not padding. After packed documents, positions are 0 without a target."""
        positions = self._positions
        if self._mask is None and positions is not None:
            return (targets != IGNORED) | (positions > 0) | (positions.roll(-1, 1) == 1)
        return self._mask

    def example(self) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(1, self.settings.context, dtype=torch.int64, device="meta")
        return tokens, tokens

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        loss = self._cross_entropy(logits_of(outputs), targets)
        routed = getattr(outputs, "router_logits", None)
        if not routed or not torch.is_grad_enabled():  # evaluations report only the language model's loss
            return loss
        config = self.pretrained_config
        weight = self.loss_weight(targets)
        balance, loads = experts.balance(
            routed, config.num_experts_per_tok, self._routed(targets), weight, self.context.ranks
        )
        return loss + config.router_aux_loss_coef * balance, loads

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._criterion(
            logits=logits, labels=None, vocab_size=logits.shape[-1], shift_labels=targets.contiguous()
        )

    def metrics(self, outputs: Any, targets: Tensor) -> Sums:
        total = self._cross_entropy(logits_of(outputs), targets) * targets.numel()
        return {
            "loss": Sum(total, targets.numel()),
            "bits_per_token": Sum(total / math.log(2), targets.numel()),
            "accuracy": right_tokens(logits_of(outputs), targets),
        }

    def cut(self, model: nn.Module) -> Sequence[Layer] | None:
        """Raises TaskError if the model is not a chain of its layers."""
        decoder.refuse_other_models(small(self.pretrained_config))
        return decoder.cut(model)

    def share_sequences(
        self, model: nn.Module, part: int, parts: int, exchange: Callable[[Attention], Attention]
    ) -> None:
        shared_sequences.refuse_unshareable(small(self.pretrained_config), parts)
        self._sequences = shared_sequences.Sequences(model, parts, exchange)

    def before_slicing(self, inputs: Any) -> Any:
        return inputs if self._sequences is None else self._sequences.see(inputs)

    def pretrained(self) -> Json:
        tokenizer, model, files = self.settings.tokenizer, self.settings.model, self.settings.data
        folder = tokenizer or model if self.tokenizer is not None else None
        config, generation = json.loads(self.pretrained_config.to_json_string()), None
        if isinstance(model, str):
            generation = _transformers.generation_config(model)
        if self.tokenizer is not None and not self._knows_tokens:
            # With another tokenizer, the model has learned that one's special tokens.
            ids = {name: getattr(self.tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
            config |= ids
            generation = json.dumps(json.loads(generation or "{}") | ids)
        elif self.unknown_end is not None:
            ends = {"eos_token_id": [*_ends(config, generation), self.unknown_end]}
            generation = json.dumps(json.loads(generation or "{}") | ends)
        return {
            "config": json.dumps(config),
            "tokenizer": str(_transformers.folder(str(folder)).resolve()) if folder else None,
            "tokenizer_sha256": self._digest,
            "origin": _transformers.origin(model),
            "chat_template": encoders.template_of(files.chat_template) if files and files.chat_template else None,
            "generation_config": generation,
        }

    @functools.cached_property
    def _knows_tokens(self) -> bool:
        """True if the tokenizer is from the model's folder, or has all its tokens and more."""
        if not self.settings.tokenizer:
            return True
        theirs = _transformers.tokenizer(None, self.settings.model)
        return theirs is not None and theirs[0].get_vocab().items() <= self.tokenizer.get_vocab().items()

    @property
    def unknown_end(self) -> int | None:
        """The tokenizer's end token, which training appends, if the model's folder declares others; else None."""
        if self.tokenizer is None or not self._knows_tokens or not isinstance(self.settings.model, str):
            return None
        end, generation = self.tokenizer.eos_token_id, _transformers.generation_config(self.settings.model)
        return None if end in _ends(self.pretrained_config.to_dict(), generation) else end

    def train_data(self) -> text.TextSource:
        return self._data()[0]

    def eval_data(self) -> text.TextSource:
        return self._data()[1]

    def _data(self) -> tuple[text.TextSource, text.TextSource]:
        if self._sources is None:
            s = self.settings
            encode = self._encode if self.tokenizer is not None else None
            self._sources = text.sources(s.corpus, s.context, s.samples, self.seed, encode)
        return self._sources

    def _encode(self, content: Tensor) -> Tensor:
        try:  # some editors write a byte order mark
            decoded = str(content.numpy().data, "utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8 ({error.reason} after byte {error.start})") from None
        if "\0" in decoded:
            raise DataError("has NUL characters, so it is not UTF-8 text; convert it, from UTF-16 perhaps")
        return torch.tensor(self.tokenizer(decoded, add_special_tokens=False)["input_ids"], dtype=torch.int32)


def _say(task: Task, line: str) -> None:
    """Prints a line on rank 0, unless the run is quiet."""
    if task.context.rank == 0 and not task.context.quiet:
        print(f"dsframe: {line}", file=sys.stderr, flush=True)


def _ends(config: Json, generation: str | None) -> list[int]:
    """Returns the tokens at which generation ends, according to the model's folder."""
    ends = json.loads(generation or "{}").get("eos_token_id", config.get("eos_token_id"))
    return [] if ends is None else list(ends) if isinstance(ends, list) else [ends]


def logits_of(outputs: Any) -> Tensor:
    """Returns the logits of a model, or of its last pipeline stage, whose output has only these."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits


def right_tokens(logits: Tensor, targets: Tensor) -> Sum:
    """Returns how many of the targets that count have the largest logit."""
    counted = targets != IGNORED
    return accuracy(logits[counted], targets[counted])


def small(config: Any) -> Any:
    """Returns a copy of the configuration with one layer of each type, and small vocabulary and MLP."""
    small_config = copy.deepcopy(config)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or [])) or None
    changes = {"vocab_size": 64, "intermediate_size": 32, "pad_token_id": None, "layer_types": kinds}
    for name, value in {"num_hidden_layers": len(kinds or [0]), **changes}.items():
        if getattr(small_config, name, None) is not None:
            with contextlib.suppress(AttributeError):  # derived from another setting
                setattr(small_config, name, value)
    return small_config


def _image_size(look: Json) -> int | None:
    """Returns the height in pixels that a preprocessor_config.json resizes images to; None if it has none."""
    size = look.get("crop_size") if look.get("do_center_crop") else look.get("size")
    if isinstance(size, Mapping):
        size = size.get("height") or size.get("shortest_edge")
    return size if isinstance(size, int) and size > 0 else None


def _normalisation(look: Json) -> Sequence[tuple[float, ...]]:
    """Returns the mean and standard deviation of each channel from a preprocessor_config.json; empty if it has none."""
    if look.get("do_normalize") is False:
        return (0.0,) * 3, (1.0,) * 3
    values = [look.get(key) for key in ("image_mean", "image_std")]
    return [(value,) * 3 if isinstance(value, (int, float)) else tuple(value or ()) for value in values]


_PLAIN = ("ViT", "DeiT", "CLIP", "Beit", "Siglip", "Bit", "MobileNetV1", "MobileNetV2", "Pvt")
"""Image processors of transformers that resize to ``size`` and nothing else."""


def _resized(look: Json, size: int) -> int | tuple[int, int] | None:
    """Returns the pixels to which a preprocessor_config.json resizes images, before their centre of ``size`` is taken: of the
    shorter side, or height and width; None if it does it in another way."""
    name, given = str(look.get("image_processor_type")).partition("ImageProcessor")[0], look.get("size")
    if not isinstance(given, Mapping) or not look.get("do_resize", True):
        return None
    shortest: Any = given.get("shortest_edge")
    both: Any = given.get("height"), given.get("width")
    if name == "ConvNext" and shortest == size:
        part = look.get("crop_pct")
        return (size, size) if size >= 384 else int(size / (part if isinstance(part, float) else 224 / 256))
    if not look.get("do_center_crop"):
        return (size, size) if name in _PLAIN and both == (size, size) else None
    resized = both if shortest is None else (shortest,)
    fits = name in _PLAIN and all(isinstance(side, int) and side >= size for side in resized)
    crops = look.get("crop_size") == {"height": size, "width": size}
    return (both if shortest is None else shortest) if fits and crops else None


_ELSEWHERE = ("do_flip_channel_order", "include_top", "rescale_offset", "do_pad", "do_thumbnail")
"""Steps of some image processors in transformers that training here does not do: channels in the order blue, green,
red; a second division; values from -1 on; borders."""


class ImageClassificationTask(ImagesTask):
    """Classifies images, with transformers' own loss. Reports loss and accuracy."""

    def __init__(self, settings: sections.ImageClassificationTask, seed: int) -> None:
        """Raises TaskError if there is no such model or if it does not accept the images."""
        super().__init__(settings, seed)
        self.images = replace(self.images, floored=True)  # as the processor of an export crops
        self._preprocessor = _transformers.preprocessor(settings.model) if isinstance(settings.model, str) else {}
        if settings.dataset == "image-folder" and settings.image_size is None:  # files have no fixed size
            self.images = replace(self.images, size=_image_size(self._preprocessor) or self.images.size)
        if resized := _resized(self._preprocessor, self.images.size):
            resample: Any = self._preprocessor.get("resample")
            self.images = replace(self.images, resized=resized, resample=resample if resample in (*range(6),) else 2)
        facts = {
            "num_labels": self.images.classes,
            "num_channels": self.images.channels,
            "image_size": self.images.size,
        }
        config = _transformers.configure("AutoModelForImageClassification", settings.model, facts)
        known = {
            unicodedata.normalize("NFC", name): number
            for name, number in (getattr(config, "label2id", None) or {}).items()
        }
        unlike = len(known) == self.images.classes and "LABEL_0" not in known and set(known) != set(self.images.names)
        self._other_names = sorted(known) if unlike and self.images.names else []
        """Classes of the model's folder, if its output layer is used for as many classes of other names."""
        config.num_labels, config.problem_type = self.images.classes, "single_label_classification"
        if names := self.images.names:
            if set(known) == set(names):  # keep the numbers of a model with the same classes
                names = tuple(sorted(names, key=lambda name: int(known[name])))
                self.images = replace(self.images, names=names)
            config.id2label = dict(enumerate(names))
            config.label2id = {name: number for number, name in enumerate(names)}
        mean, std = _normalisation(self._preprocessor)
        if self.images.channels == 3 and mean and std:
            self.images = replace(self.images, mean=mean, std=std)
        self.pretrained_config = config
        self.class_names = self.images.names
        self.hidden_size = getattr(config, "hidden_size", None)
        self._criterion = _transformers.loss("ForImageClassification")
        self._probe()

    def _probe(self) -> None:
        with torch.device("meta"):
            model = _transformers.build("AutoModelForImageClassification", self.pretrained_config, None)
        self.batch_dependent = self.images.tried(model, "task.model:")

    def _unsupported_steps(self) -> list[str]:
        """Returns the steps of the folder's own processor that training does not do."""
        other = [name for name in _ELSEWHERE if self._preprocessor.get(name)]
        scaled = (
            self._preprocessor.get("do_rescale", True)
            and abs(self._preprocessor.get("rescale_factor", 1 / 255) * 255 - 1) < 0.01
        )
        if self.settings.dataset == "image-folder" and self.images.resized is None:
            other += ["size"] * (_image_size(self._preprocessor) == self.images.size)
        return other if scaled else [*other, "rescale_factor"]

    @property
    def prepares(self) -> bool:
        return super().prepares or bool(self._unsupported_steps())

    def prepare(self, say: Say) -> None:
        if super().prepares:
            super().prepare(say)
        if self._other_names:
            say(
                f"task.model: the folder's classes are {', '.join(self._other_names)[:200]}, those of the data "
                f"{', '.join(self.images.names)[:200]}: as many, so the training begins with the folder's output layer"
            )
        if self.images.channels == 3 and (unlike := self._unsupported_steps()):
            say(
                f"task.model: the folder's preprocessor_config.json has {', '.join(unlike)}, which the training does not do: "
                "the folder's model expects images preprocessed in another way; an export has the preprocessing of the training"
            )

    def model(self) -> nn.Module:
        weights = self.settings.model if isinstance(self.settings.model, str) else None
        say = functools.partial(_say, self)
        return _transformers.build("AutoModelForImageClassification", self.pretrained_config, weights, say=say)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._criterion(labels=targets, pooled_logits=outputs.logits, config=self.pretrained_config)

    def metrics(self, outputs: Any, targets: Tensor) -> Sums:
        total = self.loss(outputs, targets) * len(targets)
        return {"loss": Sum(total, len(targets)), "accuracy": accuracy(outputs.logits, targets)}

    def pretrained(self) -> Json:
        facts = self.images
        sides = {"height": facts.size, "width": facts.size}
        look = {  # without the folder's other keys, which change the result of other processors
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": sides,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(facts.mean),
            "image_std": list(facts.std),
        }
        if self.settings.dataset == "image-folder":  # as in evaluations by dsframe.data.folder
            resized = facts.resized or round(facts.size * 8 / 7)
            both = dict(zip(sides, resized, strict=True)) if isinstance(resized, tuple) else {"shortest_edge": resized}
            look |= {"size": both, "resample": facts.resample, "do_center_crop": True, "crop_size": sides}
        return {
            "config": self.pretrained_config.to_json_string(),
            "tokenizer": None,
            "tokenizer_sha256": "",
            "origin": _transformers.origin(self.settings.model),
            "preprocessor_config": json.dumps(look, indent=2) if facts.channels == 3 else None,
        }
