"""Writes the pages of docs/ that follow from the code, and the editors' schema (`make docs`)."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import dsframe
import dsframe.data
from docs.schema import describe, json_schema, sections, summary
from dsframe.config.codes import CODES
from dsframe.config.schema.base import Section
from dsframe.config.schema.file import shape
from dsframe.tools.commands import COMMANDS, parser_of

ROOT = Path(__file__).resolve().parents[1]


def commands() -> Iterator[str]:
    """Yields docs/commands.md, from the commands' parsers."""
    parsers = {name: parser_of(name) for name in COMMANDS}
    shared = _shared_options(parsers)
    yield "# Commands\n\nWritten by `make docs` from the commands' parsers; do not edit.\n"
    yield "`dsframe COMMAND --help` prints the same. Options that several commands have:\n"
    yield "| option | meaning |\n|---|---|"
    yield from (f"| {option} | {text} |" for option, text in shared.values())
    for name, parser in parsers.items():
        yield f"\n## dsframe {name}\n\n{_sentence(parser.description or '')}\n"
        rows = [row for row in _options(parser) if _flag(row) not in shared]
        if rows:
            yield "| option | meaning |\n|---|---|"
            yield from (f"| {option} | {text} |" for option, text in rows)
        if parser.epilog and name not in ("train", "check"):
            yield f"\n```text\n{textwrap.dedent(parser.epilog).strip()}\n```"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _options(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Returns option and meaning of each option of a command, as cells of a table."""
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return [(_option(action), _help(action, parser)) for action in actions if action.dest != "help"]


def _flag(row: tuple[str, str]) -> str:
    return row[0].partition(" ")[0]


def _shared_options(parsers: dict[str, argparse.ArgumentParser]) -> dict[str, tuple[str, str]]:
    """Returns the options that several commands have with the same words, by their first name."""
    counts = Counter(row for parser in parsers.values() for row in _options(parser))
    shared: dict[str, tuple[str, str]] = {}
    for row, count in counts.most_common():
        if count > 1:
            shared.setdefault(_flag(row), row)
    return shared


def _option(action: argparse.Action) -> str:
    value = action.metavar or ("" if action.choices is None else "|".join(map(str, action.choices)))
    value = value or ("" if action.nargs == 0 else action.dest.upper())
    value = value if isinstance(value, str) else " ".join(value)
    words = ", ".join(f"`{name}`" for name in action.option_strings)
    if words and value and action.nargs != 0:
        words += f" `{value}`"
    return (words or f"`{value}`").replace("|", "\\|")


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = {**vars(action), "prog": parser.prog}
    text = (action.help or "") % values
    choices = ""
    if action.choices is not None and action.metavar:
        choices = f" ({', '.join(map(str, action.choices))})"
    return " ".join(text.split()).replace("|", "\\|") + choices


def api() -> Iterator[str]:
    """Yields docs/api.md, from the docstrings of the public names."""
    yield "# Python\n\nThe public names and what each is for. Written by `make docs`; do not edit."
    yield "`help(dsframe.Task.loss)` prints the whole docstring.\n"
    for name in sorted(dsframe.__all__):
        value = getattr(dsframe, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield from _documented(name, value)
    yield "\n## dsframe.data\n\nWhat data sets and loaders are made of.\n\n| name | what it is |\n|---|---|"
    for name in sorted(
        {name for name, value in vars(dsframe.data).items() if name[0] != "_" and not inspect.ismodule(value)}
        - set(dsframe.__all__)
    ):
        value = getattr(dsframe.data, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield _row(name, value, paragraphs=1)


def _documented(name: str, value: Any) -> Iterator[str]:
    yield f"\n## dsframe.{name}\n"
    if name not in INTERNAL_PARTS and _signature(value) != "()":
        yield f"```python\n{name}{_signature(value)}\n```\n"
    yield _prose(value, paragraphs=2)
    methods = list(_methods(value)) if inspect.isclass(value) and name not in INTERNAL_PARTS else []
    if methods:
        yield "\n| method | what it does |\n|---|---|"
    for method, function in methods:
        yield _row(method, function, paragraphs=2 if method in MAIN_METHODS else 1)


def _row(name: str, value: Any, paragraphs: int) -> str:
    cells = (f"`{name}{_signature(value)}`", " ".join(_prose(value, paragraphs).split()))
    return f"| {' | '.join(map(_cell, cells))} |"


MAIN_METHODS = ("model", "loss", "loss_weight", "metrics", "train_data", "pretrained", "models", "losses", "prepare")
"""Methods of a task of which the table says more than a paragraph."""
INTERNAL_PARTS = ("Config",)
"""Public classes whose users read no more than what the class is for."""


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    """Yields the documented methods of a class that override none of a public class."""
    for name, member in vars(owner).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        inherited = any(hasattr(base, name) for base in owner.__mro__[1:])
        public = not name.startswith("_") and inspect.isfunction(function) and function.__doc__
        if public and not inherited:
            yield name, function


def _signature(value: Any) -> str:
    """Returns the arguments of a function or class, without types and without private ones."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # an exception without __init__
        return "()"
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls", "args", "kwargs") and not parameter.name.startswith("_")
    ]
    texts = []
    for number, parameter in enumerate(parameters):
        if parameter.kind == parameter.KEYWORD_ONLY and (
            number == 0 or parameters[number - 1].kind != parameter.KEYWORD_ONLY
        ):
            texts.append("*")
        texts.append(_argument(parameter))
    return f"({', '.join(texts)})"


def _argument(parameter: inspect.Parameter) -> str:
    if parameter.kind == parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    if parameter.kind == parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.default is parameter.empty:
        return parameter.name
    plain = isinstance(parameter.default, str | int | float | tuple | None)
    return f"{parameter.name}={parameter.default!r}" if plain else f"{parameter.name}=..."


def _prose(value: Any, paragraphs: int) -> str:
    """Returns the first paragraphs of a docstring, without its sections (Args, Raises)."""
    text = inspect.cleandoc(value.__doc__ or "").partition("\nArgs:")[0].partition("\nRaises:")[0]
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text).replace("``", "`")
    return "\n\n".join(text.strip().split("\n\n")[:paragraphs])


def _type(owner: type[Section], key: str, limits: str) -> str:
    """Returns the type of a key: ``int > 0``."""
    expected = shape(owner, key)
    if "any" in expected.kinds:
        return "any"
    text = "object" if expected.section else expected.phrase
    for long, short in TYPES.items():
        text = text.replace(long, short)
    unit = ' or {"epochs": 1}' if expected.unit else ""
    return text.removesuffix(unit) + limits + unit


TYPES = {
    " in quotes": "",
    " {...}": "",
    "a whole number": "int",
    "whole numbers": "ints",
    "a number": "float",
    "true or false": "bool",
    "a list of": "list of",
    "an object": "object",
}
_SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def _limits(definition: dict[str, Any]) -> str:
    """Returns the bounds of a number in a JSON Schema: `` > 0``."""
    branches = [definition, *definition.get("anyOf", ())]
    bounds = [
        f" {sign} {branch[name]:.15g}"
        for branch in branches
        for name, sign in _SIGNS.items()
        if name in branch and abs(branch[name]) < 2**31
    ]
    return ",".join(bounds)


def _default(owner: type[Section], key: str) -> str:
    field = owner.model_fields[key]
    if field.is_required():
        return "required"
    if shape(owner, key).section:
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is None else f"`{json.dumps(value)}`"


REFUSED = (
    *("data_efficiency", "hybrid_engine", "compile", "datastates_ckpt", "zenflow", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
    *("fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
)
"""Sections and keys of DeepSpeed that no engine of dsframe accepts."""
NO_EFFECT = (
    *("autotuning", "weight_quantization", "checkpoint", "timers", "disable_allgather"),
    *("csv_monitor", "comet", "flops_profiler", "comms_logger"),
)
"""Those that change nothing in a training by dsframe."""
LISTED = (
    "aio",
    "data_types",
    "expert_parallel",
    "zero_optimization.leaf_module",
    "tensor_parallel.tp",
    "tensor_parallel.partition_config",
    "tensor_parallel.partition_config.layer_specs[]",
)
"""Sections whose keys are listed without their meaning, which DeepSpeed's documentation has."""
SELDOM = """
allgather_partitions allgather_size auto_cast
buffer_count compute_grad_norm consecutive_hysteresis contiguous_memory_optimization
cpuadam_cores_perc data_parallel_size detailed disable_python_gc dump_state elastic_checkpoint
enable_sanity_checks fast_init grad_partitioned
gradient_predivide_factor hysteresis ignore_unused_parameters immediate_grad_update
injection_policy_tuple keep_module_on_host kernel_inject legacy_fusion legacy_stage1
load_from_fp32_weights log_level log_trace_cache_warnings lower_precision_safe_modules
managed_gradient_accumulation memory_breakdown memory_efficient_linear module_depth
number_checkpoints override_module_apply parameter_alignment pipe_partitioned
pipeline_loading_checkpoint pipeline_read pipeline_write prescale_gradients profile
recompute_fwd_factor save_muon_momentum_buffer_in_memory seq_parallel_communication_data_type
stage3_allgather_sequential stage3_max_reuse_distance stage3_model_persistence_threshold
stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params super_offload
synchronize_checkpoint_boundary top_modules tp_overlap_comm use_data_before_expert_parallelism
use_reentrant vocab_parallel_ce_backend vocabulary_size zero_force_ds_cpu_optimizer
"""
"""Keys that are listed without their meaning, too."""
DOCUMENTATION = "https://www.deepspeed.ai/docs/config-json/"


def configuration() -> str:
    """Returns docs/configuration.md: dsframe's own section in full, then DeepSpeed's in short."""
    own = [entry for entry in sections() if entry[0][:1] == ("dsframe",)]
    others = [entry for entry in sections() if not entry[0] or entry[0][0] not in ("dsframe", *REFUSED)]
    lines = [
        "# Configuration",
        "",
        "Every key of a file. Written by `make docs` from the schema; do not edit. Editors show the whole",
        "description of each key ([editors](checking.md#editors)).",
        "",
        "## The dsframe section",
        "",
        "A key that is bool is false by default. `enabled` switches a section on. Where a type has",
        '`{"epochs": 1}`, a number of epochs may be written for a number of steps.',
        "",
    ]
    seen: set[str] = set()
    for path, owner in own:
        lines += _section(path, owner, seen)
    lines += [
        "## DeepSpeed's keys",
        "",
        f"In short: [DeepSpeed's documentation]({DOCUMENTATION}) has the rest. They mean the same on",
        "every engine that supports them; others refuse them or say that they have no effect.",
        "",
        f"- Refused, because no engine of dsframe has them: {_names(REFUSED)}.",
        f"- No effect on a training: {_names(NO_EFFECT)}.",
        "",
    ]
    arguments = [entry for entry in others if entry[0][-1:] and entry[0][-1].startswith("params (")]
    for path, owner in others:
        is_arguments = any(owner is other for _, other in arguments)
        if not is_arguments and (not path or path[0] not in NO_EFFECT):
            lines += _section(path, owner, None)
        if path in (("optimizer",), ("scheduler",)):
            lines += _arguments([entry for entry in arguments if entry[0][:1] == path])
    return "\n".join(lines).rstrip() + "\n"


def _names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _section(path: tuple[str, ...], owner: type[Section], seen: set[str] | None) -> list[str]:
    """Returns the table of one section: in full, but for rows that were ``seen``, or in short (None)."""
    texts = describe(owner)
    properties = owner.model_json_schema()["properties"]
    keys = list(owner.model_fields)
    if seen is None:
        keys = [key for key in keys if not shape(owner, key).section and key not in (*REFUSED, *NO_EFFECT)]
    if not keys:
        return []
    title = ".".join(path)
    lines = [f"### {title or 'Top level'}", "", _plain(summary(owner), seen is not None), ""]
    if title in LISTED:
        return [*lines, f"{_names(keys)}.", ""]
    rows, repeated = [], []
    seldom = [
        key for key in keys if seen is None and (key in SELDOM.split() or texts.get(key, "").startswith("Deprecated"))
    ]
    for key in keys:
        kind = _type(owner, key, _limits(properties[key]))
        if key == "enabled" or key in seldom:
            continue
        default = _default(owner, key)
        kind += f", {default}" if default not in ("", "`false`") else ""
        row = " | ".join(_cell(text) for text in (f"`{key}`", kind, _plain(texts.get(key, ""), seen is not None)))
        if seen is not None and len(row) > 60 and row in seen:
            repeated.append(key)
        else:
            rows.append(f"| {row} |")
            if seen is not None:
                seen.add(row)
    lines += ["| key | type, default | meaning |", "|---|---|---|", *rows, ""]
    lines += [f"Also: {_names(seldom)}.", ""] if seldom else []
    return [*lines, f"As above: {_names(repeated)}.", ""] if repeated else lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _plain(text: str, full: bool) -> str:
    """Returns a docstring's first sentence in Markdown; ``full``: also the default, and what is refused."""
    first, *others = re.split(r"(?<=[.]) ", text.replace("``", "`"))
    kept = [sentence for sentence in others if sentence.startswith(("Default", "Refused", "Not with"))]
    return " ".join([first, *kept] if full else [first])


def _arguments(entries: list[tuple[tuple[str, ...], type[Section]]]) -> list[str]:
    """Returns the table of the arguments that each type of optimizer or schedule takes."""
    lines = ["| type | keys of `params` |", "|---|---|"]
    torch_classes = []
    for path, owner in entries:
        names = path[-1].removeprefix("params (").removesuffix(")").split(", ")
        if summary(owner).startswith("torch"):
            torch_classes += names
        else:
            keys = [key for key in owner.model_fields if key not in ("last_batch_iteration", *TORCH_SWITCHES)]
            lines.append(f"| {_names(names)} | {_names(keys)} |")
    return [*lines, f"| {_names(torch_classes)} | those of torch's class |", ""]


TORCH_SWITCHES = ("foreach", "maximize", "differentiable", "capturable", "fused")
"""Arguments of torch's classes that are left out of the tables."""


def messages() -> str:
    """Returns docs/messages.md: one line for each code."""
    lines = [
        "# Messages",
        "",
        "Every error, warning and note ends with a code in brackets. `dsframe explain CODE` prints more: why it matters,",
        "and an example. Written by `make docs` from dsframe/config/codes.py; do not edit.",
        "",
        "| code | meaning | what to write |",
        "|---|---|---|",
    ]
    for name, code in sorted(CODES.items()):
        cells = (f"`{name}`", _plain(code.means, full=False), code.write)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Returns each generated file with its text."""
    return {
        ROOT / "docs" / "configuration.md": configuration(),
        ROOT / "docs" / "messages.md": messages(),
        ROOT / "docs" / "commands.md": "\n".join(commands()).strip() + "\n",
        ROOT / "docs" / "api.md": re.sub(r"\n{3,}", "\n\n", "\n".join(api())).strip() + "\n",
        ROOT / "ds_configs" / "dsframe.schema.json": json.dumps(json_schema(), indent=1) + "\n",
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
