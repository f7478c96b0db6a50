"""What every section of the schema has in common."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

AUTO: Final = "auto"

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
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""``package.module:Name``."""


class Section(BaseModel):
    """One object of the file: no unknown keys, no conversions, unchangeable once read."""

    # A validator is built when a file has the section: dsframe check has 0.3 seconds.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True, protected_namespaces=())

    coerced: ClassVar[bool] = False
    """DeepSpeed reads this section with a pydantic model of its own, which takes ``"2"`` for 2 and drops ``"auto"``."""
    folded: ClassVar[Mapping[str, str]] = {}
    """Keys whose values DeepSpeed compares without regard to case, and the case it folds to."""
    nullable: ClassVar[bool] = False
    """``null`` counts as absent."""
    open: ClassVar[bool] = False
    """Keys that are not fields are legal: dsframe does not read them."""
    wraps: ClassVar[bool] = False
    """DeepSpeed takes one name for a list of one."""

    def has(self, key: str) -> bool:
        """True if the file itself has this key."""
        return key in self.model_fields_set

    def on(self, key: str) -> bool:
        """True if the file has this section and switches it on."""
        return self.has(key) and bool(getattr(self, key).enabled)

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> "SectionClass | None":
        """The section class that describes ``raw[key]`` where that depends on the other values, such as a type name."""
        return None


class Coerced(Section):
    """A section that DeepSpeed reads with a pydantic model of its own."""

    coerced: ClassVar[bool] = True


class Unmodelled(Section):
    """A section of DeepSpeed's whose keys are not checked: it trains nothing here."""

    model_config = ConfigDict(extra="allow")

    open: ClassVar[bool] = True


class Switched(Unmodelled):
    """A section that no training here uses."""

    enabled: bool = False
    """Turns it on."""


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
