"""A run's folder of checkpoints on disk: written under another name, renamed when whole, verified before use.

    RUN_DIR/checkpoints/step-00000042/manifest.json      written last: what is here, with size and checksum of every file
                                      part-00000-000.safetensors, rng.json, ...
                        step-00000040.damaged/           found damaged and set aside, with a warning
                        .step-00000044.partial/          a save under way, or cut off: never looked at
                        latest                           the name of the newest, for people and scripts
                        best                             the name of the best, where the file says "keep_best"

A rename is atomic and follows the fsync of everything in it, so a checkpoint is whole or not there, whatever ends the
process or the machine. Nothing here is collective, and nothing imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from dsframe.config.resolve import epochs
from dsframe.errors import CheckpointError
from dsframe.results import best_step

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
FORMAT = 2
"""The portable form's number."""
SHARDED_FORMAT = 3
"""The sharded form's: the portable one with parameters in pieces. A dsframe that knows only that refuses it by the number."""
_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CHUNK = 1 << 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_AHEAD = 8 << 20
"""Bytes after which a file's writing to the disk begins, before all of it is there."""
_Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
"""The name of a parameter or a moment: anything that can be printed in one line."""


@dataclass(frozen=True)
class FileEntry:
    """One file as the manifest has it."""

    bytes: int
    xxh3_128: str
    """Checksum of the content, in hexadecimal: https://xxhash.com, as fast as memory. It finds damage; it is no signature."""


class OtherFormatError(CheckpointError):
    """The checkpoint is complete, but has a format of another version of dsframe."""


class UnreadableError(CheckpointError):
    """This process cannot read a checkpoint (disk, network, permission); it may be complete."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    last: int = 2
    """Number of newest checkpoints to keep."""
    best: str | None = None
    """``METRIC:min`` or ``METRIC:max``: also keep the best by that metric of the evaluation."""
    every: Fraction | None = None
    """Keep also those at multiples of so many steps."""

    def keeps(self, evaluations: Mapping[int, Mapping[str, float | None]]) -> set[int]:
        """Returns the steps to keep out of those in ``evaluations`` (step -> its metrics)."""
        steps = sorted(evaluations)
        kept = set(steps[-self.last :])
        if self.every:
            kept |= {step for step in steps if epochs.due(step, self.every)}
        best = best_step(evaluations, self.best) if self.best else None
        return kept if best is None else kept | {best}


class Store:
    """The checkpoints of one run."""

    def __init__(self, directory: Path) -> None:
        """``directory``: need not exist yet."""
        self.directory = directory

    def path(self, step: int) -> Path:
        """Returns where the checkpoint of ``step`` is, or would be."""
        return self.directory / f"step-{step:08}"

    def partial(self, step: int) -> Path:
        """Returns where it is written."""
        return self.directory / f".step-{step:08}.partial"

    def newest_first(self) -> list[Path]:
        """Every checkpoint by name, verified or not."""
        if not self.directory.is_dir():
            return []
        numbered = [(step, path) for path in self.directory.iterdir() if (step := step_of(path)) is not None]
        return [path for _, path in sorted(numbered, reverse=True)]

    def damaged(self) -> list[str]:
        """Names of those that were set aside."""
        return sorted(path.name for path in self.directory.glob("step-*.damaged*"))

    def begin(self, step: int) -> Path:
        """An empty folder to write into. Raises OSError (full disk, no permission), CheckpointError where the step is there."""
        if self.path(step).exists():
            raise CheckpointError(f"{self.path(step)} exists already")
        folder = self.partial(step)
        remove(folder)  # cut off earlier; partial folders are never read
        folder.mkdir(parents=True)
        return folder

    def commit(self, step: int, manifest: Mapping[str, Any]) -> Path:
        """The step's folder, written by all ranks, becomes a checkpoint; then ``latest`` points to it. Raises OSError."""
        folder, final = self.partial(step), self.path(step)
        write(folder / MANIFEST, dump(manifest))
        sync_folder(folder)
        folder.rename(final)
        sync_folder(self.directory)
        self._point(LATEST, step)
        return final

    def _point(self, pointer: str, step: int | None) -> None:
        """Makes a pointer name the checkpoint of ``step``; None: removes it. Raises OSError."""
        path, partial = self.directory / pointer, self.directory / f".{pointer}.partial"
        if step is None:
            path.unlink(missing_ok=True)
            return
        content = f"{self.path(step).name}\n".encode()
        if path.is_file() and path.read_bytes() == content:
            return
        write(partial, content)
        partial.rename(path)
        sync_folder(self.directory)

    def rate(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Adds the evaluation after ``step`` to its checkpoint, whose manifest is whole before and after. Raises OSError,
        CheckpointError."""
        path = self.path(step)
        partial = path / f".{MANIFEST}.partial"
        remove(partial)  # cut off earlier
        write(partial, dump({**read_manifest(path), "evaluation": finite(evaluation)}))
        partial.replace(path / MANIFEST)
        sync_folder(path)

    def abandon(self, step: int) -> None:
        """Removes the files of a failed save."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def prune(self, retention: Retention) -> list[int]:
        """Removes checkpoints that need not be kept and returns their steps. The newest always stays, and damaged ones do. ``best``
        points to the best of those that stay."""
        evaluations: dict[int, Mapping[str, float | None]] = {}
        for path in self.newest_first():
            try:
                evaluations[int(path.name[5:])] = dict(read_manifest(path).get("evaluation") or {})
            except CheckpointError:
                continue  # to be found, named and set aside when somebody wants to use it
        doomed = sorted(set(evaluations) - retention.keeps(evaluations))
        self._point(BEST, best_step(evaluations, retention.best) if retention.best else None)
        for step in doomed:
            hidden = self.directory / f".step-{step:08}.removed"
            remove(hidden)
            self.path(step).rename(hidden)  # so that half a removal does not look like damage
            remove(hidden)
        return doomed

    def remove_unfinished(self) -> list[str]:
        """Removes unfinished saves and removals, and returns their names."""
        if not self.directory.is_dir():
            return []
        left = sorted(path for path in self.directory.glob(".*") if path.suffix in (".partial", ".removed"))
        for path in left:
            remove(path)
        return [path.name for path in left]

    def set_aside(self, path: Path) -> Path:
        """Renames a damaged checkpoint so that it is never taken for a good one, and is still there to look at."""
        target = _free(path.with_name(f"{path.name}.damaged"))
        path.rename(target)
        return target

    def archive_earlier(self, after: int | None = None) -> Path | None:
        """Moves an earlier run's checkpoints into ``checkpoints.1`` (2, ...), so that a new one does not mix with them. Where
        ``checkpoints`` is a link, to another disk perhaps, it stays one: they go into ``checkpoints/earlier.1``.

        ``after``: only whole ones of later steps. Returns where to, None where there are none. Raises OSError.
        """
        earlier = [path for path in self.newest_first() if after is None or (step_of(path) or 0) > after]
        if not earlier and (after is not None or not self.damaged()):
            return None
        linked = self.directory.is_symlink()
        base = self.directory / "earlier" if linked else self.directory
        number = 1
        while (target := base.with_name(f"{base.name}.{number}")).exists():
            number += 1
        if after is None and not linked:
            self.directory.rename(target)
            return target
        target.mkdir()
        if after is None:
            earlier = [path for path in self.directory.iterdir() if path.name.startswith(("step-", LATEST, BEST))]
        for path in earlier:
            path.rename(target / path.name)
        best = self.directory / BEST
        if best.is_file() and not self.directory.joinpath(best.read_text().strip()).exists():
            best.unlink()
        return target


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder, None for anything else."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and path.is_dir() else None


def locate(path: Path, *, best: bool = False) -> list[Path]:
    """The checkpoints that ``path`` means, newest first: a checkpoint, a file that points to one, a folder of checkpoints, or a
    run's folder. ``best``: of a folder the one that is best by the run's "keep_best".

    Raises CheckpointError where there is none.
    """
    if path.name in (LATEST, BEST) and path.is_file():
        return [_pointed(path)]
    if best:
        for folder in (path, path / "checkpoints"):
            if (folder / BEST).is_file():
                return [_pointed(folder / BEST)]
        raise CheckpointError(
            f"{path} has no best checkpoint: a run has one from its first evaluation on, where its file says "
            '"checkpoints": {"keep_best": "METRIC:min"}'
        )
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return [path]
    for folder in (path, path / "checkpoints"):
        if checkpoints := Store(folder).newest_first():
            return checkpoints
    what = "does not exist" if not path.exists() else "is neither a checkpoint nor a folder that holds one"
    raise CheckpointError(f"{path} {what}")


def _pointed(pointer: Path) -> Path:
    """The checkpoint that a file points to. Raises CheckpointError."""
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    folder = pointer.parent / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        raise CheckpointError(f"{pointer} names {name!r}, and there is no such checkpoint beside it")
    return folder


def complete(path: Path, *, best: bool = False) -> Path:
    """The newest complete checkpoint that ``path`` means, or the best one. Raises CheckpointError."""
    candidates = locate(path, best=best)
    checkpoint = next((candidate for candidate in candidates if not verify(candidate)), None)
    if checkpoint is None:
        raise CheckpointError(f"{candidates[0]}: damaged: {'; '.join(verify(candidates[0]))}")
    return checkpoint


def finite(evaluation: Mapping[str, float]) -> dict[str, float | None]:
    """Returns an evaluation as JSON has it: null for what is not a finite number."""
    return {name: value if math.isfinite(value) else None for name, value in evaluation.items()}


def config_of(checkpoint: Path) -> Path:
    """The file of the run that wrote a ``checkpoint``. Raises CheckpointError where it is not beside it."""
    file = checkpoint.resolve().parent.parent / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{checkpoint} is not in a run's directory, which has its config.json; give --config FILE"
        )
    return file


def read_manifest(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest. Raises CheckpointError where it is missing or damaged; OtherFormatError, UnreadableError."""
    try:
        content = (path / MANIFEST).read_bytes()
    except OSError as error:
        kind = CheckpointError if isinstance(error, FileNotFoundError) else UnreadableError
        raise kind(f"{path}: {MANIFEST}: {error.strerror}") from None
    try:
        outer = json.loads(content)
        manifest: dict[str, Any] = outer["manifest"]
        whole = dump(manifest) == content  # every byte is accounted for: numbers print as they were read
        written = int(manifest["format"]) if whole else FORMAT
        entries = manifest["files"].items() if written in (FORMAT, SHARDED_FORMAT) else ()
        files = {str(name): FileEntry(**entry) for name, entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: {MANIFEST} is damaged")
    if written not in (FORMAT, SHARDED_FORMAT):
        raise OtherFormatError(
            f"{path} has format {written}, this dsframe reads {FORMAT} and {SHARDED_FORMAT}; it was written by dsframe "
            f"{manifest.get('versions', {}).get('dsframe', 'of another version')}"
        )
    for name in files:
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"{path}: {name!r} is not the name of a file in a checkpoint")
    _check_content(path, manifest)
    return manifest


class _Known(BaseModel):
    """The values of a manifest that somebody computes with or makes a name of. A checksum says who is careless, not who lies."""

    model_config = ConfigDict(strict=True)

    step: NonNegativeInt = 0
    updates: NonNegativeInt = 0
    learning_rate: float = 0.0
    loss: float | None = None
    evaluation: dict[str, float | None] | None = None
    loss_scale: dict[str, float] | None = None
    schedule: dict[str, float | None] | None = None
    stop: dict[str, float | str | None] | None = None
    parameters: dict[_Name, _Parameter] = {}
    aliases: dict[_Name, _Name] = {}
    training: dict[str, Any] = {}
    course: dict[str, Any] = {}
    run: dict[str, Any] = {}
    versions: dict[str, str | None] = {}
    source: dict[str, str] = {}
    data: dict[str, str] = {}


class _Parameter(BaseModel):
    model_config = ConfigDict(strict=True)

    file: str | None = None
    pieces: list[Annotated[tuple[str, NonNegativeInt, PositiveInt], Field(strict=False)]] = []
    shape: list[NonNegativeInt]
    moments: list[_Name]
    scalars: dict[str, float]

    def wrong(self, files: Collection[str]) -> str:
        """Returns what is wrong with where it lies; "" where nothing is."""
        if (self.file is None) != bool(self.pieces):
            return "lies neither in a file nor in pieces" if self.file is None else "lies in a file and in pieces"
        for file in [self.file] if self.file is not None else [piece[0] for piece in self.pieces]:
            if file not in files:
                return f"is in {file!r}, which is no file of it"
        end = 0
        for _, first, size in sorted(self.pieces, key=lambda piece: piece[1]):
            if first != end:
                return f"has pieces that {'overlap' if first < end else 'leave a gap'} at element {min(first, end)}"
            end += size
        if self.pieces and end != math.prod(self.shape):
            return f"has pieces of {end} elements, and {math.prod(self.shape)} by its shape"
        return ""


def _check_content(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a manifest that no dsframe has written, whatever its checksum says."""
    try:
        known = _Known.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: {MANIFEST}: {where!r}: {first['msg']}; dsframe has not written this") from None
    named = _NAME.fullmatch(path.name)
    if named and "step" in manifest and int(named[1]) != known.step:
        raise CheckpointError(
            f"{path}: {MANIFEST} is of step {known.step}; a folder was renamed, or the file was copied"
        )
    for name, entry in known.parameters.items():
        if wrong := entry.wrong(manifest["files"]):
            raise CheckpointError(f"{path}: {MANIFEST}: parameter {name!r} {wrong}")
    if lost := [alias for alias, name in known.aliases.items() if name not in known.parameters]:
        raise CheckpointError(f"{path}: {MANIFEST}: {lost[0]!r} is another name of a parameter that is not there")


def verify(path: Path) -> list[str]:
    """Returns what is wrong with a checkpoint, a line each; none where it is whole. Raises as :func:`damage` does."""
    return list(damage(path).values())


def damage(
    path: Path, names: Collection[str] | None = None, sign_of_life: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """The missing, truncated and altered files of a checkpoint: name -> what is wrong; the manifest alone where that is.

    ``names``: read only these files; by default all. Reads them once, a megabyte at a time. ``sign_of_life``: called after each.
    Raises OtherFormatError, and UnreadableError where something but the file itself is wrong.
    """
    try:
        manifest = read_manifest(path)
    except (OtherFormatError, UnreadableError):
        raise
    except CheckpointError as error:
        return {MANIFEST: str(error)}
    wrong = {}
    for name, entry in manifest["files"].items():
        if names is not None and name not in names:
            continue
        file = path / name
        try:
            if file.is_symlink():  # it may lead anywhere
                wrong[name] = f"{name} is a symbolic link, not a file"
                continue
            size = file.stat().st_size
            if size != entry["bytes"]:
                wrong[name] = f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
            elif checksum(file) != entry["xxh3_128"]:
                wrong[name] = f"{name} was altered: its checksum differs"
        except FileNotFoundError as error:
            wrong[name] = f"{name}: {error.strerror}"
        except OSError as error:
            raise UnreadableError(f"{path}: {name}: {error.strerror}") from None
        sign_of_life()
    return wrong


def dump(manifest: Mapping[str, Any]) -> bytes:
    """The manifest's bytes, with a checksum of itself: the same for the same content."""
    text = json.dumps(manifest, sort_keys=True, allow_nan=False)
    outer = {"manifest": manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return (json.dumps(outer, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write(path: Path, *pieces: bytes | memoryview, sync: bool = True) -> FileEntry:
    """A new file of these ``pieces``; the checksum is of what is in memory. Raises OSError.

    With ``sync`` it is on the disk when this returns, else :func:`sync_files` brings it there.
    """
    with FileWriter(path, sync=sync) as file:
        for piece in pieces:
            file.write(piece)
        return file.finish()


class FileWriter:
    """A new file, written piece by piece; the checksum is of what is in memory. Every method raises OSError."""

    def __init__(self, path: Path, *, sync: bool = True) -> None:
        """``sync``: As :func:`write` takes it."""
        self._path, self._found, self._size, self._begun, self._sync = path, xxhash.xxh3_128(), 0, 0, sync
        self._file = path.open("xb")

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what did not come to finish() is no file
            self._file.close()

    def write(self, piece: bytes | memoryview) -> None:
        """Adds ``piece``."""
        self._found.update(piece)
        self._size += len(piece)
        with self._named():
            self._file.write(piece)
            if self._sync and self._size - self._begun >= _AHEAD:
                # Linux begins to write these pages to the disk now, and drops none before: fsync finds little left to do.
                os.posix_fadvise(self._file.fileno(), self._begun, self._size - self._begun, os.POSIX_FADV_DONTNEED)
                self._begun = self._size

    def finish(self) -> FileEntry:
        """All of it is on the disk when this returns, or, without ``sync``, with the system."""
        with self._named():
            self._file.flush()
            if self._sync:
                os.fsync(self._file.fileno())
        return FileEntry(self._size, self._found.hexdigest())

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno, error.strerror, str(self._path)
            ) from None  # a write's error does not name the file


def write_range(path: Path, begin: int, content: bytes | memoryview) -> None:
    """Writes ``content`` from byte ``begin`` on into a file, which is made where it is not there: for several processes that
    write one file together. It is with the system when this returns. Raises OSError."""
    left = memoryview(content)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while left:
                written = os.pwrite(descriptor, left, begin)
                left, begin = left[written:], begin + written
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # a write's error does not name the file


def read_entry(path: Path, size: int) -> FileEntry:
    """The entry of a file of ``size`` bytes that several processes have written. Raises OSError, also where it is not as long."""
    bytes_read = path.stat().st_size
    if bytes_read != size:
        raise OSError(errno.EIO, f"it has {bytes_read:,} bytes instead of {size:,}", str(path))
    return FileEntry(size, checksum(path))


def folder_id(path: Path) -> str:
    """The same text for all processes of one kernel that see the same folder, and for no others: what one of them has written
    into a file there, each of them reads."""
    try:
        kernel, status = _BOOT.read_text().strip(), path.stat()
    except OSError:
        return os.urandom(16).hex()  # nobody else's
    return f"{kernel} {status.st_dev} {status.st_ino}"


def checksum(path: Path) -> str:
    """XXH3-128 of a file. Raises OSError."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def remove(path: Path) -> None:
    """A folder with all that is in it, a file, or a link and not what it leads to; nothing where there is none. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def sync_files(folder: Path, names: Iterable[str], sign_of_life: Callable[[], None]) -> None:
    """Waits until files that were written without ``sync`` are on the disk. Raises OSError."""
    for name in names:
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder / name)) from None  # which does not name the file
        finally:
            os.close(descriptor)
        sign_of_life()


def sync_folder(path: Path) -> None:
    """Makes new and renamed names in ``path`` last: they are the folder's content, not the file's."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(path: Path) -> Path:
    number, target = 1, path
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}-{number}")
    return target
