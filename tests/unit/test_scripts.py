"""What launch/ holds for people to copy: the commands that its scripts run, and the fields of its manifests.

examples/slurm/slurm.sbatch is run by a real Slurm in tests/cluster, launch/one-machine is tested beside launch/setup.
"""

import os

import pytest
import yaml

from dsframe.config import load
from dsframe.train import parse
from tests.processes import REPOSITORY, run_program
from tests.unit.test_setup import installed

MANIFESTS = REPOSITORY / "launch" / "kubernetes"


def said(tmp_path, script, *arguments):
    """What a script runs, with stand-ins that say how they were called."""
    installed(tmp_path, "dsframe", "mpirun", says='$(basename "$0") $*; $MASTER_ADDR:$MASTER_PORT')
    command, variables = [tmp_path / "launch" / script, *arguments], {"MASTER_ADDR": "here", "MASTER_PORT": "1234"}
    return run_program(command, cwd=tmp_path, env=os.environ | variables, check=False)


def test_many_machines(tmp_path):
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    done = said(tmp_path, "many-machines", "hosts", "--config", "x.json", "--set", "a=1")
    assert done.stdout == "dsframe launch --hostfile hosts --restarts 10 --config x.json --set a=1; here:1234\n", done


def test_mpi(tmp_path):
    done = said(tmp_path, "mpi", "4", "--config", "x.json", "--", "--hostfile", "hosts")
    exported = "-x MASTER_ADDR -x MASTER_PORT -x PATH"
    as_root = "--allow-run-as-root " * (os.getuid() == 0)
    assert done.stdout == (
        f"mpirun -np 4 {as_root}--bind-to none --oversubscribe {exported} --hostfile hosts "
        "python -m dsframe.train --config x.json; here:1234\n"
    ), done


def command_lines(document):
    """The words of each container of a manifest that trains."""
    if isinstance(document, list):
        for entry in document:
            yield from command_lines(entry)
    elif isinstance(document, dict):
        words = [*document.get("command", []), *document.get("args", [])]
        if "dsframe.train" in words:
            yield words
        for entry in document.values():
            yield from command_lines(entry)


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*job.yaml")), ids=lambda path: path.stem)
def test_the_training_of_a_manifest_can_be_started(path):
    containers = list(command_lines(list(yaml.safe_load_all(path.read_text()))))
    assert containers
    for words in containers:
        training = parse(words[words.index("dsframe.train") + 1 :])
        load(training.config, overrides=training.set)
        assert training.resume == "auto"


def test_a_file_without_its_option_is_guessed(capsys):
    with pytest.raises(SystemExit):
        parse(["zero3.json"])
    assert "unrecognized arguments: zero3.json; did you mean --config zero3.json?" in capsys.readouterr().err
