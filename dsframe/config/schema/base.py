"""Base classes and number types of the schema."""

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
    """One object of the file. Forbids unknown keys and conversions; immutable."""

    # The validator is built only when a file has the section: dsframe check must finish in 0.3 seconds.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True, protected_namespaces=())

    coerced: ClassVar[bool] = False
    """True if DeepSpeed reads this section with a pydantic model, which takes ``"2"`` as 2 and drops ``"auto"``."""
    folded: ClassVar[Mapping[str, str]] = {}
    """Keys whose values DeepSpeed compares case-insensitively -> the string method that it folds them with."""
    nullable: ClassVar[bool] = False
    """True if ``null`` counts as absent."""
    open: ClassVar[bool] = False
    """True if unknown keys are legal; dsframe does not read them."""
    wraps: ClassVar[bool] = False
    """True if DeepSpeed takes a single name as a list of one."""

    def has(self, key: str) -> bool:
        """True if the file itself has this key."""
        return key in self.model_fields_set

    def on(self, key: str) -> bool:
        """True if the file has this section and switches it on."""
        return self.has(key) and bool(getattr(self, key).enabled)

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> "SectionClass | None":
        """Returns the section class for ``raw[key]`` if that depends on the other values, such as a type name."""
        return None


class Coerced(Section):
    """A section that DeepSpeed reads with a pydantic model."""

    coerced: ClassVar[bool] = True


class Unmodelled(Section):
    """A section of DeepSpeed whose keys are not checked, because no engine uses it."""

    model_config = ConfigDict(extra="allow")

    open: ClassVar[bool] = True


class Switched(Unmodelled):
    """A section with an ``enabled`` key that no engine uses."""

    enabled: bool = False
    """Turns it on."""


class Epochs(Section):
    """A number of epochs in place of steps, rounded up to whole steps."""

    epochs: Positive
    """Number of epochs; 0.5 is half an epoch."""


class Interval(Epochs):
    """An interval in epochs in place of steps. It ends with the step in which its epochs end."""


Steps = Count | Epochs
"""1, 2, 3, ... optimizer steps, or ``{"epochs": 1}``."""
StepsOrNone = Size | Epochs
"""Like ``Steps``, but 0 is allowed."""
Every = Count | Interval
"""An interval in steps or epochs."""

SectionClass: TypeAlias = type[Section]
