"""A run's folder of checkpoints: written under a temporary name, renamed when complete, verified before use.

    RUN_DIR/checkpoints/step-00000042/manifest.json      written last: content, with size and checksums of every file
                                      model.safetensors, optimizer.safetensors, rng.json, ...
                        step-00000040.damaged/           found damaged and set aside, with a warning
                        .step-00000044.partial/          a save in progress, or interrupted: never read
                        latest                           the name of the newest, for people and scripts
                        best                             the name of the best, if the file says "keep_best"

A rename is atomic and follows the fsync of all content, so a checkpoint is complete or absent, however the process or
the machine ends. Nothing here is collective, and nothing imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from dsframe.checkpoint import old_forms
from dsframe.checkpoint.byte_files import damage_of, remove, sync_folder, write
from dsframe.config.read.suggest import near_path
from dsframe.config.resolve import epochs
from dsframe.errors import CheckpointError
from dsframe.results import Metrics, best_step
from dsframe.text import Json, without_nonfinite

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
FORMAT = 4
_WIDTHS = {8: "F64 C64 I64 U64", 4: "F32 I32 U32", 2: "F16 BF16 I16 U16", 1: "F8_E4M3 F8_E5M2 I8 U8 BOOL"}
WIDTHS = {name: width for width, names in _WIDTHS.items() for name in names.split()}
"""Bytes of an element, by safetensors' dtype names."""
_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
"""The name of a parameter or a moment: any printable text in one line."""


class OtherFormatError(CheckpointError):
    """The checkpoint is complete, but has the format of another version of dsframe."""


class UnreadableError(CheckpointError):
    """This process cannot read a checkpoint (disk, network, permission); it may be complete."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep."""

    last: int = 2
    """Number of newest checkpoints to keep."""
    best: str | None = None
    """``METRIC:min`` or ``METRIC:max``: also keep the best by that metric of the evaluation."""
    every: Fraction | None = None
    """Also keep those at multiples of this number of steps."""

    def keeps(self, evaluations: Mapping[int, Mapping[str, float | None]]) -> set[int]:
        """Returns the steps to keep of those in ``evaluations`` (step -> its metrics)."""
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
        """Returns the path of the checkpoint of ``step``, whether it exists or not."""
        return self.directory / f"step-{step:08}"

    def partial(self, step: int) -> Path:
        """Returns the path of the folder while it is written."""
        return self.directory / f".step-{step:08}.partial"

    def newest_first(self) -> list[Path]:
        """Returns every checkpoint by name, newest first, verified or not."""
        if not self.directory.is_dir():
            return []
        numbered = [(step, path) for path in self.directory.iterdir() if (step := step_of(path)) is not None]
        return [path for _, path in sorted(numbered, reverse=True)]

    def damaged(self) -> list[str]:
        """Returns the names of checkpoints that were set aside."""
        return sorted(path.name for path in self.directory.glob("step-*.damaged*"))

    def begin(self, step: int) -> Path:
        """Creates an empty folder to write to. Raises OSError, or CheckpointError if the step exists."""
        if self.path(step).exists():
            raise CheckpointError(f"{self.path(step)} exists already")
        folder, fresh = self.partial(step), not self.directory.exists()
        remove(folder)  # remains of an interrupted save; never read
        folder.mkdir(parents=True)
        if fresh:
            sync_folder(self.directory.parent)
        return folder

    def commit(self, step: int, manifest: Json) -> Path:
        """Turns the step's folder into a checkpoint; then ``latest`` points to it. Raises OSError."""
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

    def rate(self, step: int, evaluation: Metrics) -> None:
        """Adds the evaluation after ``step`` to its checkpoint; the manifest is replaced atomically. Raises OSError,
        CheckpointError."""
        path = self.path(step)
        partial = path / f".{MANIFEST}.partial"
        write(partial, dump({**read_manifest(path), "evaluation": without_nonfinite(evaluation)}))
        partial.replace(path / MANIFEST)
        sync_folder(path)

    def abandon(self, step: int) -> None:
        """Removes the files of a failed save."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def prune(self, retention: Retention) -> list[int]:
        """Removes checkpoints that need not be kept and returns their steps. Keeps the newest one and damaged ones;
        updates ``best``."""
        evaluations: dict[int, Mapping[str, float | None]] = {}
        for path in self.newest_first():
            try:
                evaluations[int(path.name[5:])] = dict(read_manifest(path).get("evaluation") or {})
            except CheckpointError:
                continue  # reported and set aside when it is to be used
        to_delete = sorted(set(evaluations) - retention.keeps(evaluations))
        self._point(BEST, best_step(evaluations, retention.best) if retention.best else None)
        hidden = {step: self.directory / f".step-{step:08}.removed" for step in to_delete}
        for step, path in hidden.items():
            remove(path)
            self.path(step).rename(path)  # renamed first, so that an interrupted removal does not look like damage
        if hidden:
            sync_folder(self.directory)
        for path in hidden.values():
            remove(path)
        return to_delete

    def remove_unfinished(self) -> list[str]:
        """Removes unfinished saves and removals, and returns their names."""
        if not self.directory.is_dir():
            return []
        unfinished = sorted(path for path in self.directory.glob(".*") if path.suffix in (".partial", ".removed"))
        for path in unfinished:
            remove(path)
        return [path.name for path in unfinished]

    def set_aside(self, path: Path) -> Path:
        """Renames a damaged checkpoint, so that it is not used but can be examined."""
        target = path.with_name(f"{path.name}.damaged")
        target = numbered(target) if target.exists() else target
        path.rename(target)
        return target

    def archive_earlier(self, after: int | None = None) -> Path | None:
        """Moves an earlier run's checkpoints to ``checkpoints.1`` (2, ...), so that they do not mix with new ones. If
        ``checkpoints`` is a link, perhaps to another disk, it remains one, and they go to ``checkpoints/earlier.1``.

        ``after``: move only complete ones of later steps. Returns the target, None if there are none. Raises OSError.
        """
        earlier = [path for path in self.newest_first() if after is None or (step_of(path) or 0) > after]
        if not earlier and (after is not None or not self.damaged()):
            return None
        linked = self.directory.is_symlink()
        base = self.directory / "earlier" if linked else self.directory
        target = numbered(base)
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
    """Returns the step of a checkpoint's folder, None for anything else."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and path.is_dir() else None


def locate(path: Path, *, best: bool = False) -> list[Path]:
    """Returns the checkpoints that ``path`` means, newest first: a checkpoint, a pointer file, a folder of checkpoints,
    or a run's folder.

    ``best``: of a folder, the best one by the run's "keep_best". Raises CheckpointError if there is none.
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
    if not path.exists():
        raise CheckpointError(f"{path} does not exist{near_path(path)}")
    raise CheckpointError(f"{path} is neither a checkpoint nor a folder that holds one")


def _pointed(pointer: Path) -> Path:
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    folder = pointer.parent / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        raise CheckpointError(f"{pointer} names {name!r}, and there is no such checkpoint next to it")
    return folder


def complete(path: Path, *, best: bool = False) -> Path:
    """Returns the newest complete checkpoint that ``path`` means, or the best one. Raises CheckpointError."""
    candidates = locate(path, best=best)
    checkpoint = next((candidate for candidate in candidates if not verify(candidate)), None)
    if checkpoint is None:
        raise CheckpointError(f"{candidates[0]}: damaged: {'; '.join(verify(candidates[0]))}")
    return checkpoint


def config_of(checkpoint: Path) -> Path:
    """Returns the configuration file of the run that wrote a ``checkpoint``. Raises CheckpointError if there is none."""
    file = checkpoint.resolve().parent.parent / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{checkpoint} is not in a run's directory, which has its config.json; give --config FILE"
        )
    return file


def read_manifest(path: Path) -> Json:
    """Returns a checkpoint's manifest. Raises CheckpointError if it is missing or damaged, or a subclass."""
    try:
        content = (path / MANIFEST).read_bytes()
    except OSError as error:
        error_class = CheckpointError if isinstance(error, FileNotFoundError) else UnreadableError
        raise error_class(f"{path}: {MANIFEST}: {error.strerror}") from None
    try:
        manifest: Json = json.loads(content)["manifest"]
        whole = dump(manifest) == content  # compares every byte: numbers print as they were read
        written = int(manifest["format"]) if whole else FORMAT
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: {MANIFEST} is damaged")
    if written in old_forms.FORMATS:
        manifest = old_forms.translated(path, manifest)
    elif written != FORMAT:
        raise OtherFormatError(
            f"{path} has format {written}, this dsframe reads {FORMAT}; it was written by dsframe "
            f"{manifest.get('versions', {}).get('dsframe', 'of another version')}"
        )
    _check_content(path, manifest)
    return manifest


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, defer_build=True)


_Checksum = Annotated[tuple[PositiveInt, str], Field(strict=False)]
_Piece = Annotated[tuple[str, NonNegativeInt, NonNegativeInt], Field(strict=False)]


class _File(_Part):
    bytes: NonNegativeInt
    checksums: list[_Checksum]


class _Tensor(_Part):
    dtype: str
    shape: list[NonNegativeInt]
    pieces: list[_Piece]
    """File, first byte, number of elements; one piece, except in files of earlier dsframe versions."""

    def wrong(self, files: Mapping[str, _File]) -> str:
        """Returns what is wrong with the tensor's position; "" if nothing is."""
        if (width := WIDTHS.get(self.dtype)) is None:
            return f"has the dtype {self.dtype!r}"
        if sum(count for *_, count in self.pieces) != math.prod(self.shape):
            return f"lies in pieces that do not make its shape {self.shape}"
        for name, begin, count in self.pieces:
            if name not in files:
                return f"is in {name!r}, which is not one of its files"
            if begin % width or begin + count * width > files[name].bytes:
                return f"is not in {name!r} from byte {begin} on"
        return ""


class _Parameter(_Part):
    tensors: dict[_Name, _Tensor]
    scalars: dict[str, bool | float | Annotated[list[bool | float], Field(min_length=1, max_length=1)]]


class _Known(_Part):
    """Values of a manifest that are used. Validated, because a checksum detects accidents, not manipulation."""

    files: dict[Annotated[str, Field(pattern=f"^{_FILE.pattern}$")], _File]
    step: NonNegativeInt = 0
    updates: NonNegativeInt = 0
    learning_rate: float = 0.0
    loss: float | None = None
    evaluation: dict[str, float | None] | None = None
    loss_scale: dict[str, float] | None = None
    schedule: dict[str, float | str | None] | None = None
    stop: dict[str, float | str | None] | None = None
    parameters: dict[_Name, _Parameter] = {}
    buffers: dict[str, dict[_Name, _Tensor]] = {}
    aliases: dict[_Name, _Name] = {}
    training: Json = {}
    course: Json = {}
    run: Json = {}
    versions: dict[str, str | None] = {}
    source: dict[str, str] = {}
    data: dict[str, str] = {}


def _check_content(path: Path, manifest: Json) -> None:
    """Raises CheckpointError for a manifest that dsframe cannot have written, even if its checksum is right."""
    try:
        content = _Known.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: {MANIFEST}: {where!r}: {first['msg']}; dsframe has not written this") from None
    named = _NAME.fullmatch(path.name)
    if named and "step" in manifest and int(named[1]) != content.step:
        raise CheckpointError(
            f"{path}: {MANIFEST} is of step {content.step}; a folder was renamed, or the file was copied"
        )
    for name, file in content.files.items():
        if sum(length for length, _ in file.checksums) != file.bytes:
            raise CheckpointError(f"{path}: {MANIFEST}: the checksums of {name!r} are not of all its bytes")
    every = {f"buffer {name!r} of {rank}": at for rank, of in content.buffers.items() for name, at in of.items()}
    for name, parameter in content.parameters.items():
        if "weight" not in parameter.tensors:
            raise CheckpointError(f"{path}: {MANIFEST}: parameter {name!r} has no weight")
        every |= {f"{key} of parameter {name!r}": tensor for key, tensor in parameter.tensors.items()}
    for what, tensor in every.items():
        if wrong := tensor.wrong(content.files):
            raise CheckpointError(f"{path}: {MANIFEST}: {what} {wrong}")
    names = set(content.parameters).union(*content.buffers.values())
    if missing := [alias for alias, name in content.aliases.items() if name not in names]:
        raise CheckpointError(f"{path}: {MANIFEST}: {missing[0]!r} is another name of a tensor that is not there")


def verify(path: Path) -> list[str]:
    """Returns what is wrong with a checkpoint, one line each; empty if it is complete. Raises as :func:`damage`."""
    return list(damage(path).values())


def damage(
    path: Path,
    names: Collection[str] | None = None,
    share: tuple[int, int] = (0, 1),
    sign_of_life: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Returns the missing, truncated and altered files (name -> what is wrong); only the manifest if it is damaged.

    ``names``: read only these files. ``share``: rank and number of the processes that read them together, each a
    different part. ``sign_of_life``: called after each file. Raises OtherFormatError, and UnreadableError if the file
    itself is not the problem.
    """
    try:
        manifest = read_manifest(path)
    except (OtherFormatError, UnreadableError):
        raise
    except CheckpointError as error:
        return {MANIFEST: str(error)}
    wrong, (rank, ranks), before = dict[str, str](), share, 0
    for name, entry in manifest["files"].items():
        if names is not None and name not in names:
            continue
        runs, before = slice((rank - before) % ranks, None, ranks), before + len(entry["checksums"])
        try:
            if text := damage_of(path / name, entry, runs):
                wrong[name] = text
        except FileNotFoundError as error:
            wrong[name] = f"{name}: {error.strerror}"
        except OSError as error:
            raise UnreadableError(f"{path}: {name}: {error.strerror}") from None
        sign_of_life()
    return wrong


def dump(manifest: Json) -> bytes:
    """Returns the manifest's bytes, with a checksum of itself: the same for the same content."""
    text = json.dumps(manifest, sort_keys=True, allow_nan=False)
    outer = {"manifest": manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return (json.dumps(outer, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def numbered(base: Path) -> Path:
    """Returns the first of ``base.1``, ``base.2``, ... that does not exist."""
    number = 1
    while (target := base.with_name(f"{base.name}.{number}")).exists():
        number += 1
    return target
