"""The portable format: each parameter whole, in fp32, by the model's own name, in safetensors files (nothing is ever unpickled).

A part file holds ``weight/NAME`` and one ``KEY/NAME`` for each tensor that the optimizer keeps about the parameter
(``exp_avg/NAME``); ``buffers.safetensors`` the model's buffers; ``rng.json`` every rank's random generators. Which parameter
is in which file, its shape, the optimizer's numbers and everything else that is small is in the manifest (``store``).

In the sharded form a parameter of which ranks held ranges stays as they lay: each range is a tensor of one dimension under the same
names, in ``shard-RANK-NUMBER.safetensors``, and the manifest says which is where (``"pieces": [[file, first element, elements]]``).

safetensors: https://huggingface.co/docs/safetensors, the length of a JSON header (8 bytes, little-endian), the header with names,
dtypes, shapes and offsets, and then the bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsframe.checkpoint import store
from dsframe.checkpoint.layout import ByteBalancer
from dsframe.checkpoint.staging import Staging
from dsframe.checkpoint.store import FileEntry
from dsframe.errors import CheckpointError
from dsframe.model.state import WEIGHT, EngineState, LossScaleState, ParameterState, full_precision, narrowed

PART_BYTES = 64 << 20
BUFFERS = "buffers.safetensors"
RNG = "rng.json"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names in the format."""


class PartWriter:
    """One rank's share of the parameters, in files of about ``part_bytes``.

    Parameters are dealt to the ranks by size, each to the one that has fewest bytes so far; every rank sees every parameter
    pass, so all compute the same assignment without communication. One file is written, by a thread, while the next is
    gathered. Memory: a rank holds at most twice ``part_bytes`` plus one parameter with its moments on the host, in addition
    to the one that the engine has just gathered; with ``staging``, a copy there of its whole share (for Adam 12 bytes times
    parameters divided by ranks), which :meth:`flush` writes.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        part_bytes: int = PART_BYTES,
        *,
        staging: Staging | None = None,
        sync: bool = True,
    ) -> None:
        """``sync``: Files are on the disk when :meth:`finish` returns; else :meth:`flush` brings them there."""
        self.files: dict[str, FileEntry] = {}
        """Files of this rank."""
        self.parameters: dict[str, dict[str, Any]] = {}
        """The manifest's entry of every parameter, whoever wrote it."""
        self._folder, self._rank = folder, rank
        self._balancer = ByteBalancer(ranks, part_bytes)
        self._name = ""
        self._held: dict[str, Tensor] = {}
        self._staging, self._sync = staging, sync
        self._kept: list[tuple[str, dict[str, Tensor]]] = []
        self._executor = ThreadPoolExecutor(1, "dsframe-part")
        self._written: tuple[str, Future[FileEntry]] | None = None
        self._failed = False

    def take(self, parameter: ParameterState) -> None:
        """The next parameter; keeps it if it is this rank's. Raises OSError where it cannot be written."""
        owner = self._balancer.owner()
        name = self._balancer.file(owner, parameter.bytes)
        if owner == self._rank and name != self._name:
            if self._held:
                self._write()
            self._name = name
        self.parameters[parameter.name] = {
            "file": name,
            "shape": list(parameter.weight.shape),
            "moments": sorted(parameter.moments),
            "scalars": dict(parameter.scalars),
        }
        if owner == self._rank:
            for key, tensor in ((WEIGHT, parameter.weight), *parameter.moments.items()):
                self._held[f"{key}/{parameter.name}"] = self._copied(tensor)

    def _copied(self, tensor: Tensor) -> Tensor:
        dtype = full_precision(tensor.dtype)
        if self._staging is not None:
            return self._staging.copy(tensor, dtype)
        return tensor.detach().to("cpu", dtype).contiguous()

    def finish(self) -> None:
        """Writes what is left, and waits until it is on the disk; after a failure it only waits. Raises OSError."""
        try:
            if self._held and not self._failed:
                self._write()
            self._wait()
        finally:
            self._executor.shutdown()

    def flush(self, sign_of_life: Callable[[], None]) -> None:
        """Writes what was kept, and releases it file by file; all files are on the disk when it returns. Raises OSError."""
        while self._kept:
            name, tensors = self._kept.pop(0)
            self.files[name] = write_tensors(self._folder / name, tensors)
            sign_of_life()
        if not self._sync:
            store.sync_files(self._folder, self.files, sign_of_life)

    def put(self, name: str, tensors: dict[str, Tensor]) -> None:
        """A file of this rank's, of which :meth:`finish` makes sure; ``tensors`` do not change until then.

        Raises OSError where the file before could not be written.
        """
        if self._staging is not None:
            self._kept.append((name, tensors))
        else:
            self._wait()
            self._written = name, self._executor.submit(write_tensors, self._folder / name, tensors, sync=self._sync)

    def _wait(self) -> None:
        if self._written is None:
            return
        (name, written), self._written = self._written, None
        try:
            self.files[name] = written.result()
        except BaseException:
            self._failed = True
            raise

    def _write(self) -> None:
        held, self._held = self._held, {}
        self.put(self._name, held)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, sync: bool = True
) -> FileEntry:
    """A safetensors file, written from the tensors' own memory, views among them. ``sync``: as ``store.write`` takes it.

    The widest elements come first, as in safetensors' own files: so every tensor is aligned to its elements, for readers that map
    the file. ``safetensors.save_file`` makes no checksum on the way and takes no views. Raises OSError, and CheckpointError for a
    dtype that the format does not have.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    begin, _ = header({name: (tensor.dtype, tensor.shape) for name, tensor in ordered}, metadata)
    contents = [tensor.contiguous().flatten().view(torch.uint8).numpy().data for _, tensor in ordered]
    return store.write(path, begin, *contents, sync=sync)


def header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, int]:
    """Returns the first bytes of a safetensors file whose ``tensors`` (name -> dtype, shape) follow in this order, and their size.

    Raises CheckpointError for a dtype that the format does not have.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in DTYPES:
            raise CheckpointError(f"{name}: checkpoints do not support {dtype}")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def buffers_name(rank: int) -> str:
    """The file of the buffers of a rank that has others than rank 0, as with BatchNorm's statistics on most engines."""
    return f"buffers-{rank:05}.safetensors"


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of names and contents, to see whether ranks hold the same."""
    sha = hashlib.sha256()
    for name, tensor in tensors.items():
        sha.update(name.encode() + b"\0")
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def write_state(
    state: EngineState,
    folder: Path,
    rank: int,
    ranks: int,
    buffers: str | None,
    part_bytes: int = PART_BYTES,
    sign_of_life: Callable[[], None] = lambda: None,
    *,
    staging: Staging | None = None,
    sync: bool = True,
) -> tuple[PartWriter, str]:
    """**Collective.** Writes this rank's share of ``state``. Returns the writer and what went wrong, "" where nothing did.

    ``buffers``: the file to write this rank's buffers to, if it is to write them. After a failure it keeps reading to the
    end without writing: the other ranks wait for it in each parameter's gathering. ``staging``: nothing is written yet, the
    writer's ``flush`` does it, and the state may change meanwhile.
    """
    writer, failure = PartWriter(folder, rank, ranks, part_bytes, staging=staging, sync=sync), ""
    for parameter in state.parameters:
        if not failure:
            failure = catch_io_error(lambda parameter=parameter: writer.take(parameter))
        sign_of_life()
    if not failure and buffers and state.buffers:
        failure = catch_io_error(lambda: writer.put(buffers, copied(state.buffers)))
    unfinished = catch_io_error(writer.finish)  # in any case: nothing writes on when this returns
    return writer, failure or unfinished


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def catch_io_error(action: Any) -> str:
    """Calls ``action`` and returns the disk's error, "" if there is none."""
    try:
        action()
    except OSError as error:
        return f"{error.filename or ''}: {error.strerror}".removeprefix(": ")
    except CheckpointError as error:
        return str(error)
    return ""


class Checkpoint:
    """A checkpoint on disk, read as :class:`dsframe.model.state.SavedState`. Files stay open until :meth:`close`."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        """Reads only the manifest. ``rank``: whose buffers are wanted, where ranks had different ones.

        Raises CheckpointError where the manifest is missing or damaged; ``store.verify`` reads the rest.
        """
        self.path, self.rank = path, rank
        self.manifest = store.read_manifest(path)
        self._parameters: Mapping[str, Mapping[str, Any]] = self.manifest["parameters"]
        self._moments = {key for entry in self._parameters.values() for key in entry["moments"]}
        self._open: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    @property
    def step(self) -> int:
        """Global batches trained on."""
        return int(self.manifest["step"])

    @property
    def updates(self) -> int:
        """Optimizer updates applied: fewer than steps where fp16 gradients overflowed."""
        return int(self.manifest["updates"])

    @property
    def loss_scale(self) -> LossScaleState | None:
        """The state of dynamic loss scaling."""
        kept = self.manifest["loss_scale"]
        return None if kept is None else LossScaleState(**kept)

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Every parameter's full shape."""
        return {name: tuple(entry["shape"]) for name, entry in self._parameters.items()}

    def keeps(self, key: str) -> bool:
        """Returns whether the optimizer's state has tensors of this name."""
        return key in self._moments

    def buffers(self) -> Mapping[str, Tensor]:
        """The model's buffers: this rank's own where it had others, else rank 0's."""
        name = next((name for name in (buffers_name(self.rank), BUFFERS) if name in self.manifest["files"]), None)
        if name is None:
            return {}
        file = self._file(name)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping

    def parameter(self, name: str) -> ParameterState:
        """One parameter, in fp32, on the CPU. Raises CheckpointError where the file does not hold it."""
        entry = self._parameters[name]
        if entry.get("pieces"):
            flat = self.part(name, 0, math.prod(entry["shape"]))
            moments = {key: moment.view(entry["shape"]) for key, moment in flat.moments.items()}
            return ParameterState(name, flat.weight.view(entry["shape"]), moments, flat.scalars)
        # An earlier dsframe wrote the moments of a weight without dimensions as numbers.
        numbers: set[str] = set() if entry["shape"] else self._moments & entry["scalars"].keys()
        weight = self._tensor(entry["file"], WEIGHT, name)
        if list(weight.shape) != entry["shape"]:
            raise CheckpointError(
                f"{self.path}/{entry['file']}: weight/{name} has shape {list(weight.shape)} instead of {entry['shape']}"
            )
        return ParameterState(
            name,
            weight,
            {key: self._tensor(entry["file"], key, name) for key in entry["moments"]}
            | {key: torch.tensor(float(entry["scalars"][key])) for key in numbers},
            {key: value for key, value in entry["scalars"].items() if key not in numbers},
        )

    def part(self, name: str, first: int, size: int) -> ParameterState:
        """A range of one flattened parameter: maps and reads only its own pages of the files.

        Raises CheckpointError where a file does not hold it, and where a moment has another shape than the weight.
        """
        entry = self._parameters[name]
        if not entry.get("pieces"):
            return narrowed(self.parameter(name), first, size)
        moments = {key: self._range(name, key, first, size) for key in entry["moments"]}
        return ParameterState(name, self._range(name, WEIGHT, first, size), moments, dict(entry["scalars"]))

    def _range(self, name: str, key: str, first: int, size: int) -> Tensor:
        """Elements of one tensor that lies in pieces; a view where they are all in one."""
        pieces = []
        for file, begin, count in self._parameters[name]["pieces"]:
            low, high = max(first, begin), min(first + size, begin + count)
            if low < high:
                piece = self._tensor(file, key, name)
                if piece.shape != (count,):
                    raise CheckpointError(
                        f"{self.path}/{file}: {key}/{name} has shape {list(piece.shape)} instead of [{count}]"
                    )
                pieces.append(piece[low - begin : high - begin])
        if not pieces:
            return torch.zeros(0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _tensor(self, file: str, key: str, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file(file).get_tensor(f"{key}/{name}")
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}/{file}: {name}: {error}") from None
        return tensor

    def weights(self, instead: str = WEIGHT) -> Iterator[tuple[str, Tensor]]:
        """Parameters and then buffers, one at a time, as in the model's ``state_dict``.

        ``instead``: the optimizer's tensors of this name in the place of the weights, where there are some.
        """
        for name, entry in self._parameters.items():
            key = instead if instead in entry["moments"] else WEIGHT
            if entry.get("pieces"):
                yield name, self._range(name, key, 0, math.prod(entry["shape"])).view(entry["shape"])
            else:
                yield name, self._tensor(entry["file"], key, name)
        yield from self.buffers().items()

    def generators(self) -> list[dict[str, Any]]:
        """The random generators of every rank that saved. Raises CheckpointError where they cannot be read."""
        try:
            kept: list[dict[str, Any]] = json.loads((self.path / RNG).read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}/{RNG}: {error}") from None
        return kept

    def close(self) -> None:
        """Closes the files."""
        self._stack.close()
        self._open = {}

    def _file(self, name: str) -> Any:
        if name not in self.manifest["files"]:
            raise CheckpointError(f"{self.path}: {name} is not one of its files")
        if name not in self._open:
            try:
                opened = safe_open(self.path / name, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.path / name}: {error}") from None
            self._open[name] = self._stack.enter_context(opened)
        return self._open[name]
