"""What a newcomer types first: init, activate, and what each command says of itself."""

import sys
from pathlib import Path

import pytest

import dsframe
import dsframe.train
from dsframe.cli import main
from dsframe.tools.init import BEGINNINGS
from tests.processes import REPOSITORY, run_program, run_ranks, warm


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_init_writes_a_commented_file_that_the_check_accepts(beginning, tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    assert main(["init", str(folder), "--from", beginning]) == 0
    said = capsys.readouterr().out
    assert f"cd {folder}" in said
    for name in ("make_data.py", "slurm.sbatch"):
        assert (name in said.partition("next:")[2]) == (folder / name).exists()
    assert (folder / "config.json").read_text().count("//") >= 2
    assert main(["check", str(folder / "config.json"), "-np", "2", "--strict"]) == 0
    assert "../" not in (folder / "README.md").read_text(), "a link to what is not there"
    capsys.readouterr()
    assert main(["init", str(folder), "--from", beginning]) != 0
    assert "config.json" in capsys.readouterr().err, "nothing is written over"


COMMANDS = (
    "check config.json -np 2 --strict",
    "plan --config config.json -np 2",
    "launch -np 2 --config config.json --set dsframe.steps=2 --run-dir run --quiet",
    "report run",
    "evaluate run",
    "export run --to safetensors --out weights",
)


SMALL = "--set train_batch_size=2 --set dsframe.task.context=64 --set dsframe.task.model.num_hidden_layers=1"


@pytest.mark.parametrize(
    "beginning", [pytest.param(name, marks=() if name == "own" else pytest.mark.long) for name in BEGINNINGS]
)
def test_a_beginning_goes_through_every_command(beginning, tmp_path):
    assert main(["init", str(tmp_path / "mine"), "--from", beginning]) == 0
    data = [["make_data.py"]] if (tmp_path / "mine" / "make_data.py").exists() else []
    lines = [*COMMANDS[:-1], f"{COMMANDS[-1]} --merge" if beginning == "finetune" else COMMANDS[-1]]
    if beginning == "slurm":  # a file for 64 GPUs
        lines = [f"{line} {SMALL}" if line.startswith(("plan", "launch")) else line for line in lines]
    for words in [*data, *(["-m", "dsframe", *line.split()] for line in lines)]:
        command = [sys.executable, *words] if "launch" in words else warm(1, words)
        done = run_ranks(command, timeout_seconds=300, cwd=tmp_path / "mine")
        if beginning == "finetune" and "evaluate" in words:
            assert "eval_data" in done.output
        else:
            done.check()


def test_activate_puts_the_launchers_first(tmp_path):
    """In a shell that has neither; twice changes nothing."""
    line = f'eval "$({sys.executable} -m dsframe activate)"'
    script = f'{line} && once=$PATH && {line} && [ "$PATH" = "$once" ] && command -v deepspeed horovodrun python && echo "$PATH"'
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    done = run_program(["bash", "-c", script], cwd=tmp_path, env=environment)
    own, here = REPOSITORY / "launch" / "bin", Path(sys.executable).parent
    assert done.stdout.splitlines() == [
        f"{own}/deepspeed",
        f"{own}/horovodrun",
        f"{here}/python",
        f"{own}:{here}:/usr/bin:/bin",
    ]


def test_another_trainers_key_is_explained(capsys):
    assert main(["explain", "callbacks"]) == 0
    assert 'callbacks: a name of other trainers; write "hooks"' in capsys.readouterr().out


def test_the_folders_own_file_comes_before_a_packaged_one(here):
    assert dsframe.train.parse([]).config == "zero3.json"
    (here / "config.json").write_text("{}")
    assert dsframe.train.parse([]).config == "config.json"
