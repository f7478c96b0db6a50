"""Trains transformers language models on documents and conversations from files: the ``data`` section."""

from __future__ import annotations

import math
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from dsframe.data import documents, encoders, tokenised
from dsframe.data.packed import IGNORED, RowSource
from dsframe.data.text import TextSource
from dsframe.data.tokenised import Recipe, Tokenised
from dsframe.errors import DataError, TaskError
from dsframe.tasks import _transformers
from dsframe.tasks.huggingface import CausalLanguageModelTask, logits_of, right_tokens, small
from dsframe.tasks.task import Sum, Sums
from dsframe.text import Say, reason

if TYPE_CHECKING:
    from dsframe.config.schema import settings as sections


_SHOWN = 3
"""Rows whose targets are shown at the start."""


class WindowsTask(CausalLanguageModelTask):
    """Joins all documents; every token is a target."""

    packing = "concatenate"

    def __init__(self, settings: sections.CausalLanguageModelTask, seed: int) -> None:
        """Raises TaskError or DataError if the section contradicts itself, the tokenizer or the model."""
        super().__init__(settings, seed)
        assert settings.data is not None
        self._files = settings.data
        self.data_dir = settings.data_dir
        self.prepared_as = "-" + xxh3_64_hexdigest(settings.model_dump_json().encode())
        if "corpus" in settings.model_fields_set:
            raise TaskError('task: "corpus" and "data" both name the text; remove one of them')
        if settings.data.format == "conversations" and self.packing == "concatenate":
            raise TaskError(
                'task.data.packing: "concatenate" joins texts; write "rows" or "documents" for conversations'
            )
        if settings.data.format == "conversations" and self.tokenizer is None:
            raise TaskError(
                "task.data: conversations need a tokenizer with a chat template; name its folder in task.tokenizer"
            )
        if settings.data.format == "text" and settings.data.chat_template:
            raise TaskError(
                'task.data.chat_template: is for conversations; remove it, or write "format": "conversations"'
            )

    @cached_property
    def _recipes(self) -> dict[str, Recipe]:
        """Recipes for training, and for validation if there are files for it."""
        files, template = self._files, ""
        if files.chat_template:
            template = encoders.template_of(files.chat_template)
        how = [self._digest, files.format, files.field, template]
        if self.tokenizer is not None:
            how += [str(self.tokenizer.eos_token_id), _transformers.transformers().__version__, version("tokenizers")]
        recipes = {}
        for name, patterns in {"train": files.train, **({"eval": files.eval} if files.eval else {})}.items():
            encoder: Any = (
                encoders.ConversationEncoder(self.tokenizer, template or None)
                if files.format == "conversations"
                else encoders.TextEncoder(self.tokenizer, files.field)
            )
            listed = [patterns] if isinstance(patterns, str) else patterns
            places = [documents.local(pattern, self.settings.data_dir) for pattern in listed]
            dated = [encoders.NO_DATE] if encoder.dated else []  # tokens made earlier have the date of some day
            recipes[name] = Recipe(
                tuple(documents.find_files(places, f"task.data.{name}")),
                encoder,
                self.packing,
                self.settings.context,
                self.pretrained_config.vocab_size,
                xxh3_64_hexdigest("\0".join(how + dated).encode()),
                self.settings.data_dir,
                f"task.data.{name}",
            )
        return recipes

    def prepare(self, say: Say) -> None:
        if origin := _transformers.origin(self.settings.model):
            say(f"task.model: {origin[0]} of the Hugging Face hub, commit {origin[1]}")
        if self.unknown_end is not None:
            say(
                f"task.tokenizer: its end is {self.tokenizer.eos_token}, and the model folder's configuration has another one: "
                "an export ends at both"
            )
        if any(recipe.encoder.dated for recipe in self._recipes.values()):
            say(
                "task.data: the chat template gets no day's date (strftime_now), so that tokens are the same on every day; it "
                'takes the date that it has for this, or that of "chat_template_kwargs"'
            )
        for recipe in self._recipes.values():
            tokenised.make(recipe, say)
            opened = tokenised.find_tokens(recipe)
            for line in opened.counts.sentences(recipe) if opened else ():
                say(line)
            if opened and recipe.encoder.whole:
                first = [opened.tokens[start : start + length] for start, length in opened.pieces[:_SHOWN]]
                for line in encoders.describe_targets(self.tokenizer, first, recipe.context):
                    say(f"{recipe.name}: {line}")

    def _opened(self, name: str) -> tuple[Recipe, Tokenised]:
        recipe = self._recipes[name]
        opened = tokenised.find_tokens(recipe)
        if opened is None:  # called by a program that has not called prepare()
            tokenised.make(recipe, lambda line: None)
            opened = tokenised.find_tokens(recipe)
        assert opened is not None
        return recipe, opened

    def train_data(self) -> Any:
        return self._source("train")

    def eval_data(self) -> Any:
        return self._source("eval") if self._files.eval is not None else None

    def _source(self, name: str) -> Any:
        train, s = name != "eval", self.settings
        recipe, opened = self._opened(name)
        tokens = torch.from_numpy(opened.tokens)
        if train and s.samples is not None:
            tokens = tokens[: s.samples * s.context + s.context]
        try:
            source = TextSource(tokens, s.context, seed=self.seed, shifted=train)
            source.digest_of_files = documents.digest(recipe.sources, recipe.data_dir)
            return source
        except DataError as error:
            raise DataError(f"{recipe.name}: {error}") from error


class RowsTask(WindowsTask):
    """Rows have one document, or several that do not attend to each other. The loss is a mean over targets."""

    packing = "rows"

    def __init__(self, settings: sections.CausalLanguageModelTask, seed: int) -> None:
        assert settings.data is not None
        self.packing = settings.data.packing or "rows"
        super().__init__(settings, seed)
        if self.packing == "documents":
            self._refuse_leaks()

    def _refuse_leaks(self) -> None:
        """Raises TaskError if a document attends to the previous one in its row in a small model of this type."""
        config = small(self.pretrained_config)
        model_type = config.model_type
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            try:
                model = _transformers.build("AutoModelForCausalLM", config, None).eval()
                first, other, second = torch.randint(1, 60, (3, 1, 5)).unbind(0)
                places = torch.arange(5).repeat(2)[None]
                behind, elsewhere = (
                    model(input_ids=torch.cat([document, second], 1), position_ids=places).logits[:, 5:]
                    for document in (first, other)
                )
                alone = model(input_ids=second).logits
            except Exception as error:  # any error, since the model is unknown
                what = f'model_type "{model_type}" cannot take documents that are packed ({reason(error)})'
                raise TaskError(f'task.data.packing: {what}; write "rows"') from error
        difference = max(float((behind - outputs).abs().max()) for outputs in (elsewhere, alone))
        if not difference < 1e-4 * max(float(alone.abs().max()), 1e-3):
            raise TaskError(
                f'task.data.packing: in model_type "{model_type}" packed documents see each other '
                f'(outputs differ by {difference:.1g}); write "rows"'
            )

    def example(self) -> tuple[Any, Any]:
        tokens = torch.empty(1, self.settings.context, dtype=torch.int64, device="meta")
        other = "position_ids" if self.packing == "documents" else "attention_mask"
        return {"input_ids": tokens, other: tokens}, tokens

    def loss_weight(self, targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum()

    def metrics(self, outputs: Any, targets: Tensor) -> Sums:
        count = self.loss_weight(targets)
        mean = self._cross_entropy(logits_of(outputs), targets)
        total = torch.where(count > 0, mean * count, torch.zeros_like(mean))  # a slice may have no targets
        return {
            "loss": Sum(total, count),
            "bits_per_token": Sum(total / math.log(2), count),
            "accuracy": right_tokens(logits_of(outputs), targets),
        }

    def train_data(self) -> Any:
        # The unit of rates: tokens that are not padding.
        counts = self._opened("train")[1].counts
        self.units_per_sample = max(round(counts.positions / counts.rows), 1)
        return super().train_data()

    def _source(self, name: str) -> RowSource:
        train, s = name != "eval", self.settings
        recipe, opened = self._opened(name)
        samples = s.samples if train else None
        source = RowSource(opened, s.context, together=self.packing == "documents", samples=samples)
        source.digest_of_files = documents.digest(recipe.sources, recipe.data_dir)
        return source


def causal_language_model(settings: sections.CausalLanguageModelTask, seed: int) -> CausalLanguageModelTask:
    """Returns the task for the settings' source of text. Raises TaskError, DataError."""
    if settings.data is None:
        return CausalLanguageModelTask(settings, seed)
    joined = settings.data.packing == "concatenate" or (
        settings.data.packing is None and settings.data.format == "text"
    )
    return (WindowsTask if joined else RowsTask)(settings, seed)
