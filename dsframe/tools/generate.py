"""``dsframe generate`` and ``dsframe chat``: text from a checkpoint of a language model, in one process.

Models of transformers generate by their own ``generate``, with its cache; the built-in GPT token by token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsframe.config import load
from dsframe.errors import TaskError
from dsframe.tools.commands import command


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("generate", "Text from a checkpoint of a language model.")
    parser.add_argument(
        "--prompt", action="append", required=True, help="text to go on from; may be given several times"
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message, in the chat template")
    _add_options(parser, tokens=64)
    return parser


def chat_parser() -> argparse.ArgumentParser:
    """The command line of ``dsframe chat``."""
    parser = command(
        "chat", "A conversation with a checkpoint, a line each; an empty line begins anew, Ctrl-D ends it."
    )
    parser.add_argument("--system", help="the system prompt")
    _add_options(parser, tokens=512)
    return parser


def _add_options(parser: argparse.ArgumentParser, tokens: int) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint, or a run's directory (its newest complete one)")
    add("--best", action="store_true", help="of a run's directory the best one (keep_best)")
    add("--tokens", type=int, default=tokens, help="tokens to add, at most (default: %(default)s)")
    add("--sample", action="store_true", help="draw tokens; without it always the likeliest one")
    add("--temperature", type=float, default=1.0, help="with --sample (default: %(default)s)")
    add("--top-k", type=int, default=0, help="with --sample: draw from the K likeliest tokens only; 0: from all tokens")
    add("--seed", type=int, default=0, help="with --sample (default: %(default)s)")
    add("--config", help="the file (default: that of the run)")
    add("--average", action="store_true", help='the average of the weights ("ema") instead of them')


def main(argv: Sequence[str] | None = None) -> int:
    """Prints each prompt with its continuation and returns 0. Raises TaskError where the checkpoint is no language model's."""
    options = parser().parse_args(argv)
    task, model = _loaded(options, parser())
    for prompt in options.prompt:
        message = [{"role": "user", "content": prompt}]
        words = _of_chat(task, message) if options.chat else _of_text(task, prompt)
        added = generated(task, model, words, options)
        print(_text(task, added, skip=True) if options.chat else _text(task, [*words, *added]))
    return 0


def chat(argv: Sequence[str] | None = None) -> int:
    """Answers the lines of standard input until it ends, and returns 0. Raises TaskError as :func:`main`."""
    options = chat_parser().parse_args(argv)
    task, model = _loaded(options, chat_parser())
    begin = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(begin)
    _of_chat(task, [*begin, {"role": "user", "content": "?"}])  # what cannot be written is said before anybody types
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if not line:
            messages = list(begin)
            continue
        messages.append({"role": "user", "content": line})
        answer = _text(task, generated(task, model, _of_chat(task, messages), options), skip=True)
        messages.append({"role": "assistant", "content": answer})
        print(answer, flush=True)


def _loaded(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[Any, Any]:
    """The task and the model of a checkpoint. Raises TaskError where it is no language model's."""
    if options.tokens < 1 or not options.temperature > 0 or options.top_k < 0:
        parser.error("--tokens is at least 1, --temperature above 0, --top-k at least 0")
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
        raise TaskError(f"{path} is of the task {name}, which makes no text; {parser.prog} is for {known}")
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


def _of_chat(task: Any, messages: list[Any]) -> list[int]:
    """The tokens of a conversation up to where the answer begins. Raises TaskError, DataError where there is no chat template."""
    from dsframe.data.encoders import template_of

    tokenizer, files = getattr(task, "tokenizer", None), getattr(task.settings, "data", None)
    template = template_of(files.chat_template) if files and files.chat_template else None
    if tokenizer is None or not (template or tokenizer.chat_template):
        raise TaskError("the model has no chat template; dsframe generate --prompt goes on from a text")
    try:
        written = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # a template is a program, and raises what it likes
        raise TaskError(f"the chat template fails: {' '.join(str(error).split())}") from None
    return list(written["input_ids"])


def _text(task: Any, tokens: list[int], *, skip: bool = False) -> str:
    tokenizer = getattr(task, "tokenizer", None)
    if tokenizer is None:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")
    return str(tokenizer.decode(tokens, skip_special_tokens=skip))


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
            ends = model.generation_config.eos_token_id
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
