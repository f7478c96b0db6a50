"""Keys of ``dsframe.task`` that every image task has."""

from typing import Any, Literal

from dsframe.config.schema.base import Count, Section, Size


class ImageData(Section):
    """Images and their classes."""

    name: str = ""
    """Kind of task."""
    model: Any = None
    """The model."""
    dataset: Literal["fashion-mnist", "mnist", "cifar10", "image-folder", "synthetic"] = "fashion-mnist"
    """Source of the images. ``image-folder`` reads ``data_dir/train/CLASS/*`` and ``data_dir/val/CLASS/*``."""
    data_dir: str | None = None
    """Folder of the data. Default: $DSFRAME_DATA, else ~/.cache/dsframe/data."""
    augment: bool = True
    """Random crop with padding and horizontal flip, in training only."""
    image_size: Count | None = None
    """Side length in pixels, for ``image-folder`` and ``synthetic``."""
    classes: Count | None = None
    """Number of classes, for ``synthetic``."""
    samples: Count | None = None
    """Number of training samples: the first ones of a file, fixed random ones of an ``image-folder``. Default: all."""
    workers: Size = 0
    """Processes that load images, for ``image-folder``."""
