"""Converts rows to tokens: texts, and conversations of which only the answers are learned."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsframe.data.documents import Row, column, missing
from dsframe.errors import DataError
from dsframe.text import reason

END_OF_BYTES = 256
"""End-of-document token if bytes are the tokens."""
NO_DATE = "{% set strftime_now = date_of_today +%}"
"""Prefix for a template that writes the date (``strftime_now``), which then uses its fallback for an unknown date."""
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_MARKS = "\ufdd0", "\ufdd1"
"""Written before and behind an answer. No text has them: Unicode keeps them for use within programs."""

_CHANGED = (
    "{}: the chat template changes what {{% generation %}} marks later (by trim, for example); write the marks where it prints: "
    "{{% generation %}}{{{{ x | trim }}}}{{% endgeneration %}}"
)


_IDENTIFY = re.compile(r"_*(.*_)?(id|idx|index|uuid|url|hash|date|timestamp|source|dataset|license)_*", re.IGNORECASE)
"""Names of columns that say which row it is or where it is from."""
_NOT_OF_TEXT = {
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "response", "question"),
    *("answer", "system", "tools", "chosen", "rejected", "label", "labels", "weight", "loss_mask"),
}
"""Names of columns that formats other than text read."""
_UNREAD = "columns that are not read"


class _Noted:
    """Notes ignored parts of the data, once for each name."""

    def __init__(self) -> None:
        self._noted: set[tuple[str, str]] = set()
        self.warnings: list[str] = []

    def _warn(self, row: Row, description: str, names: Iterable[Any]) -> None:
        if new := sorted({(description, str(name)) for name in names} - self._noted):
            self._noted |= {*new}
            self.warnings.append(f"{row.place}: {description}: {', '.join(name for _, name in new)}")


class TextEncoder(_Noted):
    """Encodes a text as beginning tokens, the text's tokens, and end-of-document token."""

    whole, dated = False, False

    def __init__(self, tokenizer: Any, field: str) -> None:
        """``tokenizer``: of transformers; None for bytes. Raises DataError if there is no end-of-document token."""
        super().__init__()
        self._tokenizer, self._field = tokenizer, field
        self.columns: Sequence[str] = (field,)
        self._within = False
        self._begin: list[int] = []
        self._end = END_OF_BYTES
        if tokenizer is not None:
            self._end = end_of(tokenizer)
            self._begin = begin_of(tokenizer)

    def length(self, row: Row) -> int:
        return len(_string(column(row, self._field), row, self._field))

    def encode(self, rows: list[Row]) -> Iterator[Any]:
        texts = [column(row, self._field) for row in rows]
        for row in rows:
            self._warn(row, _UNREAD, _NOT_OF_TEXT.intersection(_columns(row)) - {self._field})
        if self._tokenizer is None:
            encoded: Any = [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) for text in texts]
        else:
            encoded = tokens_of(self._tokenizer, texts, rows)
        for row, tokens in zip(rows, encoded, strict=True):
            empty = row.last and not self._within and not len(tokens)
            begun = self._within or empty or list(tokens[: len(self._begin)]) == self._begin  # a text may contain them
            before = [] if begun else self._begin
            ended = len(tokens) and int(tokens[-1]) == self._end
            behind = [self._end] if row.last and not empty and not ended else []
            self._within = not row.last
            yield np.concatenate([np.asarray(part, np.int32) for part in (before, tokens, behind)])


class ConversationEncoder(_Noted):
    """Encodes conversations with a chat template: ``{"messages": [...]}``, or ``{"prompt": ..., "completion": ...}``.

    Learned is what the template marks as the assistant's (``{% generation %}``), except messages with ``"weight": 0``
    (or ``train`` or ``loss``), and all of a completion. An answer's first and last token are found by tokenising the
    text up to there: character offsets are wrong if a tokenizer changes the text.
    """

    whole = True
    columns: Sequence[str] = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        """``template``: replaces the tokenizer's own."""
        super().__init__()
        self._tokenizer, self._templates = tokenizer, template or tokenizer.chat_template
        self.dated = "strftime_now" in str(self._templates)
        """True if the template writes the date, on which tokens must not depend."""
        self._template: Any = self._templates
        self._begin, self._end = begin_of(tokenizer), tokenizer.eos_token_id

    def length(self, row: Row) -> int:
        return 4096  # unknown before the template is applied

    def encode(self, rows: list[Row]) -> Iterator[Any]:
        for row in rows:
            has_messages = row.value.get("messages") is not None
            read = {*self.columns} - ({"prompt", "completion"} if has_messages else set())
            unread = [name for name in _columns(row) if name not in read]
            self._warn(row, _UNREAD, (name for name in unread if not _IDENTIFY.fullmatch(name)))
            self._choose_template(row)
            if has_messages:
                tokens, learned = self._conversation(row)
            elif row.value.get("prompt") is not None and row.value.get("completion") is not None:
                tokens, learned = self._completion(row)
            else:
                remedy = "; preference pairs are a task of your own" if "chosen" in unread else ""
                raise DataError(missing(row.place, ["messages", "prompt and completion"], _columns(row)) + remedy)
            ids = np.asarray(tokens, np.int32)
            yield np.where(np.asarray(learned, bool), ids, ~ids)

    def _choose_template(self, row: Row) -> None:
        """Chooses among named templates as transformers does: that for tools if there are any, else the default."""
        if isinstance(self._templates, Mapping):
            self._template = self._templates[self._name_of(row)]
        if self.dated and isinstance(self._template, str) and not self._template.startswith(NO_DATE):
            self._template = NO_DATE + self._template

    def _name_of(self, row: Row) -> str:
        name = "tool_use" if row.value.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            names = ", ".join(self._templates)
            raise DataError(
                f"{row.place}: of the chat templates {names} none is the default; name a file in chat_template"
            )
        return name

    def _conversation(self, row: Row) -> tuple[list[int], list[int]]:
        if not isinstance(self._template, str):
            raise DataError(
                f"{row.place}: the tokenizer has no chat template to write messages with; name a file in chat_template"
            )
        if not _GENERATION.search(self._template):
            raise DataError(
                f"{row.place}: the chat template does not say which part is the answer; write {{% generation %}} before and "
                "{% endgeneration %} behind what the assistant says, in a file that chat_template names"
            )
        messages = _messages(row.value["messages"], row, "messages")
        given = [*_unweighted(messages), self._variables(row)]
        present = (key for part in given for key, value in part.items() if value not in (None, "", [], {}))
        unread = (key for key in present if not self._names(str(key)))
        self._warn(row, "not in the chat template, so not read", unread)
        weights = [(message["role"], _counts(message, row)) for message in messages]
        counts = [weight for role, weight in weights if role == "assistant"]
        if not counts:  # the template may use another role name
            counts = [weight for role, weight in weights if role not in _ASKING]
        messages = _unweighted(messages)
        tokens = self._applied(messages, row)["input_ids"]
        text, spans = self._rendered(messages, row)
        self._warn_of_lost(messages, text, row)
        if not all(counts) and len(spans) != len(counts):
            raise DataError(
                f"{row.place}: {len(counts)} answers, but the chat template marks {len(spans)} parts, so it "
                "cannot be told which one has the weight 0"
            )
        parts = [text[begin:end] for first, last in spans for begin, end in ((0, first), (0, last), (first, last))]
        text_tokens, *part_tokens = tokens_of(self._tokenizer, [text, *parts], [row] * (1 + len(parts)))
        if list(text_tokens) != list(tokens):
            if self._decoded(tokens) != self._decoded(text_tokens):
                raise DataError(_CHANGED.format(row.place))
            raise DataError(f"{row.place}: the tokenizer gives other tokens for a conversation than for its text")
        learned = [0] * len(tokens)
        for number, counted in enumerate(counts if len(counts) == len(spans) else [True] * len(spans)):
            before, behind, answer = part_tokens[3 * number : 3 * number + 3]
            begin, _ = self._within(before, text_tokens)
            end, split = self._within(behind, text_tokens)
            # The answer's last character may share a token with what follows.
            end += bool(answer) and split and end < len(tokens)
            self._check_answer(tokens[begin:end], answer, row)
            if counted:
                learned[begin:end] = [1] * (end - begin)
        return tokens, learned

    def _within(self, part: Sequence[int], whole: Sequence[int]) -> tuple[int, bool]:
        """Returns how many tokens of ``whole`` lie in its beginning, whose own tokens are ``part``, and if the next one
        has an end of it. Without words as a first step, a tokenizer merges other letters if the text goes on."""
        last = _common(part, whole)
        first = max(last - 1, 0)  # a decoder may strip a space that a text begins with
        rest = self._decoded(part[first:])
        while part and last < len(whole) and rest.startswith(self._decoded(whole[first : last + 1])):
            last += 1
        return last, rest != self._decoded(whole[first:last])

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)) if len(tokens) else ""

    def _check_answer(self, learned: list[int], answer: list[int], row: Row) -> None:
        """Raises DataError if ``learned`` does not decode to ``answer``, except where outer tokens are shared."""

        def text(tokens: list[int]) -> str:
            return "".join(self._decoded(tokens).split())

        decoded, wanted = text(learned), text(answer)
        shared = len(text(learned[:1])) + len(text(learned[-1:]))
        if wanted not in decoded or len(decoded) > len(wanted) + shared:
            raise DataError(
                f"{row.place}: the tokens of an answer cannot be found: {wanted[:60]!r} is {decoded[:60]!r} among those of the "
                "conversation; write a special token before and behind what the assistant says in the chat template"
            )

    def _rendered(self, messages: list[Any], row: Row) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and the spans of the assistant's parts: marks, that are written in place of
        ``{% generation %}``, are right also where a template writes into a variable or a macro before the text."""
        module: Any = sys.modules["transformers.utils.chat_template_utils"]  # imported already
        template = _GENERATION.sub(
            lambda tag: f"{{%{tag[1]} if 1 %}}{_MARKS[bool(tag[2])]}{{% endif {tag[3]}%}}", self._template
        )
        try:
            rendered: Any = module.render_jinja_template(
                conversations=[messages],
                chat_template=template,
                **self._variables(row),
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program and may raise anything
            raise _failure(error, row) from None
        parts = re.split(f"([{''.join(_MARKS)}])", rendered[0][0])
        if parts[1::2] != [*_MARKS] * (len(parts) // 4):
            raise DataError(_CHANGED.format(row.place))
        text, spans = "", []
        for number, part in enumerate(parts[::2]):
            if number % 2:  # between two marks
                spans.append((len(text), len(text) + len(part)))
            text += part
        return text, spans

    def _variables(self, row: Row) -> dict[str, Any]:
        """Returns the template's variables besides the messages."""
        template_kwargs = row.value.get("chat_template_kwargs") or {}
        if not isinstance(template_kwargs, Mapping):
            raise DataError(
                f'{row.place}: "chat_template_kwargs" is {type(template_kwargs).__name__} in place of an object'
            )
        tools = row.value.get("tools") or None
        if isinstance(tools, str):  # parquet stores it as text, to avoid too many keys
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise DataError(f'{row.place}: "tools" is a text that is not JSON ({error})') from None
        return {**template_kwargs, "tools": tools}

    def _completion(self, row: Row) -> tuple[list[int], list[int]]:
        prompt, completion = row.value["prompt"], row.value["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if self._end is None:
                end_of(self._tokenizer)
            asked, whole = tokens_of(self._tokenizer, [prompt, prompt + completion], [row, row])
            (shared, _), begun = self._within(asked, whole), list(whole[: len(self._begin)]) == self._begin
            before = [*([] if begun else self._begin), *whole[:shared]]
            ended = not completion or list(whole[-1:]) == [self._end]
            after = [*whole[shared:], *([] if ended else [self._end])]
            return [*before, *after], [0] * len(before) + [1] * len(after)
        asked, answers = _messages(prompt, row, "prompt"), _messages(completion, row, "completion")
        if not (asked and answers):
            raise DataError(
                f"{row.place}: a prompt or a completion has no message; give both one, or leave the row out"
            )
        if not all(_counts(message, row) for message in answers):
            raise DataError(
                f"{row.place}: a message of a completion has the weight 0; give messages and a template with {{% generation %}}"
            )
        if others := sorted({message["role"] for message in answers if message["role"] in _ASKING}):
            raise DataError(
                f"{row.place}: a completion has messages of {', '.join(others)}, which would be learned as an answer; "
                "give messages and a template with {% generation %}"
            )
        asked, answers = _unweighted(asked), _unweighted(answers)
        before = self._applied(asked, row, add_generation_prompt=True)["input_ids"]
        tokens = self._applied([*asked, *answers], row)["input_ids"]
        if tokens[: len(before)] != before:
            raise DataError(
                f"{row.place}: the chat template writes the prompt differently if a completion follows, so dsframe cannot "
                "find where the answer begins; give messages and a template with {% generation %}"
            )
        text = self._tokenizer.apply_chat_template(
            [*asked, *answers], chat_template=self._template, tokenize=False, **self._variables(row)
        )
        self._warn_of_lost([*asked, *answers], text, row)
        return tokens, [0] * len(before) + [1] * (len(tokens) - len(before))

    def _warn_of_lost(self, messages: list[Any], text: str, row: Row) -> None:
        """Warns about roles whose words, thoughts and calls are not all in the template's output ``text``."""
        without_spaces = "".join(text.split())
        lost = (
            message["role"] if key == "content" else f"{message['role']} ({key})"
            for message in messages
            for key, words in _words(message)
            if "".join(words.split()) not in without_spaces and (key == "content" or self._names(key))
        )
        self._warn(row, "the chat template leaves out or changes words of messages of", lost)

    def _names(self, key: str) -> bool:
        """True if the template has this word, not only a longer one ("id" is no part of "endif")."""
        return re.search(rf"\b{re.escape(key)}\b", self._template) is not None

    def _applied(self, messages: list[Any], row: Row, **how: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=True, return_dict=True, **self._variables(row), **how
            )
        except Exception as error:  # a template is a program and may raise anything
            raise _failure(error, row) from None


def _columns(row: Row) -> list[str]:
    """Returns the names of a row's columns that are not null, and of its file's that were not read; none of a text file."""
    read = row.value if isinstance(row.value, Mapping) else {}
    return [*(name for name, value in read.items() if value is not None), *row.others]


def _failure(error: Exception, row: Row) -> DataError:
    why = _reason(error, row)
    if "date_of_today" in why:
        why = "it needs the day's date (strftime_now), and tokens must not depend on the day; write a date in its place"
    return DataError(f"{row.place}: the chat template fails: {why}")


def _reason(error: Exception, row: Row) -> str:
    """Returns why a row cannot be encoded. Tokenizers report a type error for half a surrogate pair."""
    halves = re.search("[\ud800-\udfff]", json.dumps(row.value, ensure_ascii=False, default=str))
    return f"{halves[0]!a} is half of a character (a surrogate without the other one)" if halves else reason(error)


def describe_targets(tokenizer: Any, rows: Sequence[Any], context: int) -> Iterator[str]:
    """Describes what is learned of ``rows`` (of :class:`ConversationEncoder`), and if the model learns to stop."""
    ends = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()} - {tokenizer.unk_token_id}
    stops = True
    for row in rows:
        learned = np.append(row >= 0, False)
        text = tokenizer.decode(row[row >= 0].tolist())
        yield f"learned of a row: {json.dumps(text[:100], ensure_ascii=False)}{' ...' if len(text) > 100 else ''}"
        lasts = (learned[:-1] & ~learned[1:]).nonzero()[0].tolist()
        whole = [last for last in lasts if last + 1 < len(row) or len(row) <= context]
        stops &= not any(ends.isdisjoint(row[max(last - 3, 0) : last + 1].tolist()) for last in whole)
    if not stops:
        yield (
            "warning: an answer ends with no special token that is learned, so the model does not learn to stop; "
            f"write one, such as {tokenizer.eos_token}, before {{% endgeneration %}} in the chat template"
        )


_WEIGHTS = ("weight", "train", "loss")
"""Keys of a message that say whether it is learned, as in the formats of OpenAI, Axolotl and others."""
_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")
_ASKING = ("system", "developer", "user", "tool", "function", "ipython")
"""Roles that are never the model's own."""


def _counts(message: Mapping[str, Any], row: Row) -> bool:
    """True if a message is learned. Raises DataError for values other than 0 and 1."""
    for key in _WEIGHTS:
        if message.get(key) not in (None, 0, 1):
            raise DataError(f'{row.place}: "{key}" of a message is {message[key]!r}; 0 and 1 are known')
    return all(message.get(key) in (None, 1) for key in _WEIGHTS)


def _unweighted(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the messages for the template, without weights and nulls: transformers treats null as a missing key."""
    return [
        {key: part for key, part in message.items() if key not in _WEIGHTS and part is not None} for message in messages
    ]


def _words(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields key and text of a message's contents, reasoning and function calls, by the keys that chat templates use."""
    for key in _TEXTS:
        if isinstance(text := message.get(key), str):
            yield key, text
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, (list, tuple)) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            yield "tool_calls", name


def _common(first: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    same = (number for number, (a, b) in enumerate(zip(first, other, strict=False)) if a != b)
    return next(same, min(len(first), len(other)))


def tokens_of(tokenizer: Any, texts: Sequence[str], rows: Sequence[Row]) -> Any:
    """Returns the tokens of each text, without beginning and end tokens. Raises DataError."""
    try:
        return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    except Exception as error:  # of the tokenizer, such as for half a surrogate pair
        whys = {row.place: _reason(error, row) for row in rows}
        named = next((location for location, why in whys.items() if "half of a character" in why), None)
        where = named or f"{rows[0].place}, or up to {rows[-1].place}"
        raise DataError(f"{where}: the tokenizer fails: {whys[named or rows[0].place]}") from None


def begin_of(tokenizer: Any) -> list[int]:
    """Returns the tokens that the tokenizer writes before a text."""
    ordinary = sorted({*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids})
    words = tokenizer.decode(ordinary[:50])  # a fixed text may be missing from the vocabulary
    text, bare = (list(tokenizer(words, add_special_tokens=special)["input_ids"]) for special in (True, False))
    return next((text[:n] for n in range(len(text)) if bare and text[n : n + len(bare)] == bare), [])


def end_of(tokenizer: Any) -> int:
    """Returns the end-of-document token. Raises DataError if there is none."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no eos_token, so nothing would show where a document ends; write one into its tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)


def template_of(path: str) -> str:
    """Returns the text of a chat template file. Raises DataError."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"task.data.chat_template: {path} cannot be read ({error})") from error


def _string(value: Any, row: Row, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f'{row.place}: "{name}" is {type(value).__name__} in place of a text')
    return value


def _messages(value: Any, row: Row, name: str) -> list[Any]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(message, Mapping) and "role" in message for message in value
    ):
        raise DataError(f'{row.place}: "{name}" must be a list of messages, {{"role": "user", "content": "..."}}')
    return [{**message, **_joined(message, row)} for message in value]


def _joined(message: Mapping[str, Any], row: Row) -> dict[str, str]:
    """Returns the joined text of a content that is a list of texts: simple templates would print the list."""
    parts = message.get("content")
    if isinstance(parts, Mapping) and message["role"] not in ("tool", "function", "ipython"):
        raise DataError(f'{row.place}: "content" of a message is an object, {str(parts)[:60]}; give its text')
    if not isinstance(parts, (list, tuple)):
        return {}
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        types = sorted({str(part.get("type")) for part in parts if isinstance(part, Mapping)} - {"text"})
        raise DataError(f"{row.place}: a message has parts of type {', '.join(types)}; texts are read")
    return {"content": "".join(texts)}
