"""Mixtures of experts whose experts are spread over ranks. Sources: as for ``parallel``."""

from typing import ClassVar

from dsframe.config.schema.base import Count, Section
from dsframe.config.schema.parameters import passed


@passed
class ExpertParallel(Section):
    """AutoEP: the experts of a mixture-of-experts model over several ranks."""

    nullable: ClassVar[bool] = True

    enabled: bool = False
    """Turns it on."""
    autoep_size: Count = 1
    """Ranks that share the experts."""
    preset_model: str | None = None
    """Name patterns of a known model."""
