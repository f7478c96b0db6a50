"""The command line of each launcher for one job. Nothing is started here, so that ``--print`` shows exactly what would be."""

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

# What another host cannot know by itself. The rest of its environment is its own.
PASSED_ON = (
    "DSFRAME", "OMP_", "GLOO_", "NCCL_", "FI_", "UCX_", "HOROVOD_", "DS_", "CUDA_LAUNCH", "TORCH", "PYTHON", "LC_", "HF_", "MKL_",
    "LD_LIBRARY_PATH", "PATH",
)  # fmt: skip

NAMES = ("deepspeed", "horovodrun", "torchrun", "mpirun", "srun", "python")


@dataclass(frozen=True)
class Elastic:
    """Limits on the number of processes in an elastic run."""

    least: int
    most: int | None = None
    script: str | None = None
    """Prints the hosts of the moment, ``name:slots`` a line. None: the job's hosts, as long as they are there."""


@dataclass(frozen=True)
class Job:
    """A job, for any launcher."""

    processes: int
    program: tuple[str, ...]
    """Words after ``python``: ``-m dsframe.train``, or a script of the user's."""
    arguments: tuple[str, ...]
    """Arguments of the program."""
    hosts: tuple[Host, ...] = ()
    """Hosts with the processes of each; empty: this machine only."""
    hostfile: Path | None = None
    """The file that names them; None: the command line does, or Slurm."""
    gpus: tuple[str, ...] = ()
    """GPUs out of CUDA_VISIBLE_DEVICES that this machine's processes use; empty: all that they see."""
    threads: int = 1
    """Threads of each process."""
    address: str = "127.0.0.1"
    """Address of rank 0."""
    port: int = 29500
    """Port for torch.distributed at that address. ``dsframe launch`` takes a free one of this machine."""
    interface: str | None = None
    """The network interface to the other hosts, by which name all of them know it."""
    allocation: bool = False
    """True if ``hosts`` are those of the Slurm allocation that this runs in."""
    elastic: Elastic | None = None
    """Limits for ``horovodrun``; None: the number of processes is fixed."""


@dataclass(frozen=True)
class Launch:
    """Commands that start a job: one, or one for each host."""

    commands: tuple[tuple[str, ...], ...]
    """The first word is the program. Several: by the order of the job's hosts."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to one's own."""
    forwards: bool = False
    """The launcher passes USR1 on to its workers, which are not its own children."""

    def show(self, hosts: tuple[Host, ...], most: int | None = None) -> str:
        """Returns the command as a person would type it, with ``***`` for secrets; if each host has its own command, with
        the host before it, of ``most`` hosts at most."""
        setting = "".join(f"{name}={shlex.quote(value)} " for name, value in self.environment.items())
        shown = [setting + shlex.join(redact(command)) for command in self.commands[:most]]
        if len(self.commands) == 1:
            return shown[0]
        lines = [f"{host.name}$ {line}" for host, line in zip(hosts, shown, strict=False)]
        more = len(self.commands) - len(shown)
        return "\n".join([*lines, *([f"... and so on {more} more hosts"] if more else [])])


def plan(launcher: str, job: Job) -> Launch:
    """The commands of ``launcher`` for ``job``. Raises WorldError where it cannot start such a job."""
    if job.elastic and launcher != "horovodrun":
        raise WorldError(
            f"--min-np, --max-np and --host-discovery-script work with horovodrun only, not with {launcher}"
        )
    return _PLANS[launcher](job)


def search_path() -> str:
    """Returns where commands are looked for: PATH, then this environment, which need not be activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def program(name: str) -> str:
    """Returns where a launcher is: on PATH, else beside this Python. Raises WorldError where it is not installed."""
    found = shutil.which(name, path=search_path())
    if found is None:
        raise WorldError(
            f"{name} is not installed; dsframe doctor lists what is installed, and how to install the rest"
        )
    return found


def python() -> str:
    """This Python, by the short name where that means the same."""
    found = shutil.which("python")
    same = found is not None and Path(found).absolute() == Path(sys.executable).absolute()
    return "python" if same else sys.executable


def _threads(job: Job) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(job.threads)}


def _module(job: Job, option: str) -> tuple[str, ...]:
    """The program in the words of a launcher that starts Python itself."""
    return (option, *job.program[1:]) if job.program[0] == "-m" else job.program


def _python(job: Job) -> Launch:
    if job.processes != 1 or job.hosts:
        raise WorldError(f"plain python starts one process here, not {job.processes}; name a launcher")
    return Launch(((python(), *job.program, *job.arguments),), _threads(job), forwards=True)


def _deepspeed(job: Job) -> Launch:
    """DeepSpeed's. On several hosts it starts its processes by pdsh."""
    words = (*_module(job, "--module"), *job.arguments)
    if not job.hosts:
        # With --num_gpus it drops CUDA_VISIBLE_DEVICES and takes GPUs 0 to N-1, which may be other people's.
        if devices.hidden(os.environ):
            raise WorldError(
                "CUDA_VISIBLE_DEVICES hides all GPUs. deepspeed sets that variable anew for its processes, which would use the "
                "GPUs. To train on the CPU: --launcher torchrun"
            )
        mask = {"CUDA_VISIBLE_DEVICES": ",".join(job.gpus)} if job.gpus else {}
        if not all(gpu.isdecimal() for gpu in job.gpus):
            raise WorldError(
                f"CUDA_VISIBLE_DEVICES={mask['CUDA_VISIBLE_DEVICES']}: deepspeed accepts GPU numbers only; write their numbers, "
                "or choose another launcher: --launcher torchrun"
            )
        number = () if mask else (f"--num_gpus={job.processes}",)
        own = ("deepspeed", *number, f"--master_port={job.port}")
        return Launch(((*own, *words),), _threads(job) | mask)
    if job.hostfile is None:
        raise WorldError(
            'deepspeed reads the names of hosts from a file: write a line "name slots=4" for each, and name it with --hostfile'
        )
    included = "@".join(f"{host.name}:{','.join(map(str, range(host.slots)))}" for host in job.hosts)
    meeting = (f"--master_addr={job.address}", f"--master_port={job.port}")
    command = ("deepspeed", f"--hostfile={job.hostfile}", f"--include={included}", *meeting, *words)
    return Launch((command,), _threads(job))


def _torchrun(job: Job) -> Launch:
    words = (*_module(job, "-m"), *job.arguments)
    meeting = (f"--master-addr={job.address}", f"--master-port={job.port}")
    if not job.hosts:
        return Launch((("torchrun", f"--nproc-per-node={job.processes}", *meeting, *words),), _threads(job))
    if len({host.slots for host in job.hosts}) > 1:
        raise WorldError(
            f"torchrun needs the same number of processes on every host, not {show(job.hosts)}; choose another launcher"
        )
    options = ("torchrun", f"--nnodes={len(job.hosts)}", f"--nproc-per-node={job.hosts[0].slots}", *meeting)
    commands = ((*options, f"--node-rank={node}", *words) for node in range(len(job.hosts)))
    return Launch(tuple(commands), _threads(job))


def _horovodrun(job: Job) -> Launch:
    hosts = ("-H", show(job.hosts)) if job.hosts else ()
    interface = ("--network-interfaces", job.interface) if job.interface and (job.hosts or job.elastic) else ()
    changing: tuple[str, ...] = ()
    if job.elastic:
        changing = ("--min-np", str(job.elastic.least))
        changing += ("--max-np", str(job.elastic.most)) if job.elastic.most else ()
        changing += ("--host-discovery-script", job.elastic.script) if job.elastic.script else ()
    command = ("horovodrun", "-np", str(job.processes), *hosts, *changing, *interface)
    return Launch(((*command, python(), *job.program, *job.arguments),), _threads(job))


def _mpirun(job: Job) -> Launch:
    """Open MPI's. Binding is left out: it would put both threads of two ranks on one core."""
    environment = {**_threads(job), "MASTER_ADDR": job.address, "MASTER_PORT": str(job.port)}
    root = ("--allow-run-as-root",) if os.getuid() == 0 else ()
    exported = tuple(word for name in environment for word in ("-x", name))
    hosts: tuple[str, ...] = ("--oversubscribe",)
    if job.hosts:
        hosts = ("--host", show(job.hosts))
        sent = (name for name in os.environ if name.startswith(PASSED_ON) and name not in environment)
        exported += tuple(word for name in sorted(sent) for word in ("-x", name))
        if job.interface:
            hosts += ("--mca", "btl_tcp_if_include", job.interface, "--mca", "oob_tcp_if_include", job.interface)
    command = ("mpirun", "-np", str(job.processes), *root, *hosts, "--bind-to", "none", *exported)
    return Launch(((*command, python(), *job.program, *job.arguments),), environment, forwards=True)


def _srun(job: Job) -> Launch:
    """Inside an allocation, or asking for one. A task that fails ends all."""
    nodes: tuple[str, ...] = (f"--nodes={len(job.hosts)}",) if job.hosts else ()
    if job.hosts and not job.allocation:
        nodes += ("--nodelist=" + ",".join(host.name for host in job.hosts),)
    cpus = os.environ.get("SLURM_CPUS_PER_TASK") if job.allocation else None
    if cpus:  # since Slurm 22.05 srun no longer inherits it from sbatch (srun's manual): each task would have one CPU
        nodes += (f"--cpus-per-task={cpus}",)
    command = ("srun", f"--ntasks={job.processes}", *nodes, "--kill-on-bad-exit=1")
    environment = {**_threads(job), "MASTER_PORT": str(job.port)}
    return Launch(((*command, python(), *job.program, *job.arguments),), environment, forwards=True)


_PLANS: Mapping[str, Callable[[Job], Launch]] = {
    "deepspeed": _deepspeed,
    "horovodrun": _horovodrun,
    "torchrun": _torchrun,
    "mpirun": _mpirun,
    "srun": _srun,
    "python": _python,
}


def natural(engine: str, job: Job) -> str:
    """The launcher that belongs to an engine: Horovod's, DeepSpeed's, torch's; srun in an allocation, python for one process.

    On several hosts DeepSpeed's needs pdsh and a host file, and torch's starts the processes of one host only: without, mpirun.
    """
    if job.elastic:
        return "horovodrun"
    if job.allocation:
        return "srun"
    if job.processes == 1 and not job.hosts:
        return "python"
    own = TABLE[engine].launcher
    if not job.hosts or own not in ("deepspeed", "torchrun"):
        return own
    if own == "deepspeed" and job.hostfile is not None and _installed("deepspeed") and _installed("pdsh"):
        return own
    return "mpirun" if _installed("mpirun") else "torchrun"


def _installed(name: str) -> bool:
    return shutil.which(name, path=search_path()) is not None


def quietly(launch: Launch) -> Launch:
    """The launch without DeepSpeed's own log, which is 18 lines."""
    if launch.commands[0][0] != "deepspeed":
        return launch
    name, *words = launch.commands[0]
    known = "DS_ACCELERATOR" in os.environ or devices.accelerators()
    processor = {} if known else {"DS_ACCELERATOR": "cpu"}  # it says three times that it found none
    return replace(launch, commands=((name, "--quiet", *words),), environment={**processor, **launch.environment})


def with_arguments(job: Job, *arguments: str) -> Job:
    """The job with more arguments for its program."""
    return replace(job, arguments=(*job.arguments, *arguments))
