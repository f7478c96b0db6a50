"""Sections for each type's ``optimizer.params`` and ``scheduler.params``, and for keys that only DeepSpeed reads, from
the table ``parameters.json``.

A row holds a key's type, default (absent: required) and meaning. Sources: DeepSpeed 0.19.8
(``DeepSpeedEngine._configure_basic_optimizer``, ``runtime/lr_schedules.py``), torch 2.13 (``torch.optim``,
``torch.optim.lr_scheduler``), transformers 5.23 (``optimization.py``).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Optional, TypeVar

from pydantic import ConfigDict, Field, create_model

from dsframe.config.schema.base import (
    Count,
    Fraction,
    ModuleName,
    NonNegative,
    Real,
    Section,
    SectionClass,
    Size,
    Steps,
    StepsOrNone,
    Switched,
)
from dsframe.text import table_of

Owner = TypeVar("Owner", bound=Section)
TorchDtype = Literal[
    "torch.float16", "fp16", "float16", "half", "torch.bfloat16", "bf16", "bfloat16",
    "torch.float32", "fp32", "float32", "float", "torch.int8", "int8",
]  # fmt: skip
"""The spellings of DeepSpeed's ``DtypeEnum``."""
Part = Annotated[float, Field(gt=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class SchedulePart(Section):
    """A schedule of torch inside another one."""

    type: str
    """A class of ``torch.optim.lr_scheduler``. Required."""
    params: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Its arguments."""

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> SectionClass | None:
        return TORCH_SCHEDULERS.get(str(raw.get("type"))) if key == "params" else None


_TYPES: Mapping[str, Any] = {
    "bool": bool,
    "int": int,
    "text": str,
    "texts": list[str],
    "list": list[Any],
    "dtype": TorchDtype,
    "switched": Switched,
    "count": Count,
    "size": Size,
    "number": Real,
    "number >= 0": NonNegative,
    "number <= 0": Annotated[float, Field(le=0.0, allow_inf_nan=False)],
    "number >= 1": Annotated[float, Field(ge=1.0, allow_inf_nan=False)],
    "above 0 to 1": Annotated[float, Field(gt=0.0, le=1.0)],
    "newton-schulz": Literal["gram", "standard"],
    "share": Share,
    "fraction": Fraction,
    "inside 0 to 1": Part,
    "steps": Steps,
    "steps or 0": StepsOrNone,
    "warm-up": Steps | Part,
    "warm-up or 0": StepsOrNone | Part,
    "rates": NonNegative | list[NonNegative],
    "milestones": list[StepsOrNone],
    "betas": Annotated[list[Share], Field(min_length=2, max_length=2)],
    "etas": tuple[Part, Annotated[float, Field(gt=1.0, allow_inf_nan=False)]],
    "pair": Annotated[list[Real], Field(min_length=2, max_length=2)],
    "pair?": Annotated[list[Real | None], Field(min_length=2, max_length=2)],
    "module:name": ModuleName,
    "null": None,
    "int or auto": int | Literal["auto"],
    "number or auto": Real | Literal["auto"],
    "count or auto": Literal["auto"] | Count,
    "texts or auto": Literal["auto"] | list[str],
    "schedules": Annotated[list[SchedulePart], Field(min_length=1)],
}


class _Open(Section):
    """Parameters of a callable that dsframe does not know."""

    model_config = ConfigDict(extra="allow")

    open: ClassVar[bool] = True


def _type(written: Any) -> Any:
    if isinstance(written, list):
        return Literal[tuple(written)]
    name = written.removesuffix(" or null")
    return _TYPES[name] if name == written else Optional[_TYPES[name]]  # noqa: UP045 - of a value


def _fields(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: (_type(written), Field(*default, description=text)) for key, (written, *default, text) in keys.items()}


def _sections(rows: Mapping[str, Any]) -> dict[str, SectionClass]:
    made: dict[str, SectionClass] = {}
    for name, row in rows.items():
        base = made.get(row.get("like"), _Open if row.get("open") else Section)
        made[name] = create_model(name, __base__=base, __doc__=row["about"], **_fields(row["keys"]))
    return made


_TABLE = table_of(__file__)
_SECTIONS = _sections(_TABLE["parameters"])


def _named(group: str) -> dict[str, SectionClass]:
    return {name: _SECTIONS[section] for name, section in _TABLE[group].items()}


DEEPSPEED_OPTIMIZERS = _named("optimizers of DeepSpeed")
"""Lower-case name -> parameters: DeepSpeed ignores the case."""
TORCH_OPTIMIZERS = _named("optimizers of torch")
"""Class of ``torch.optim`` (case-sensitive) -> parameters."""
OWN_OPTIMIZER = _SECTIONS["OwnParams"]
"""Parameters of a custom optimizer, ``module:Class``."""
DEEPSPEED_SCHEDULERS = _named("schedulers of DeepSpeed")
TORCH_SCHEDULERS = _named("schedulers of torch")
HF_SCHEDULERS = _named("schedulers of dsframe")
"""Schedules that only dsframe knows, for files with a "dsframe" section."""
WITHOUT_ROUTE: Mapping[str, Mapping[str, str]] = _TABLE["without a route"]
"""Names that cannot be used as ``optimizer.type`` or ``scheduler.type``, and why."""


def passed(section: type[Owner]) -> type[Owner]:
    """Adds the keys of the section that only DeepSpeed reads. dsframe does not use their values."""
    fields: Any = _fields(_TABLE["passed"][section.__name__])
    return create_model(
        section.__name__, __base__=section, __doc__=section.__doc__, __module__=section.__module__, **fields
    )
