"""Mixtures of experts whose experts are spread over ranks. Sources: as for ``parallel``."""

from typing import ClassVar

from dsframe.config.schema.base import Count
from dsframe.config.schema.parameters import passed


class ExpertParallel(passed("ExpertParallel")):  # type: ignore[misc]  # keys from a table
    """AutoEP: the experts of a mixture-of-experts model over several ranks."""

    nullable: ClassVar[bool] = True

    enabled: bool = False
    """Turns it on."""
    autoep_size: Count = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: Count = 1
    """Ranks that share one expert."""
    preset_model: str | None = None
    """Name patterns of a known model."""
