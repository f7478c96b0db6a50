"""``dsframe doctor --train``, small, on CPUs: the list that it goes through on GPUs."""

import math

import pytest

from dsframe.engines.table import BUILT_IN
from dsframe.errors import DataError
from dsframe.tools import doctor, doctor_train
from tests import kept, standin
from tests.files import read_json
from tests.standin import build

pytestmark = pytest.mark.timeout(600)
FACTS = {"Gloo": True, "NCCL": False, "cuda": None, "gpus": []}


def report(folder, monkeypatch, *words):
    """What ``dsframe doctor --train`` writes, without what it says of libraries (test_doctor.py)."""
    monkeypatch.setattr(doctor, "probe", lambda name: doctor.Library(name, "0", FACTS) if name == "torch" else None)
    doctor.main(["--train", "--out", str(folder), *words])
    return read_json(folder / "doctor.json")


def assert_well(found):
    """Returns the rows by name."""
    rows = {row["name"]: row for row in found["rows"]}
    assert [row for row in rows.values() if row["state"] == "failed"] == []
    assert found["verdict"].startswith("ok on CPU, ")
    for row in rows.values():
        if row["difference"] is not None:
            assert row["difference"] <= found["bound"]
            assert row["peak_bytes"] > 2**26
    assert rows["single"]["difference"] == 0
    assert found["origin"]["versions"]["torch"]
    assert found["machine"]["engines"]
    return rows


def test_it_goes_through_its_list(tmp_path, monkeypatch, capsys):
    """Two engines of one launcher: trained, and one continued from the other's checkpoint."""
    started = []

    def train(file, processes, directory, words, seconds):
        """As ``dsframe launch`` would, which the test below has."""
        directory.mkdir()
        started.append((words[:2], processes))
        words = ["--config", str(file), "--run-dir", str(directory), *words[2:]]
        return kept.run(directory, words, processes).returncode

    monkeypatch.setattr(doctor_train.subprocess_runs, "train", train)
    monkeypatch.setattr(doctor_train.launchers, "installed", lambda name: name == "torchrun")
    found = report(tmp_path / "out", monkeypatch, "--engines", "ddp,fsdp")
    rows = assert_well(found)
    assert started == [(["--launcher", "python"], 1), *[(["--launcher", "torchrun"], 2)] * 3]
    assert {"ddp", "fsdp", "fsdp after ddp"} < set(rows)
    assert all(not math.isclose(rows[name]["seconds"], 0) for name in ("ddp", "fsdp"))
    printed = capsys.readouterr().out
    assert "\nok        fsdp after ddp  " in printed
    assert printed.endswith(f"{found['verdict']}\n{tmp_path / 'out' / 'doctor.json'}\n")


@pytest.mark.long
def test_every_engine_and_launcher_has_its_turn(tmp_path, monkeypatch):
    rows = assert_well(report(tmp_path / "out", monkeypatch))
    here = {row["name"] for row in rows.values() if row["state"] == "ok"}
    assert {"deepspeed ZeRO-1", "deepspeed ZeRO-3", "deepspeed pipeline", "horovod", "fsdp after horovod"} < here
    assert {row["launcher"] for row in rows.values()} > {"python", *(entry.launcher for entry in BUILT_IN.values())}


@pytest.mark.long
def test_the_branch_for_gpus_runs_on_the_stand_in(tmp_path, monkeypatch):
    """Bytes of a device: two that are none."""
    if reason := build.reason_against():
        pytest.skip(reason)
    for name, value in standin.environment().items():
        monkeypatch.setenv(name, value)
    assert doctor_train.run([("Stand-in", 80 << 30)] * 2, ["ddp", "fsdp", "horovod"], tmp_path / "out", {})
    found = read_json(tmp_path / "out" / "doctor.json")
    rows = {row["name"]: row for row in found["rows"]}
    assert found["verdict"].startswith("ok on 2 x Stand-in, ")
    assert rows["ddp"]["peak_bytes"] < 2**26, "of the device"
    if rows["horovod"]["launcher"]:
        assert "built without NCCL" in rows["horovod"]["remark"]


def test_what_fails_is_in_the_verdict(tmp_path, monkeypatch, capsys):
    """A training that takes too long is ended, and one with other losses is named; the rest of the list is gone through."""
    machine = doctor_train.Machine(tmp_path, [], expected=dict.fromkeys(range(1, 21), 5.0))
    row = doctor_train.train(machine, doctor_train.Setup("single", "single", "python"), 1)
    assert (row.state, row.remark) == ("failed", "other losses")
    machine.expected, machine.norm = {}, 1e9
    twice = doctor_train.Row("twice")
    doctor_train._judge(machine, twice, machine.directory("single"), 0, first=1)
    assert twice.state == "failed"
    assert twice.remark.startswith("first gradient has norm ")
    monkeypatch.setattr(doctor_train, "LIMIT_SECONDS", 0.2)
    late = doctor_train.train(machine, doctor_train.Setup("late", "single", "python"), 1)
    assert (late.state, late.remark) == ("failed", "not done after 0 s")
    assert doctor_train.verdict(machine, [row, late], 3.0) == "FAILED on CPU, 3 s: single, late"


def test_a_folder_of_the_users_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DataError, match=r"is not empty and holds no doctor\.json"):
        doctor_train.run([], ["ddp"], tmp_path, {})
    assert (tmp_path / "thesis.tex").exists()


def test_an_engine_that_there_is_not_is_named(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--train", "--engines", "ddp,zero4"])
    assert "no engine zero4; there are deepspeed, ddp" in capsys.readouterr().err
