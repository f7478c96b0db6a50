"""Checkpoints that no dsframe has written: names and numbers of a manifest are data, whatever its checksum says."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsframe.checkpoint.store import MANIFEST, dump, read_manifest, verify
from dsframe.cli import main
from dsframe.errors import CheckpointError
from tests.unit.test_checkpoint_files import write


@pytest.fixture
def checkpoint(tmp_path):
    return write(tmp_path / "checkpoints", 1)


def forge(checkpoint, **changes):
    """The manifest with changes and a checksum that fits: ``a__b=value`` is the key b of a."""
    manifest = read_manifest(checkpoint)
    for key, value in changes.items():
        *above, last = key.split("__")
        place = manifest
        for name in above:
            place = place[name]
        place[last] = value
    (checkpoint / MANIFEST).write_bytes(dump(manifest))
    return manifest


def place(file="model.safetensors", begin=0, count=1000):
    return {"parameters__c__tensors__weight__pieces": [[file, begin, count]]}


FORGED = {
    "text for a number": ({"step": "42"}, "'step': Input should be a valid integer"),
    "a negative number": ({"updates": -1}, "'updates'"),
    "another step": ({"step": 41}, "is of step 41"),
    "a control character": ({"aliases": {"a\n\u001b[2J": "a.weight"}}, "'aliases"),
    "no weight": ({"parameters__c__tensors": {}}, "parameter 'c' has no weight"),
    "a file that is not there": (place(file="../x"), "is in '../x', which is not one of its files"),
    "beyond the file": (place(begin=1 << 40), "is not in 'model.safetensors' from byte 1099511627776 on"),
    "partly beyond the file": (place(begin=8000), "is not in 'model.safetensors' from byte 8000 on"),
    "between elements": (place(begin=1), "is not in 'model.safetensors' from byte 1 on"),
    "fewer elements": (place(count=999), "lies in pieces that do not make its shape [1000]"),
    "no dtype": ({"parameters__c__tensors__weight__dtype": "X9"}, "has the dtype 'X9'"),
    "a file elsewhere": ({"files__../x": {"bytes": 1, "checksums": [[1, "0"]]}}, "'files.../x.[key]'"),
    "a file without checksums": (
        {"files__x": {"bytes": 9, "checksums": [[8, "0"]]}},
        "the checksums of 'x' are not of all its bytes",
    ),
    "a name of nothing": ({"aliases": {"a": "b"}}, "another name of a tensor that is not there"),
}


@pytest.mark.parametrize("case", FORGED)
def test_what_is_forged_is_one_line(case, checkpoint, capsys):
    changes, message = FORGED[case]
    forge(checkpoint, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(checkpoint)
    assert message in str(caught.value)
    assert main(["export", str(checkpoint)]) == 8
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "Traceback" not in told
    assert "\x1b" not in told


def test_no_link_leads_out(checkpoint, tmp_path):
    file = checkpoint / "rng.json" if (checkpoint / "rng.json").exists() else next(checkpoint.glob("*.safetensors"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert verify(checkpoint) == [f"{file.name} is a symbolic link, not a file"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(
        ["step", "updates", "parameters", "aliases", "files", "loss_scale", "run", "evaluation", "format"]
    ),
    value=JSON,
)
def test_any_value_is_read_or_refused(key, value, checkpoint):
    whole = (checkpoint / MANIFEST).read_bytes()
    try:
        manifest = json.loads(whole)["manifest"] | {key: value}
        (checkpoint / MANIFEST).write_bytes(dump(manifest))
        try:
            read_manifest(checkpoint)
        except CheckpointError as error:
            assert "\n" not in str(error)  # noqa: PT017
    finally:
        (checkpoint / MANIFEST).write_bytes(whole)
