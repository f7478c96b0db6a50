"""Builds each launcher's command line for a job. Starts nothing."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsframe.config.read.secrets import redact
from dsframe.engines import TABLE
from dsframe.errors import WorldError
from dsframe.tools.launch import devices
from dsframe.tools.launch.hosts import Host, show

# Prefixes of variables that other hosts need. The rest of their environment is their own.
PASSED_ON = (
    "DSFRAME", "OMP_", "GLOO_", "NCCL_", "FI_", "UCX_", "HOROVOD_", "DS_", "CUDA_LAUNCH", "TORCH", "PYTHON", "LC_", "HF_", "MKL_",
    "LD_LIBRARY_PATH", "PATH",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job, for any launcher."""

    processes: int
    program: tuple[str, ...]
    """Words after ``python``: ``-m dsframe.train``, or the user's script."""
    arguments: tuple[str, ...]
    """Arguments of the program."""
    hosts: tuple[Host, ...] = ()
    """Hosts with their slots; empty for this machine only."""
    hostfile: Path | None = None
    """Host file; None if the hosts are from the command line or Slurm."""
    gpus: tuple[str, ...] = ()
    """GPUs from CUDA_VISIBLE_DEVICES for this machine's processes; empty for all visible ones."""
    threads: int = 1
    """Threads of each process."""
    address: str = "127.0.0.1"
    """Address of rank 0."""
    port: int = 29500
    """Port of torch.distributed on rank 0."""
    interface: str | None = None
    """Name of the network interface to the other hosts; the same on all."""
    allocation: bool = False
    """True if ``hosts`` are those of the surrounding Slurm allocation."""


@dataclass(frozen=True)
class Launch:
    """The command that starts a job."""

    command: tuple[str, ...]
    """The program and its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to add."""
    forwards: bool = False
    """True if the launcher forwards USR1 to its workers, which are not its children."""

    def __str__(self) -> str:
        """The command as typed in a shell, with ``***`` for secrets."""
        variables = (f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return " ".join([*variables, shlex.join(redact(self.command))])


def plan(launcher: str, job: Job) -> Launch:
    """Returns the command of ``launcher`` for ``job``. Raises WorldError if it cannot start such a job."""
    launch = _PLANS[launcher](job)
    return replace(launch, environment={"OMP_NUM_THREADS": str(job.threads), **launch.environment})


def search_path() -> str:
    """Returns where commands are looked up: PATH, then this Python environment, which need not be activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def installed(name: str) -> bool:
    """True if a launcher is on the search path."""
    return shutil.which(name, path=search_path()) is not None


def program(name: str) -> str:
    """Returns the path of a launcher. Raises WorldError if it is not installed."""
    path = shutil.which(name, path=search_path())
    if path is None:
        raise WorldError(f"{name} is not installed; dsframe doctor says how to install it")
    return path


def python() -> str:
    """Returns this Python, as ``python`` if that is the same."""
    path = shutil.which("python")
    same = path is not None and Path(path).absolute() == Path(sys.executable).absolute()
    return "python" if same else sys.executable


def _python_words(job: Job) -> tuple[str, ...]:
    return (python(), *job.program, *job.arguments)


def _module_words(job: Job, option: str) -> tuple[str, ...]:
    """Returns the program in the notation of a launcher that starts Python itself."""
    words = (option, *job.program[1:]) if job.program[0] == "-m" else job.program
    return (*words, *job.arguments)


def _python(job: Job) -> Launch:
    if job.processes != 1 or job.hosts:
        raise WorldError(f"plain python starts one process here, not {job.processes}; name a launcher")
    return Launch(_python_words(job), forwards=True)


def _deepspeed(job: Job) -> Launch:
    """Builds DeepSpeed's command. On several hosts it starts processes by pdsh, as many as the host file says."""
    words = _module_words(job, "--module")
    if job.hosts:
        if job.hostfile is None or job.processes != sum(host.slots for host in job.hosts):
            message = 'deepspeed starts what a file says: a line "name slots=4" for each host'
            raise WorldError(f"{message}; name it with --hostfile, without -np")
        meeting = (f"--master_addr={job.address}", f"--master_port={job.port}")
        return Launch(("deepspeed", f"--hostfile={job.hostfile}", *meeting, *words))
    # With --num_gpus it ignores CUDA_VISIBLE_DEVICES and uses GPUs 0 to N-1, which may be in use by others.
    mask = ",".join(job.gpus)
    if devices.hidden(os.environ) or (not mask.replace(",", "0").isdecimal() and mask):
        given = os.environ["CUDA_VISIBLE_DEVICES"]
        raise WorldError(
            f"CUDA_VISIBLE_DEVICES={given}: deepspeed sets that variable itself and takes GPU numbers "
            "only; write numbers, or choose another launcher: --launcher torchrun"
        )
    number = () if mask else (f"--num_gpus={job.processes}",)
    environment = {"CUDA_VISIBLE_DEVICES": mask} if mask else {}
    return Launch(("deepspeed", *number, f"--master_port={job.port}", *words), environment)


def _torchrun(job: Job) -> Launch:
    if job.hosts:
        raise WorldError(
            "torchrun starts the processes of one host: run it on each (docs/launching.md), or install pdsh "
            "(for deepspeed, with --hostfile) or Open MPI"
        )
    meeting = (f"--master-addr={job.address}", f"--master-port={job.port}")
    words = _module_words(job, "-m")
    return Launch(("torchrun", f"--nproc-per-node={job.processes}", *meeting, *words))


def _horovodrun(job: Job) -> Launch:
    hosts = ("-H", show(job.hosts)) if job.hosts else ()
    interface = ("--network-interfaces", job.interface) if job.interface and job.hosts else ()
    options = ("-np", str(job.processes), *hosts, *interface)
    return Launch(("horovodrun", *options, *_python_words(job)))


def _mpirun(job: Job) -> Launch:
    """Builds Open MPI's command. No binding, which would put both threads of two ranks on one core."""
    environment = {"MASTER_ADDR": job.address, "MASTER_PORT": str(job.port)}
    exported = ["OMP_NUM_THREADS", *environment]
    hosts: tuple[str, ...] = ("--oversubscribe",)
    if job.hosts:
        hosts = ("--host", show(job.hosts))
        passed = (name for name in os.environ if name.startswith(PASSED_ON))
        exported += sorted({*passed} - {*exported})
        for option in ("btl_tcp_if_include", "oob_tcp_if_include") if job.interface else ():
            hosts += ("--mca", option, str(job.interface))
    root = ("--allow-run-as-root",) if os.getuid() == 0 else ()
    exports = (word for name in exported for word in ("-x", name))
    options = ("-np", str(job.processes), *root, *hosts, "--bind-to", "none", *exports)
    return Launch(("mpirun", *options, *_python_words(job)), environment, forwards=True)


def _srun(job: Job) -> Launch:
    """Builds srun's command, inside an allocation or requesting one. A failing task ends all."""
    options = [f"--ntasks={job.processes}"]
    if job.hosts:
        options.append(f"--nodes={len(job.hosts)}")
    if job.hosts and not job.allocation:
        options.append("--nodelist=" + ",".join(host.name for host in job.hosts))
    cpus = os.environ.get("SLURM_CPUS_PER_TASK") if job.allocation else None
    if cpus:  # since Slurm 22.05 srun does not inherit it from sbatch, and each task would have one CPU
        options.append(f"--cpus-per-task={cpus}")
    command = ("srun", *options, "--kill-on-bad-exit=1", *_python_words(job))
    return Launch(command, {"MASTER_PORT": str(job.port)}, forwards=True)


_PLANS: Mapping[str, Callable[[Job], Launch]] = {
    "deepspeed": _deepspeed,
    "horovodrun": _horovodrun,
    "torchrun": _torchrun,
    "mpirun": _mpirun,
    "srun": _srun,
    "python": _python,
}
NAMES = tuple(_PLANS)


def natural(engine: str, job: Job) -> str:
    """Returns an engine's launcher: Horovod's, DeepSpeed's or torch's; srun in an allocation, python for one process.

    On several hosts, where DeepSpeed's needs pdsh and a host file and torchrun starts only one host's processes,
    mpirun.
    """
    if job.allocation:
        return "srun"
    if job.processes == 1 and not job.hosts:
        return "python"
    launcher = TABLE[engine].launcher
    starts_all = launcher == "deepspeed" and job.hostfile and installed("pdsh") and installed("deepspeed")
    if not job.hosts or starts_all or launcher not in ("deepspeed", "torchrun"):
        return launcher
    return "mpirun" if installed("mpirun") else "torchrun"


def quietly(launch: Launch) -> Launch:
    """Returns the launch without the launcher's output: DeepSpeed's 18 lines, torchrun's 30 and mpirun's 12 after a
    failure."""
    name, *words = launch.command
    if name == "torchrun":
        return replace(launch, command=(sys.executable, "-m", "dsframe.tools.launch.torchrun", *words))
    if name == "mpirun":
        return replace(launch, command=(name, "--quiet", *words))
    if name == "horovodrun":  # starts mpirun if Horovod was built with MPI
        return replace(launch, command=(name, "--mpi-args=--quiet", *words))
    if name != "deepspeed":
        return launch
    accelerator_known = "DS_ACCELERATOR" in os.environ or devices.accelerators()
    accelerator = (
        {} if accelerator_known else {"DS_ACCELERATOR": "cpu"}
    )  # it prints three times that it found no accelerator
    environment = {**accelerator, **launch.environment}
    return replace(launch, command=(name, "--quiet", *words), environment=environment)


def with_arguments(job: Job, *arguments: str) -> Job:
    """Returns the job with more arguments for its program."""
    return replace(job, arguments=(*job.arguments, *arguments))
