"""What every section of the schema has in common.

The modules of this package do not use ``from __future__ import annotations``: pydantic would evaluate each annotation
from its text, and ``dsframe check`` has 0.3 seconds. For the same reason the docstrings under the fields are read by
``dsframe.tools.schema`` only when somebody asks for them, each section's validator is built on first use, and sections that
few files have are imported for those files alone (``later``).
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

AUTO: Final = "auto"
STAND_IN: Final = "section"
"""Key of the JSON Schema of a stand-in: the name of its class."""
_S = TypeVar("_S", bound="Section")

Count = Annotated[int, Field(gt=0)]
"""1, 2, 3, ..."""
Size = Annotated[int, Field(ge=0)]
"""0, 1, 2, ..."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
"""0.0 to 1.0, both included."""
Real = Annotated[float, Field(allow_inf_nan=False)]
"""Any finite number."""
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
"""0.0 or more, finite."""
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
"""More than 0.0, finite."""


class Section(BaseModel):
    """One object of the file: no unknown keys, no conversions, unchangeable once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True, protected_namespaces=())

    coerced: ClassVar[bool] = False
    """DeepSpeed reads this section with a pydantic model of its own, which takes ``"2"`` for 2 and drops ``"auto"``."""
    folded: ClassVar[Mapping[str, str]] = {}
    """Keys whose values DeepSpeed compares without regard to case, and the case it folds to."""
    nullable: ClassVar[bool] = False
    """``null`` counts as absent."""
    open: ClassVar[bool] = False
    """Keys that are not fields are legal: they go to a callable that dsframe does not know."""

    def has(self, *path: str) -> bool:
        """True if the file itself has this key. Asking for a section's values imports its class, which few files need."""
        owner = self
        for section in path[:-1]:
            if section not in owner.model_fields_set:
                return False
            owner = getattr(owner, section)
        return path[-1] in owner.model_fields_set

    def on(self, key: str) -> bool:
        """True if the file has this section and switches it on."""
        return key in self.model_fields_set and bool(getattr(self, key).enabled)

    @classmethod
    def of(cls: type[_S], values: Mapping[str, Any]) -> _S:
        """The section of these values, each a checked one. A section that few files have gets its defaults when it is asked for."""
        rare = {key for key, field in cls.model_fields.items() if isinstance(field.annotation, Later)} - values.keys()
        made = cls.model_construct(set(values), **dict.fromkeys(rare), **values)
        for key in rare:
            del made.__dict__[key]
        return made

    @classmethod
    def checked(cls: type[_S], raw: Mapping[str, Any]) -> _S:
        """The section of what a file has, as ``model_validate`` makes it. Only the checks of the keys that are there are built.

        Raises pydantic's ValidationError.
        """
        keys = tuple(key for key, field in cls.model_fields.items() if key in raw or field.is_required())
        part = _part(cls, keys).model_validate(raw)
        return cls.of({key: part.__dict__[key] for key in raw})

    if not TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            field = type(self).model_fields.get(key)
            if field is None or not isinstance(field.annotation, Later):
                return super().__getattr__(key)
            return self.__dict__.setdefault(key, field.get_default(call_default_factory=True))

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> "SectionClass | None":
        """The section class that describes ``raw[key]`` where that depends on the other values, such as a type name."""
        return None


@cache
def _part(owner: type[Section], keys: tuple[str, ...]) -> type[Section]:
    """A class that has these keys of ``owner`` and no others; ``owner`` itself where it has few more."""
    fields = owner.model_fields
    if 2 * len(keys) > len(fields):
        return owner
    chosen: dict[str, Any] = {key: (fields[key].annotation, fields[key]) for key in keys}
    return create_model(owner.__name__, __base__=Section, __module__=owner.__module__, **chosen)


class Epochs(Section):
    """Epochs in place of steps: as many steps as they take, rounded up."""

    epochs: Positive
    """How many; 0.5 is half of one."""


class Interval(Epochs):
    """Epochs in place of steps, between two of them: an interval ends with the step in which its epochs end."""


Steps = Count | Epochs
"""1, 2, 3, ... optimizer steps, or ``{"epochs": 1}``."""
StepsOrNone = Size | Epochs
"""0 too."""
Every = Count | Interval
"""So many steps, again and again."""

SectionClass: TypeAlias = type[Section]
"""A class of sections."""


class Later(type):
    """The type of a stand-in for a section class whose module is imported when a file has that section.

    pydantic takes the stand-in as an annotation: it validates what the class itself would.
    """

    home: str
    """The module of the class, whose name the stand-in has."""

    def section(cls) -> SectionClass:
        """The class itself."""
        found: SectionClass = getattr(import_module(cls.home), cls.__name__)
        return found

    def model_construct(cls) -> Section:
        """Returns a section with all defaults, as the class's own ``model_construct`` does."""
        return cls.section().model_construct()

    @property
    def model_fields(cls) -> Any:
        """The class's own."""
        return cls.section().model_fields

    def model_validate(cls, value: Any) -> Any:
        """The class's own."""
        return cls.section().model_validate(value)

    def __call__(cls, **values: Any) -> Any:
        return cls.section()(**values)

    def __instancecheck__(cls, found: object) -> bool:
        return cls.home in sys.modules and isinstance(found, cls.section())

    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(cls.model_validate)

    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        return {
            STAND_IN: cls.__name__
        }  # pydantic has no definition of it; dsframe.tools.schema makes a reference and the definition


def later(module: str, *names: str) -> tuple[Later, ...]:
    """Stand-ins for section classes of ``dsframe.config.schema.MODULE``, to be named as the classes are."""
    home = f"dsframe.config.schema.{module}"
    return tuple(Later(name, (), {"home": home}) for name in names)


class Classes(Mapping[str, SectionClass]):
    """Name -> section class, imported when it is looked up. Made from name -> ``module:Class`` in ``dsframe.config.schema``."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def __getitem__(self, name: str) -> SectionClass:
        module, _, cls = self._homes[name].partition(":")
        found: SectionClass = getattr(import_module(f"dsframe.config.schema.{module}"), cls)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, name: object) -> bool:
        return name in self._homes
