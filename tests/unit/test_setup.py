"""What `make setup` decides, with a stand-in for Python and pip: what it installs, from where, and when it installs nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import REPOSITORY, run_program

# Notes what it is asked to do; makes an "environment" that is itself; "has" torch and Horovod; fails where FAIL says so.
STAND_IN = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
    *"${FAIL:-nothing fails}"*) echo "No matching distribution found"; exit 1 ;;
    *"base_prefix"*) echo "${VERSION:-3.11.7} at /usr" ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/pip"; echo version = 3.11 >"$3/pyvenv.cfg" ;;
    *"pip wheel"*) while [ "$1" != -w ]; do shift; done; touch "$2/horovod-0.28.1-cp311-cp311-linux_x86_64.whl" ;;
    *sysconfig*) echo "$PWD" ;;
    *"pip install"*torch==2.13.0+cpu) echo 2.13.0+cpu >"$HOME/torch" ;;
    *"pip install"*torch==2.13.0) [ -e "$HOME/torch" ] || echo "2.13.0${PREFERS:-}" >"$HOME/torch" ;;
    *"pip install"*torch===2.13.0) echo 2.13.0 >"$HOME/torch" ;;
    *"pip uninstall -y torch") rm "$HOME/torch" ;;
    *" torch") cat "$HOME/torch" ;;
esac
"""

BASIC_TOOLS = [
    "awk",
    "bash",
    "cat",
    "cmake",
    "cp",
    "cut",
    "df",
    "dirname",
    "env",
    "flock",
    "grep",
    "head",
    "id",
    "ls",
    "mkdir",
    "mv",
    "nproc",
    "paste",
    "rm",
    "sed",
    "sh",
    "sha256sum",
    "sort",
    "tail",
    "touch",
    "uname",
    "wc",
]
"""All that there is besides the stand-ins: what else the machine has (MPI, nvcc) must not decide what is tested."""


MACHINES_TOOLS = {
    "nvcc": "#!/bin/sh\necho release 13.0\necho '#$ TOP=/' >&2\n",
    "mpicxx": "#!/bin/sh\n",
    "mpirun": "#!/bin/sh\necho mpirun 4.1\n",
    "nvidia-smi": "#!/bin/sh\nexit 9\n",
}


INPUTS = [
    "constraints.txt",
    "launch/setup",
    "launch/build-horovod",
    "launch/horovod.cmake",
    "launch/torchvision_finder.py",
]


CPU, CUDA = "torch==2.13.0+cpu", "torch==2.13.0"


class Clone:
    """A copy of what set-up reads, with stand-ins for the interpreter and for the machine's tools."""

    def __init__(self, folder):
        self.folder = folder / "clone"
        self.calls_file = folder / "calls"
        self.home = folder / "home"
        tools = folder / "tools"
        engines = "examples/reference_engines"
        for path in (self.folder / "launch", self.folder / engines, self.home, tools):
            path.mkdir(parents=True)
        for name in (*INPUTS, "launch/gpus", "pyproject.toml", f"{engines}/pyproject.toml"):
            shutil.copy(REPOSITORY / name, self.folder / name)
        self.tools = tools
        for name in BASIC_TOOLS:
            (tools / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")
        self.tool("python3", STAND_IN)
        for name in ("g++", "make"):
            self.tool(name, "#!/bin/sh\necho 12.2.0\n")
        self.environment = {
            "PATH": str(tools),
            "HOME": str(self.home),
            "CALLS": str(self.calls_file),
            "DSFRAME_APT": "0",
            "DSFRAME_DEV": str(folder / "dev"),
        }
        (folder / "dev").mkdir()

    def tool(self, name, text):
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def machine(self, gpus, *tools, wsl=False):
        """Makes this a machine with so many GPUs and these tools. ``wsl``: GPUs without files, counted by nvidia-smi."""
        dev = Path(self.environment["DSFRAME_DEV"])
        shutil.rmtree(dev)
        dev.mkdir()
        for name in ["dxg"] if wsl else [f"nvidia{number}" for number in range(gpus)]:
            (dev / name).touch()
        for name, text in MACHINES_TOOLS.items():
            (self.tools / name).unlink(missing_ok=True)
            if name in tools:
                self.tool(name, text)
        if wsl:
            self.tool("nvidia-smi", "#!/bin/sh\n" + "echo 'GPU 0: x'\n" * gpus)

    def setup(self, profile="train", code=0, **variables):
        """Ends with ``code``."""
        command, environment = ["bash", "launch/setup", profile], {**self.environment, **variables}
        finished = run_program(command, cwd=self.folder, env=environment, check=False)
        assert finished.returncode == code, finished
        return finished

    def calls(self):
        """What the stand-in was asked since the last question, without the questions that change nothing."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return [call for call in calls if call.startswith(("-m venv", "-m pip"))]

    def tried(self):
        """The builds of torch that pip was asked for since the last question."""
        return [call.split()[-1] for call in self.calls() if "torch==" in call]

    def pinned(self):
        """The build of torch that no later step may exchange."""
        return (self.folder / ".setup" / "torch.txt").read_text().strip()


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


gpu = any(Path("/dev").glob("nvidia[0-9]*"))
without_gpu = pytest.mark.skipif(gpu, reason="decides for machines without a GPU, and this one has one")


def test_installs_the_cpu_build_of_torch_first_then_the_rest(clone):
    clone.setup()
    venv, tools, torch, *rest = clone.calls()
    assert venv == "-m venv .venv"
    assert tools.startswith("-m pip install -c constraints.txt setuptools wheel hatchling ")
    assert torch == "-m pip install -c constraints.txt torch==2.13.0+cpu"
    packages = "-m pip install --no-build-isolation -c constraints.txt -c .setup/torch.txt -e .[deepspeed,vision]"
    assert packages in rest
    engines = "-m pip install --no-deps --no-build-isolation -e examples/reference_engines"
    assert rest.index(engines) > rest.index(packages)
    assert clone.pinned() == CPU


def test_tests_need_more_than_training_and_what_they_need_trains(clone):
    clone.setup()
    clone.calls()
    clone.setup(profile="test")
    packages = "-m pip install --no-build-isolation -c constraints.txt -c .setup/torch.txt -e .[all,docs,test,lint]"
    assert packages in clone.calls()
    for profile in ("train", "test"):
        assert clone.setup(profile=profile).stdout == ""
    assert clone.calls() == []


def test_an_index_without_the_cpu_build_gives_the_plain_one(clone):
    """Set-up says so and goes on: training on the CPU works with either."""
    finished = clone.setup(FAIL="torch==2.13.0+cpu")
    assert "no package index has a CPU-only torch 2.13.0 for this Python: taking the build with CUDA" in finished.stderr
    assert "TORCH_INDEX=URL names one more index" in finished.stderr
    assert clone.tried() == [CPU, CUDA]
    assert clone.pinned() == CUDA


def test_without_any_build_of_torch_set_up_ends(clone):
    finished = clone.setup(code=1, FAIL="torch==2.13.0")
    assert "setup: torch 2.13.0 was not installed" in finished.stderr
    assert "No matching distribution found" in finished.stderr, "the end of pip's own log"
    calls = clone.calls()
    assert calls[-1].endswith("torch==2.13.0"), f"nothing is installed after that: {calls}"


def test_what_another_set_up_left_half_way_is_set_up_again(clone):
    """Its steps have changed the environment, so that the stamp of the one before it is no longer true."""
    constraints = clone.folder / "constraints.txt"
    before = constraints.read_text()
    clone.setup()
    constraints.write_text(before + "# another commit\n")
    clone.setup(code=1, FAIL="-e .[")
    constraints.write_text(before)
    clone.calls()
    clone.setup()
    assert clone.calls()


@pytest.mark.parametrize("name", INPUTS)
def test_a_changed_input_sets_up_again(clone, name):
    clone.setup()
    clone.calls()
    with (clone.folder / name).open("a") as file:
        file.write("# changed\n")
    clone.setup()
    assert clone.calls()


def test_horovod_is_built_once_per_machine(clone):
    clone.setup()
    first = clone.calls()
    assert sum("pip wheel" in call for call in first) == 1
    shutil.rmtree(clone.folder / ".venv")
    shutil.rmtree(clone.folder / ".setup")
    clone.setup()
    second = clone.calls()
    assert not any("pip wheel" in call for call in second)
    assert any(f"{clone.home}/.cache/dsframe/wheels/horovod-0.28.1-" in call for call in second)


@pytest.mark.parametrize(
    ("gpus", "wsl", "tools", "variables", "torch", "horovod"),
    [
        (0, False, (), {}, CPU, "gloo"),
        (1, False, (), {}, CUDA, "gloo"),
        (8, False, ("nvcc", "mpicxx", "mpirun"), {}, CUDA, "gloo mpi nccl"),
        (8, False, ("nvcc",), {"CUDA_VISIBLE_DEVICES": ""}, CUDA, "gloo nccl"),
        (1, True, (), {}, CUDA, "gloo"),
        (0, False, ("nvcc",), {"DSFRAME_TORCH": "cuda"}, CUDA, "gloo nccl"),
        (1, False, ("nvcc",), {"DSFRAME_TORCH": "cpu"}, CPU, "gloo"),
    ],
)
def test_what_a_machine_gets(clone, gpus, wsl, tools, variables, torch, horovod):
    clone.machine(gpus, *tools, wsl=wsl)
    finished = clone.setup(HOROVOD_NCCL_HOME="/", **variables)
    assert clone.tried() == [torch]
    assert f"compiling Horovod ({horovod})" in finished.stdout
    assert clone.setup(HOROVOD_NCCL_HOME="/", **variables).stdout == ""


def test_an_environment_with_cuda_stays_one_on_a_login_node(clone):
    """One folder, two kinds of machine: any make target on the login node took CUDA, NCCL and MPI away."""
    clone.machine(4, "nvcc", "mpicxx", "mpirun")
    clone.setup(HOROVOD_NCCL_HOME="/")
    clone.calls()
    clone.machine(0)
    for _ in range(2):
        finished = clone.setup()
        assert (finished.stdout, clone.calls()) == ("", [])
    with (clone.folder / "constraints.txt").open("a") as file:
        file.write("# another commit\n")
    finished = clone.setup()
    assert "Horovod stays as it was compiled, with gloo mpi nccl: this machine lacks nvcc or MPI" in finished.stderr
    assert not any("horovod" in call for call in clone.calls())


def test_a_gpu_node_exchanges_the_build_of_a_login_node(clone):
    """To pip, 2.13.0+cpu is 2.13.0: it would keep it."""
    clone.setup()
    clone.calls()
    clone.machine(1)
    clone.setup()
    assert "-m pip uninstall -y torch" in clone.calls()
    assert clone.pinned() == CUDA


def test_an_index_that_prefers_the_cpu_build_is_asked_for_the_other(clone):
    """To pip 2.13.0+cpu is newer than 2.13.0, PyPI's build with CUDA, where some index or folder of wheels has both."""
    clone.setup(DSFRAME_TORCH="cuda", PREFERS="+cpu")
    assert clone.tried() == [CUDA, "torch===2.13.0"]
    assert clone.pinned() == CUDA


def installed(folder, *programs, says='ran $(basename "$0") $*'):
    """Copies launch/ beside an environment of programs that say how they are called. Without the wrappers: they need dsframe."""
    shutil.copytree(REPOSITORY / "launch", folder / "launch", ignore=shutil.ignore_patterns("bin"))
    environment = folder / ".venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "activate").write_text(f'PATH="{environment}:$PATH"\n')
    for name in programs:
        (environment / name).write_text(f'#!/bin/sh\necho "{says}"\n')
        (environment / name).chmod(0o755)


def test_a_horovod_that_does_not_compile_is_left_out(clone):
    finished = clone.setup(FAIL="pip wheel")
    assert "horovod-build failed after" in finished.stderr
    assert (
        "Horovod is left out (.setup/horovod-build.log says why; it needs g++, make and python3-dev)" in finished.stderr
    )
    assert clone.setup(FAIL="pip wheel").stdout == "", "it is not compiled at each make"


@pytest.mark.parametrize(("free", "enough"), [(1999, False), (2001, True)])
def test_a_disk_that_is_too_small_is_seen_before_anything_is_fetched(clone, free, enough):
    (clone.tools / "df").unlink()
    clone.tool("df", f"#!/bin/sh\necho Filesystem 1M-blocks Used Available\necho disk 9 9 {free}\n")
    finished = clone.setup(code=int(not enough))
    said = f"the environment takes 2000 MiB of disk; {clone.folder} has {free} MiB left"
    assert (said in finished.stderr) == (not enough)
    assert bool(clone.tried()) == enough


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_activate(tmp_path, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    clone = tmp_path / "a clone"
    shutil.copytree(REPOSITORY / "launch", clone / "launch")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True, timeout=60)
    script = """
    before=$PATH
    . "launch/activate" && . "$PWD/launch/activate"
    [ "$PATH" = "$PWD/launch/bin:$PWD/.venv/bin:$before" ] || echo "PATH=$PATH"
    [ "$VIRTUAL_ENV" = "$PWD/.venv" ] || echo "VIRTUAL_ENV=$VIRTUAL_ENV"
    [ -z "${_dsframe_root-}${_dsframe_file-}" ] || echo "a variable is left"
    command -v deepspeed
    deactivate
    [ "$PATH" = "$before" ] || echo "PATH after: $PATH"
    """
    finished = run_program([shell, "-c", script], cwd=clone, env={"PATH": os.defpath})
    assert finished.stderr == ""
    assert finished.stdout.splitlines() == [f"{clone}/launch/bin/deepspeed"]


@pytest.mark.parametrize(
    ("arguments", "checked", "run"),
    [
        ("deepspeed", "zero3.json -np 2", "deepspeed --num_gpus=2 -m dsframe.train"),
        (
            "horovod -n 4 --config x.json --set a=1",
            "x.json -np 4 --set a=1",
            "horovodrun -np 4 python -m dsframe.train --config x.json --set a=1",
        ),
        (
            "ddp -n 1 --config=y.json",
            "y.json -np 1",
            "torchrun --standalone --nproc-per-node=1 -m dsframe.train --engine ddp --config=y.json",
        ),
    ],
)
@without_gpu
def test_one_machine(tmp_path, arguments, checked, run):
    installed(tmp_path, "dsframe", "deepspeed", "horovodrun", "torchrun")
    done = run_program([tmp_path / "launch" / "one-machine", *arguments.split()], cwd="/")
    assert done.stderr == f"ran dsframe check {checked}\n"
    assert done.stdout == f"{run}\nran {run}\n"
