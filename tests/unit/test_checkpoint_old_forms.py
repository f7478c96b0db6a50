"""Checkpoints of earlier dsframes, whole parameters (format 2) and pieces (format 3): read for one release."""

import os

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from dsframe.checkpoint.old_forms import _parameter, translated
from dsframe.checkpoint.reader import Checkpoint
from dsframe.checkpoint.store import MANIFEST, dump, verify
from dsframe.errors import CheckpointError
from dsframe.tools import export
from tests.unit.test_checkpoint_files import SIZES, states


def write_old(folder, pieces):
    """SIZES as dsframe wrote it up to commit 231ce77: in ``pieces`` each, or (0) whole, dealt to two ranks."""
    path = folder / "step-00000042"
    path.mkdir(parents=True)
    files = {"buffers.safetensors": {"mean": torch.ones(2)}}
    files["buffers-00001.safetensors"] = {"mean": torch.zeros(2)}
    parameters = {}
    for number, state in enumerate(states(SIZES)):
        tensors = {"weight": state.weight, **state.moments}
        entry = {"shape": list(state.weight.shape), "moments": sorted(state.moments)}
        entry["scalars"] = dict(state.scalars)
        count = state.weight.numel()
        if pieces and count >= pieces:
            cuts = [(part, count * part // pieces, count * (part + 1) // pieces) for part in range(pieces)]
            entry["pieces"] = [[f"shard-{part:05}-000.safetensors", low, high - low] for part, low, high in cuts]
            for key, tensor in tensors.items():
                for part, low, high in cuts:
                    flat = tensor.flatten()[low:high].clone()
                    files.setdefault(f"shard-{part:05}-000.safetensors", {})[f"{key}/{state.name}"] = flat
        else:
            entry["file"] = f"part-{number % 2:05}-000.safetensors"
            files.setdefault(entry["file"], {}).update({f"{key}/{state.name}": t for key, t in tensors.items()})
        parameters[state.name] = entry
    for name, tensors in files.items():
        save_file(tensors, path / name, metadata={"format": "pt"})
    (path / "rng.json").write_text("[]")
    entries = {
        file.name: {"bytes": file.stat().st_size, "xxh3_128": xxhash.xxh3_128_hexdigest(file.read_bytes())}
        for file in path.iterdir()
    }
    manifest = {"format": 3 if pieces else 2, "step": 42, "updates": 40, "loss_scale": None, "files": entries}
    content = dump({**manifest, "parameters": parameters, "aliases": {"tied": "a.weight"}})
    (path / MANIFEST).write_bytes(content)
    return path


@pytest.mark.parametrize("pieces", [0, 1, 12])
def test_what_earlier_dsframes_wrote_is_read(tmp_path, pieces):
    path = write_old(tmp_path, pieces)
    assert verify(path) == []
    checkpoint = Checkpoint(path)
    assert checkpoint.shapes == SIZES
    for expected in states(SIZES):
        found = checkpoint.parameter(expected.name)
        assert torch.equal(found.weight, expected.weight)
        assert all(torch.equal(found.moments[key], expected.moments[key]) for key in expected.moments)
        assert found.scalars == {"step": 42.0}
        size = expected.weight.numel() // 2
        part = checkpoint.part(expected.name, size // 3, size).moments["exp_avg"]
        assert torch.equal(part, expected.moments["exp_avg"].flatten()[size // 3 : size // 3 + size])
    assert [float(Checkpoint(path, rank).buffers()["mean"][0]) for rank in range(3)] == [1.0, 0.0, 1.0]
    assert checkpoint.generators() == []
    out = export.export(path)
    assert set(export.read(path)) == {*SIZES, "mean", "tied"}
    assert out.is_file()


@pytest.mark.parametrize("pieces", [0, 2])
def test_damage_of_theirs_is_found(tmp_path, pieces):
    path = write_old(tmp_path, pieces)
    for file in sorted(path.glob("*.safetensors")):
        content = file.read_bytes()
        for wrong in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b"", content[1:]):
            file.write_bytes(wrong)
            assert verify(path), file.name
        file.write_bytes(content)
    (path / "rng.json").unlink()
    assert verify(path) == ["rng.json: No such file or directory"]
    for name in ("rng.json", file.name):
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
        assert len(verify(path)) == 1


@pytest.mark.parametrize(("begins", "count"), [(1, 3), (5, 3), (3, 4)])
def test_pieces_that_overlap_or_leave_a_gap_are_refused(begins, count):
    """Of six elements in two pieces of three: the second one begins elsewhere."""
    entries = {"weight/a": {"dtype": "F32", "shape": [3], "begin": 0}}
    whole = {"shape": [6], "moments": [], "scalars": {}, "pieces": [["first", 0, 3], ["second", 3, 3]]}
    tensor = _parameter("a", whole, lambda file: entries)["tensors"]["weight"]
    assert tensor["pieces"] == [["first", 0, 3], ["second", 0, 3]]
    whole["pieces"][1][1:] = begins, count
    with pytest.raises(ValueError, match=f"weight/a: its pieces do not follow one another at element {min(begins, 3)}"):
        _parameter("a", whole, lambda file: entries)
    with pytest.raises(ValueError, match=r"weight/a has shape \[3\] instead of \[6\]"):
        _parameter("a", {**whole, "pieces": None, "file": "first"}, lambda file: entries)


@pytest.mark.parametrize(("files", "file"), [(["b"], "a"), (["../a"], "../a")])
def test_a_file_elsewhere_is_not_read(files, file, tmp_path):
    with pytest.raises(CheckpointError, match=f"{file}' is not one of its files"):
        translated(tmp_path, {"files": files, "parameters": {"a": {"moments": [], "file": file}}})
    save_file({"weight/a": torch.ones(1)}, tmp_path / "there")
    (tmp_path / "link").symlink_to("there")
    with pytest.raises(CheckpointError, match=r"link is not there, or no file"):
        translated(tmp_path, {"files": ["link"], "parameters": {"a": {"moments": [], "file": "link"}}})
