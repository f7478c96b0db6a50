"""Runs real jobs from tests: with a hard time limit, every rank's stack when it strikes, and without remains.

    finished = run_ranks(deepspeed(2, ["-m", "dsframe.train", "--config", "zero1.json"]), timeout_seconds=99, cwd=path)
    finished.check()                      # raises with the whole output unless the job exited with 0
    assert "loss" in finished.stdout

Every process of a run carries the environment variable DSFRAME_TEST_ID, which survives setsid, double forks and launchers, or
is in the session of such a job (tests/warm.py): what is left of them after the run is an orphan, is ended, and fails the test.
Nothing else is touched.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from dsframe.host.leftovers import SHARED_MEMORY, unused_buffers
from tests.files import read_json

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MARK = "DSFRAME_TEST_ID"
HAS_GPUS = any(Path("/dev").glob("nvidia[0-9]*"))
WARM = Path(tempfile.gettempdir(), f"dsframe-warm-{os.getpid()}")
"""The folder of tests/warm.py: its socket, what it says, and the sessions of its jobs, each under its mark."""
COMPILING_SECONDS = 1200.0
"""What a run may take that first compiles DeepSpeed's op for NVMe, or waits until another has compiled it."""


@dataclass(frozen=True)
class Finished:
    """What a run left: a negative `returncode` is the signal that ended the first process."""

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self):
        return self.stdout + self.stderr

    def check(self):
        """Returns itself when the run exited with 0, otherwise raises AssertionError with its whole output."""
        if self.returncode != 0:
            raise AssertionError(f"exit code {self.returncode}\n{self}")
        return self

    def __str__(self):
        return (
            f"$ {shlex.join(self.command)}   ({self.seconds:.1f} s, exit code {self.returncode})\n"
            f"--- stdout ---\n{_end(self.stdout)}\n--- stderr ---\n{_end(self.stderr)}"
        )


class Running:
    """A run under way, as `while_running` sees it."""

    def __init__(self, process, mark, stdout, stderr):
        self.process = process
        self.mark = mark
        self._stdout, self._stderr = stdout, stderr

    @property
    def stdout(self):
        """What has been written so far."""
        return _read(self._stdout)

    @property
    def output(self):
        """What has been written so far, standard error after standard output."""
        return self.stdout + _read(self._stderr)

    def processes(self):
        """Every living process of the run, the launcher's included."""
        return marked(self.mark)

    def ranks(self):
        """The training processes by rank: those that a launcher gave a rank which their parent does not have."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                rank = _rank(process)
                if rank is not None and (parent is None or _rank(parent) is None):
                    found[rank] = process
        return found

    def wait_for_end(self, *, timeout_seconds):
        """Waits until no process of the run is left; raises AssertionError when the time is over first."""
        limit = time.monotonic() + timeout_seconds
        while self.process.poll() is None or self.processes():
            if time.monotonic() > limit:
                raise AssertionError(f"{timeout_seconds:.0f} s passed before everything had ended\n{_end(self.output)}")
            time.sleep(0.1)

    def wait_for(self, condition, *, timeout_seconds, what):
        """Polls `condition` until it is true; raises AssertionError when the run ends or the time is over first."""
        limit = time.monotonic() + timeout_seconds
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended with {self.process.returncode} before {what}\n{_end(self.output)}")
            if time.monotonic() > limit:
                raise AssertionError(f"{timeout_seconds:.0f} s passed before {what}\n{_end(self.output)}")
            time.sleep(0.05)


def run_program(command, *, check=True, **options):
    """Runs what starts no ranks to its end; what it wrote is text. ``options``: those of ``subprocess.run``."""
    options = {"capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run(command, check=check, **options)


def run_ranks(
    command,
    *,
    timeout_seconds,
    cwd=REPOSITORY,
    env=None,
    settle_seconds=5.0,
    while_running=None,
):
    """Runs `command` to its end in a session of its own and returns what it wrote.

    env: added to a copy of this process's environment; None takes a variable out.
    settle_seconds: how long after the first process has ended the others may live on.
    while_running: called once, in this thread, while the run is under way (to send it a signal, say).

    Raises AssertionError, after it has ended every process of the run, when the run takes longer than
    `timeout_seconds` (the message holds the Python stack of each of its processes), when processes are left over, or
    when files of DeepSpeed are left in /dev/shm.
    """
    mark = uuid.uuid4().hex
    variables = environment(mark, env)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dsframe-run-") as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
        remains = []
        stacks = ""
        try:
            if while_running is not None:
                while_running(Running(process, mark, out, err))
            process.wait(timeout=max(0.0, started + timeout_seconds - time.monotonic()))
            remains = _orphans(mark, settle_seconds)
        except subprocess.TimeoutExpired:
            stacks = stacks_of(marked(mark))
        finally:
            end(mark)
            process.wait()
            leaked = _remove_buffers([*command, f"--master_port={variables.get('MASTER_PORT')}"])
        finished = Finished(
            tuple(command),
            process.returncode,
            _read(out),
            _read(err),
            time.monotonic() - started,
        )
    if stacks:
        raise AssertionError(f"still running after {timeout_seconds:.0f} s\n{finished}\n--- stacks ---\n{stacks}")
    if remains:
        raise AssertionError(f"left over {settle_seconds:.0f} s after the end: {'; '.join(remains)}\n{finished}")
    if leaked:
        raise AssertionError(f"left in {SHARED_MEMORY}: {', '.join(leaked)}\n{finished}")
    return finished


def reported(
    module,
    folder,
    launch,
    cases=(),
    *,
    timeout_seconds=300.0,
):
    """The report of ``tests.engines.MODULE`` on its cases, which runs in ``folder``.

    launch: the number of its ranks, or what makes the command line.
    """
    arguments = ["-m", f"tests.engines.{module}", str(folder / "report.json"), *cases]
    command = warm(launch, arguments) if isinstance(launch, int) else launch(arguments)
    run_ranks(command, cwd=folder, timeout_seconds=timeout_seconds).check()
    return read_json(folder / "report.json")


@contextlib.contextmanager
def ready_programs():
    """A function that starts `python ARGUMENTS...` and returns when the program has printed "ready". At the end all are killed,
    each with its session, as they may be stuck by then."""
    started = []

    def begin(*arguments):
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    try:
        yield begin
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def deepspeed(processes, arguments, *, port=None):
    """The command line of a run under DeepSpeed's launcher, by launch/bin/deepspeed."""
    return ["deepspeed", f"--num_gpus={processes}", f"--master_port={port or free_port()}", *arguments]


def horovodrun(processes, arguments):
    """The command line of a run under Horovod's launcher; `arguments` are what follows `python`."""
    return ["horovodrun", "-np", str(processes), "python", *arguments]


def torchrun(processes, arguments, *, port=None):
    """The command line of a run under torchrun."""
    return ["torchrun", f"--nproc-per-node={processes}", f"--master-port={port or free_port()}", *arguments]


def python(arguments):
    """The command line of a run without a launcher."""
    return ["python", *arguments]


def forked(launch, processes, arguments, **options):
    """The command line of a run under this launcher, whose ranks are forked as those of `warm`: for what ranks say and how
    they end by themselves, in the environment that the launcher gives them."""
    if HAS_GPUS:
        return launch(processes, arguments, **options)
    python_, *asks = warm(1, arguments)
    if launch is horovodrun:
        return ["horovodrun", "-np", str(processes), python_, *asks]
    quiet = ["--quiet", "--no_local_rank"] if launch is deepspeed else []
    return launch(processes, [*quiet, *asks[1:]], **options)


def warm(processes, arguments, *, standin=False):
    """The command line of a run whose ranks begin with everything imported (tests/warm.py); torchrun's variables, if several.

    torchrun's own, or python's, where there are GPUs: torch looks for them when it is imported, and then cannot be forked.
    standin: with the stand-in for GPUs (tests/standin), which can.
    """
    if HAS_GPUS and not standin:
        return torchrun(processes, arguments) if processes > 1 else python(arguments)
    server = _warm_server("standin" if standin else "plain")
    return [sys.executable, "-S", str(REPOSITORY / "tests" / "warm.py"), server, str(processes), *arguments]


@functools.cache
def _warm_folder():
    shutil.rmtree(WARM, ignore_errors=True)  # of another process that had this one's number
    WARM.mkdir()
    atexit.register(shutil.rmtree, WARM, ignore_errors=True)
    return WARM


@functools.cache
def _warm_server(kind):
    """The socket of a server that ends with this process: "plain", or one with the stand-in for GPUs."""
    folder = _warm_folder()
    path, said = folder / f"socket-{kind}", folder / f"said-{kind}"
    variables = environment("warm")
    if kind == "standin":
        from tests import standin

        variables |= standin.environment()
    with said.open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(path)],
            cwd=REPOSITORY,
            env=variables,
            stdin=subprocess.PIPE,  # which closes with this process
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def close():
        assert server.stdin is not None
        server.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=10)
        server.kill()  # one that still imports
        server.wait()

    atexit.register(close)
    limit = time.monotonic() + 120.0
    while not path.exists():
        if server.poll() is not None or time.monotonic() > limit:
            reason = _read(said)
            close()
            raise AssertionError(f"tests/warm.py does not come up:\n{reason}")
        time.sleep(0.05)
    return str(path)


def free_port():
    """A TCP port of this machine that nobody has now, and that the system gives to nobody by itself (ip_local_port_range): ranks
    take seconds until they listen on it, while another test's come and go."""
    while True:
        port = 15_000 + secrets.randbelow(17_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment(mark, changes=None):
    """The environment of a run: this one, without what a launcher or CI may have left in it, and with `changes`."""
    variables = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.match(name)}
    variables |= {
        MARK: mark,
        "PATH": os.pathsep.join([str(REPOSITORY / "launch" / "bin"), str(BIN), variables.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [variables.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # SIGABRT then prints the stacks where py-spy may not look
        "PYTHONUTF8": "1",
        "LC_ALL": "C.UTF-8",
        "MASTER_PORT": str(free_port()),
        # Compiled operators are kept from test to test, but not shared with another virtual environment: DeepSpeed's
        # build files name the environment's path, so two that share a folder rebuild each other's operators.
        "TORCH_EXTENSIONS_DIR": variables.get("TORCH_EXTENSIONS_DIR", str(REPOSITORY / ".setup" / "torch_extensions")),
    }
    for name, value in (changes or {}).items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    return variables


def marked(mark):
    """Every living process that carries `mark` in its environment, or is of a warm job that does, except this one."""
    found = []
    # A forked rank shows its server's environment.
    sessions = {int(path.suffix[1:]) for path in WARM.glob(f"{mark}.*")}
    for process in psutil.process_iter():
        if process.pid != os.getpid() and (_environment(process).get(MARK) == mark or _session(process) in sessions):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def end(mark):
    """Kills every process that carries `mark`, and those that they start meanwhile."""
    while living := marked(mark):
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)  # not psutil.wait_procs: it would take the exit code of our child away from subprocess


_LAUNCHER_VARIABLES = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_SIZE|LOCAL_WORLD_SIZE|CROSS_RANK|CROSS_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT)$"
    r"|(HOROVOD|OMPI_|PMI_|PMIX_|SLURM_|TORCHELASTIC_)"
)
_RANK_VARIABLES = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")


def _end(text, characters=10_000):
    return text if len(text) <= characters else f"... {text[-characters:]}"


def _read(path):
    return path.read_text(encoding="utf-8", errors="replace")


def _rank(process):
    """The rank that a launcher gave it, or tests/warm.py."""
    variables = _environment(process)
    for name in _RANK_VARIABLES:
        if name in variables:
            return int(variables[name])
    try:
        own = Path("/proc", str(process.pid), "comm").read_text().strip()
    except OSError:
        return None
    return int(own.removeprefix("rank ")) if own.startswith("rank ") else None


def _environment(process):
    try:
        return dict(process.environ())
    except (psutil.Error, OSError):  # gone meanwhile, a zombie, or another user's
        return {}


def _session(process):
    """The number of its session; -1 where it is gone."""
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1


def _orphans(mark, settle_seconds):
    limit = time.monotonic() + settle_seconds
    while (living := marked(mark)) and time.monotonic() < limit:
        time.sleep(0.1)
    described = []
    for process in living:
        with contextlib.suppress(psutil.Error):
            described.append(f"{process.pid} ({shlex.join(process.cmdline())[:200]})")
    return described


def stacks_of(processes):
    """The Python stack of each process, by py-spy, or by its own fault handler where py-spy may not look."""
    shown = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if "python" not in Path(process.exe()).name:
                continue
            rank = _rank(process)
            dump = _py_spy(process.pid)
            if dump is None:
                process.send_signal(signal.SIGABRT)
                time.sleep(0.5)
                dump = "(py-spy could not read it: see stderr for what its fault handler printed)"
            shown.append(f"rank {rank if rank is not None else '-'}: {dump.strip()}")
    return "\n\n".join(shown) or "(no Python process)"


def _py_spy(pid):
    try:
        dumped = subprocess.run(
            [BIN / "py-spy", "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=15,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return dumped.stdout if dumped.returncode == 0 else None


def _remove_buffers(command):
    """Removes what is left in shared memory; names DeepSpeed's buffers under the run's own port, which nobody killed."""
    for path in unused_buffers():
        if path.name.startswith("vader"):  # Open MPI leaves them when it is killed, which tests do
            path.unlink(missing_ok=True)
    ports = re.findall(r"--master[_-]port[= ](\d+)", " ".join(command))
    leaked = [path for port in ports for path in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*")]
    for path in leaked:
        path.unlink(missing_ok=True)
    return [path.name for path in leaked]
