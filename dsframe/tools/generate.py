"""``dsframe generate``: text from a checkpoint of a language model, in one process.

Models of transformers generate by their own ``generate``, with its cache; the built-in GPT token by token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsframe.config import load
from dsframe.errors import TaskError
from dsframe.tools.commands import add_average, command


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("generate", "Text from a checkpoint of a language model.")
    add = parser.add_argument
    add("--prompt", action="append", required=True, help="text to go on from; may be given several times")
    add("checkpoint", type=Path, help="a checkpoint, or a run's directory (its newest complete one)")
    add("--best", action="store_true", help="of a run's directory the best one (keep_best)")
    add("--tokens", type=int, default=64, help="tokens to add, at most (default: %(default)s)")
    add("--sample", action="store_true", help="draw tokens; without it always the likeliest one")
    add("--temperature", type=float, default=1.0, help="with --sample (default: %(default)s)")
    add("--top-k", type=int, default=0, help="with --sample: draw from the K likeliest tokens only; 0: from all tokens")
    add("--seed", type=int, default=0, help="with --sample (default: %(default)s)")
    add("--config", help="the file (default: that of the run)")
    add_average(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints each prompt with its continuation and returns 0. Raises TaskError where the checkpoint is no language model's."""
    options = parser().parse_args(argv)
    task, model = _loaded(options)
    for prompt in options.prompt:
        words = _of_text(task, prompt)
        print(_text(task, [*words, *generated(task, model, words, options)]))
    return 0


def _loaded(options: argparse.Namespace) -> tuple[Any, Any]:
    """The task and the model of a checkpoint. Raises TaskError where it is no language model's."""
    if options.tokens < 1 or not options.temperature > 0 or options.top_k < 0:
        parser().error("--tokens is at least 1, --temperature above 0, --top-k at least 0")
    from dsframe import tasks
    from dsframe.checkpoint import store
    from dsframe.inference import load_model
    from dsframe.tasks.huggingface import CausalLanguageModelTask
    from dsframe.tasks.language import LanguageTask

    path = store.complete(options.checkpoint, best=options.best)
    config = load(options.config or store.config_of(path))
    task = tasks.build(config.settings.task, config.settings.seed)
    if not isinstance(task, (LanguageTask, CausalLanguageModelTask)):
        known, name = "language, causal-language-model", config.settings.task.name
        raise TaskError(f"{path} is of the task {name}, which makes no text; dsframe generate is for {known}")
    return task, load_model(path, task, averages=options.average)


def _of_text(task: Any, prompt: str) -> list[int]:
    """The tokens of a prompt, without an end that a tokenizer writes behind it."""
    tokenizer = getattr(task, "tokenizer", None)
    words = list(prompt.encode()) if tokenizer is None else list(tokenizer(prompt)["input_ids"])
    if tokenizer is not None and words[-1:] == [tokenizer.eos_token_id] and not prompt.endswith(tokenizer.eos_token):
        words.pop()
    if not words:
        raise TaskError("--prompt is empty; give at least one character")
    return words


def _text(task: Any, tokens: list[int]) -> str:
    tokenizer = getattr(task, "tokenizer", None)
    if tokenizer is None:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


def generated(task: Any, model: Any, words: list[int], options: argparse.Namespace) -> list[int]:
    """``options.tokens`` more tokens behind ``words``, fewer where the tokenizer's end comes first."""
    import torch

    tokenizer, tokens = getattr(task, "tokenizer", None), torch.tensor([words])
    torch.manual_seed(options.seed)
    with torch.no_grad():
        if hasattr(model, "generate"):
            how: dict[str, Any] = {"do_sample": False}
            if options.sample:
                how = {"do_sample": True, "temperature": options.temperature, "top_k": options.top_k}
            known = json.loads(task.pretrained()["generation_config"] or "{}")  # of a tokenizer from elsewhere its own
            ends = known.get("eos_token_id", model.generation_config.eos_token_id)
            ends = {*(ends if isinstance(ends, list) else [ends]), getattr(tokenizer, "eos_token_id", None)} - {None}
            tokens = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=options.tokens,
                pad_token_id=0,
                eos_token_id=sorted(ends) or None,
                **how,
            )
        else:
            for _ in range(options.tokens):
                logits = model(tokens[:, -task.units_per_sample :])[:, -1]
                tokens = torch.cat([tokens, _next(logits, options)], 1)
    return [int(token) for token in tokens[0, len(words) :]]


def _next(logits: Any, options: argparse.Namespace) -> Any:
    """The next token of each row, int64 ``[rows, 1]``, of ``logits`` ``[rows, vocabulary]``."""
    import torch

    if not options.sample:
        return logits.argmax(-1, keepdim=True)
    logits = logits / options.temperature
    if options.top_k:
        lowest = logits.topk(min(options.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1)
