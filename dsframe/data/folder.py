"""Image folders, one folder per class: ``<data_dir>/train/<class>/*.jpg`` and ``<data_dir>/val/<class>/*.jpg``."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from xxhash import xxh3_64_hexdigest

from dsframe.data._torchvision import torchvision
from dsframe.errors import DataError
from dsframe.text import Say, reason

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif", ".avif"}
)
_JUNK = frozenset({"__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information"})
"""Folders that operating systems create; those with a leading dot are skipped too."""
MOST_CHECKED = 100_000
"""Images that are opened before training; more would take too long."""
_WHOLE_BY_HEAD = ("WEBP", "AVIF")
"""Formats of which Pillow refuses to open truncated files."""
_TAIL = 1 << 16
_TEST_FOLDERS = ("val", "test", "eval")


def class_names(data_dir: str | None) -> list[str]:
    """Returns the classes: the sorted, NFC-normalised names of the folders in ``train``. Raises DataError."""
    if not data_dir:
        raise DataError('dataset "image-folder" needs data_dir: the folder that holds train/<class>/ and val/<class>/')
    folder = Path(data_dir).expanduser() / "train"
    if not folder.is_dir():
        raise DataError(f"image-folder: {folder} does not exist; images belong in {folder}/<class>/")
    names = sorted(_folders(folder))
    if not names:
        raise DataError(f"image-folder: {folder} holds no folder; images belong in {folder}/<class>/")
    return names


def _transform(images: Any, *, augment: bool, floored: bool = False) -> Any:
    """Returns a transform of an RGB Pillow image to normalised float32 ``[3, size, size]``. Arguments: as for :func:`load`.

    With ``augment``, ImageNet's usual augmentation: a random part, resized, and mirrored half of the time. Otherwise the
    image is resized as ``images`` say and the centre cropped.
    """
    made, size = torchvision().transforms, images.size
    random = [made.RandomResizedCrop(size), made.RandomHorizontalFlip()]
    centre = partial(_centre, size=size) if floored else made.CenterCrop(size)
    part = random if augment else [made.Resize(images.resized or round(size * 8 / 7), images.resample), centre]
    return made.Compose([*part, made.ToTensor(), made.Normalize(images.mean, images.std)])


def _centre(image: Any, size: int) -> Any:
    """Returns the centre of a Pillow image, cropped like the image processors of transformers."""
    left, top = ((side - size) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images decoded on access: the image transformed by ``look``, and the class's number."""

    def __init__(self, folder: Path, classes: list[str], transform: Callable[[Any], Tensor]) -> None:
        self._transform = transform
        folders = _folders(folder)
        unknown = sorted(folders.keys() - set(classes))
        if unknown:
            raise DataError(f"image-folder: {folder} has classes that train/ does not have: {', '.join(unknown)}")
        paths_of = {name: _files(folders[name]) if name in folders else [] for name in classes}
        self.samples = [
            (path, label)
            for label, name in enumerate(classes)
            for path in paths_of[name]
            if path.suffix.lower() in SUFFIXES
        ]
        present_labels = {label for _, label in self.samples}
        empty = [name for number, name in enumerate(classes) if number not in present_labels]
        if empty and folder.name == "train":
            raise DataError(f"image-folder: no images of {', '.join(empty)} in {folder}; remove the folder, or fill it")
        if not self.samples:
            raise DataError(f"image-folder: no images ({', '.join(sorted(SUFFIXES))}) in {folder}/<class>/")
        paths = [path for path, _ in self.samples]
        self.digest_of_files = digest_of([path.relative_to(folder).as_posix() for path in paths], paths)
        """Digest of the names and sizes of all images, in order."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path, label = self.samples[index]
        try:
            with Image.open(path) as file:
                image = rgb(file)
        except Exception as error:  # Pillow's readers may raise anything
            raise DataError(f"{path}: cannot be read as an image ({reason(error)})") from error
        return self._transform(image), label


def _folders(folder: Path) -> dict[str, Path]:
    """Returns the folders by NFC-normalised name, since some systems decompose accents. Raises DataError."""
    folders: dict[str, Path] = {}
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name not in _JUNK and not entry.name.startswith("."):
            other = folders.setdefault(unicodedata.normalize("NFC", entry.name), entry)
            if other != entry:
                names = " and ".join(sorted(map(ascii, (entry.name, other.name))))
                raise DataError(f"image-folder: {folder} has {names}, one name written in two ways: join these folders")
    return folders


def _files(folder: Path) -> list[Path]:
    """Returns the files below ``folder``, sorted, without hidden and system files."""
    paths = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        below = [Path(parent, name) for name in folders if name not in _JUNK and not name.startswith(".")]
        folders[:] = [path.name for path in below if not (path.is_symlink() and _is_above(path, parent))]
        paths += [Path(parent, name) for name in files if not name.startswith(".") and name != "Thumbs.db"]
    return sorted(paths)


def digest_of(names: Sequence[str], paths: Sequence[Path], most: int = MOST_CHECKED) -> str:
    """Returns a digest of names and sizes: a copy of the folder has the same, other pictures have other sizes. Of more
    than ``most`` files it has the sizes of some."""
    every = -(-len(paths) // most)
    sizes = [_size(path) for path in paths[::every]]
    joined = "\0".join(names)
    return xxh3_64_hexdigest(f"{joined}\0{sizes}".encode("utf-8", "surrogateescape"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # what reads it will say so
        return -1


def _is_above(link: Path, parent: str) -> bool:
    """True if a walk that follows the link would never end."""
    return Path(parent).resolve().is_relative_to(link.resolve())


def check(data_dir: str, classes: list[str], say: Say) -> None:
    """Opens the images of all splits. Raises DataError that lists all damaged files."""
    torchvision()  # raises if it is not installed
    root = Path(data_dir).expanduser()
    splits = [root / name for name in ("train", *_TEST_FOLDERS) if (root / name).is_dir()]
    files_of = {(split, name): _files(path) for split in splits for name, path in sorted(_folders(split).items())}
    files = [file for (_, name), inside in files_of.items() if name in classes for file in inside]
    paths = [file for file in files if file.suffix.lower() in SUFFIXES]
    pictures = {*paths}
    filled = {key for key, inside in files_of.items() if not pictures.isdisjoint(inside)}
    for split in splits[1:]:
        if lacking := [name for name in classes if (split, name) not in filled]:
            say(f"no images of {', '.join(lacking)} in {split}")
    if others := Counter(file.suffix.lower() or "no suffix" for file in files if file.suffix.lower() not in SUFFIXES):
        counts = ", ".join(f"{count} with {suffix}" for suffix, count in sorted(others.items()))
        say(f"files in {root} that are not read as images: {counts}")
    if len(paths) > MOST_CHECKED:
        say(f"{len(paths):,} images are not opened before training; a damaged one ends it where it is read")
        return
    with ThreadPoolExecutor(8) as pool:
        damaged = [f"{path} ({why})" for path, why in zip(paths, pool.map(_damage, paths), strict=True) if why]
    if damaged:
        more = f" and {len(damaged) - 10} more" if len(damaged) > 10 else ""
        raise DataError(f"{len(damaged)} files cannot be read as images: {'; '.join(damaged[:10])}{more}")


def _damage(path: Path) -> str:
    """Returns what is wrong with an image, as far as its beginning and end show; "" if nothing."""
    from PIL import Image

    try:
        if path.exists() and not path.is_file():
            return "it is not a file"  # opening a pipe would block
        with path.open("rb") as file:
            with Image.open(file) as image:
                refuse_unshown(image)
                image_format = image.format
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            tail = file.read()
            if image_format == "PNG":
                return "" if b"IEND" in tail else "its end is missing"
            # A JPEG may contain the end of its thumbnail, and after its own end a phone's video.
            if image_format not in _WHOLE_BY_HEAD and not (
                image_format == "JPEG" and tail.rstrip(b"\0\r\n").endswith(b"\xff\xd9")
            ):
                file.seek(0)
                Image.open(file).load()
    except Exception as error:  # Pillow's readers may raise anything
        return reason(error)
    return ""


def refuse_unshown(image: Any) -> None:
    """Raises ValueError for a Pillow image without a unique 8-bit appearance: several frames, or more than 8 bits."""
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # a camera's picture with previews
        raise ValueError(f"it has {image.n_frames} pictures; keep one")
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels have more than 8 bits (Pillow's mode {image.mode}); scale them to 0 to 255")


def rgb(image: Any) -> Any:
    """Returns a Pillow image as viewers show it: rotated by EXIF, transparency on white. Raises ValueError, OSError."""
    from PIL import Image, ImageOps

    refuse_unshown(image)
    image = ImageOps.exif_transpose(image)
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def load(
    data_dir: str,
    images: Any,
    *,
    train: bool,
    augment: bool,
    names: list[str] | None = None,
    floored: bool = False,
) -> ImageFolder:
    """Returns the training or validation images under ``data_dir``, with ``size``, ``mean`` and ``std`` of ``images``.

    ``names``: the classes by number; default: their folders in alphabetical order. ``floored``: True if the centre crop
    rounds its first pixel down, as transformers does. Raises DataError.
    """
    root = Path(data_dir).expanduser()
    folders = [root / name for name in (("train",) if train else _TEST_FOLDERS) if (root / name).is_dir()]
    if not folders:
        raise DataError(f"image-folder: {root} has none of {', '.join(_TEST_FOLDERS)} to evaluate on")
    transform = _transform(images, augment=augment, floored=floored)
    return ImageFolder(folders[0], names or class_names(data_dir), transform)
