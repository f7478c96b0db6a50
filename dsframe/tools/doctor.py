"""``dsframe doctor``: what this machine can run, what it cannot and which command changes that, and what old runs left.

Every library is loaded in a process of its own: a build that does not fit this torch crashes there and is reported here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

from dsframe.engines import TABLE
from dsframe.host import supervise
from dsframe.host.leftovers import stale_locks, unused_buffers, unused_swap
from dsframe.host.source_files import shipped
from dsframe.tools.commands import command
from dsframe.tools.launch import devices
from dsframe.tools.launch.launchers import search_path

PROBE_SECONDS = 120.0
TORCH = """
import json, torch, torch.distributed as d
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "gloo": d.is_gloo_available(), "nccl": d.is_nccl_available(),
    "gpus": [[g.name, g.total_memory] for g in gpus]}))
"""
HOROVOD = """
import json, horovod.torch as h
print(json.dumps({"gloo": bool(h.gloo_built()), "mpi": bool(h.mpi_built()), "nccl": bool(h.nccl_built())}))
"""
DEEPSPEED = "import deepspeed; print('{}')"
TORCHVISION = "from dsframe.data._torchvision import torchvision; torchvision(); print('{}')"

ACTIVATE = 'eval "$(dsframe activate)"'
ENOUGH_SHARED_MEMORY = 2**30
"""Bytes. Containers have 64 MiB of it by default; workers of a data loader hand whole batches over in it, NCCL its messages."""
_PLAIN = re.compile(r"\x1b\[[0-9;]*m")
"""What colours and underlines text."""
SYMBOLS = {"ok": "ok", "absent": "--", "broken": "!!", "note": "  "}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    state: Literal["ok", "absent", "broken", "note"]
    text: str

    def __str__(self) -> str:
        return f"  {SYMBOLS[self.state]}  {self.text}"


@dataclass(frozen=True)
class Library:
    """Facts about an installed library; ``facts`` is None if it does not load."""

    name: str
    version: str
    facts: dict[str, Any] | None
    reason: str = ""
    """Why it does not load: the last line of its error."""

    @property
    def finding(self) -> Finding | None:
        """The line for one that does not load."""
        if self.facts is not None:
            return None
        return Finding("broken", f"{self.name} {self.version} does not load: {self.reason}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("doctor", "Report what this machine can run, and what it lacks.")
    add = parser.add_argument
    add("--clean", action="store_true", help="remove stale build locks and unused buffers of old runs")
    add("--comm", action="store_true", help="measure the collectives between two processes (about a minute)")
    add("--plot", type=Path, metavar="FILE", help="with --comm: draw the rates by message size, as .png, .svg or .pdf")
    add(
        "--train",
        action="store_true",
        help="try every engine and launcher that is there in short trainings (10 minutes)",
    )
    add("--engines", metavar="NAME,NAME", help="with --train: only these engines")
    add(
        "--out",
        type=Path,
        default=Path("runs/doctor"),
        metavar="DIR",
        help="with --train: where the trainings and doctor.json go (default %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. Returns 1 where something is installed that does not work, or an old run has left something."""
    options = parser().parse_args(argv)
    if unknown := [name for name in (options.engines or "").split(",") if name and name not in TABLE]:
        parser().error(f"--engines: no engine {', '.join(unknown)}; there are {', '.join(TABLE)}")
    torch, horovod = probe("torch", TORCH), probe("horovod", HOROVOD)
    sections = {
        "machine": machine(torch),
        "engines": engines(torch, horovod),
        "launchers": launchers(),
        "operators that DeepSpeed compiles when a configuration asks for them": operators(),
        "left by old runs": leftovers(clean=options.clean),
    }
    broken = False
    said: dict[str, list[str]] = {}
    for title, lines in sections.items():
        print(title)
        for finding in lines:
            broken |= finding.state == "broken"
            said.setdefault(title, []).append(str(finding).strip())
            print(finding, flush=True)
    if options.comm:
        communication(torch, horovod, options.plot)
    if options.train:
        broken = not (torch and torch.facts) or not _train(torch.facts["gpus"], options, said) or broken
    return int(broken)


def _train(gpus: list[tuple[str, int]], options: argparse.Namespace, said: dict[str, list[str]]) -> bool:
    from dsframe.tools import doctor_train

    return doctor_train.run(gpus, options.engines.split(",") if options.engines else [], options.out, said)


def probe(name: str, code: str) -> Library | None:
    """Loads a library in another process. None where it is not installed."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        number = version(name)
    except PackageNotFoundError:
        number = "(version unknown)"
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Library(name, number, None, f"no answer within {PROBE_SECONDS:.0f} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return Library(name, number, None, lines[-1] if lines else f"exit code {done.returncode}")
    return Library(name, number, json.loads(done.stdout.splitlines()[-1]))


def machine(torch: Library | None) -> Iterator[Finding]:
    """Hardware and the system."""
    memory, shared = psutil.virtual_memory(), shutil.disk_usage("/dev/shm")
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    cores = len(os.sched_getaffinity(0))
    yield Finding("note", f"Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    yield Finding(
        "note",
        f"{cores} cores, {nodes} NUMA node{'s' * (nodes > 1)}; memory {_gib(memory.available)} of {_gib(memory.total)} GiB free; "
        f"/dev/shm {_gib(shared.free)} of {_gib(shared.total)} GiB free",
    )
    if shared.total < ENOUGH_SHARED_MEMORY:
        size = f"{shared.total / 2**20:.0f} MiB"
        yield Finding(
            "absent",
            f"large batches from the data loader's workers, and NCCL between GPUs: /dev/shm has only {size}, and more ends in a "
            "bus error; docker run --shm-size=2g",
        )
    for name, size in (torch.facts or {}).get("gpus", []) if torch else []:
        yield Finding("ok", f"GPU {name}, {_gib(size)} GiB")
    yield from topology()
    if torch and torch.facts and not torch.facts["gpus"]:
        why = "this torch is a build for CPUs" if torch.facts["cuda"] is None else "torch finds none"
        has_device = devices.installed() > 0
        yield Finding("broken" if has_device else "absent", f"no GPU: {why}{', but there is one' * has_device}")


def topology() -> Iterator[Finding]:
    """Says what is near to what: cores of each NUMA node, network links, and GPUs as ``nvidia-smi topo -m`` has them."""
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    for node in nodes if len(nodes) > 1 else []:
        with contextlib.suppress(OSError):
            yield Finding("note", f"NUMA {node.name}: cores {(node / 'cpulist').read_text().strip()}")
    links = psutil.net_if_stats()
    fabric = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    told = [f"{name} {one.speed / 1000:g} Gb/s" if one.speed > 0 else name for name, one in links.items() if one.isup]
    yield Finding(
        "note", f"network: {', '.join(sorted(told)) or 'no link is up'}{'; RDMA: ' * bool(fabric)}{', '.join(fabric)}"
    )
    for line in (supervise.output_of(["nvidia-smi", "topo", "-m"], 20) or "").partition("Legend:")[0].splitlines():
        if line.strip():
            yield Finding("note", _PLAIN.sub("", line.expandtabs()).rstrip())


def engines(torch: Library | None, horovod: Library | None) -> Iterator[Finding]:
    """Each engine: ready, or why not and what makes it so."""
    in_clone = (Path(__file__).resolve().parents[2] / "launch" / "setup").exists()
    rebuild = "rm -r .setup && make setup" if in_clone else "compile it as docs/coming_from/horovod.md says"
    if torch is None:
        yield Finding("absent", "torch is not installed: no engine runs; pip install torch")
        return
    yield torch.finding or Finding("ok", f"single, ddp: torch {torch.version} ({_list(torch.facts, 'gloo', 'nccl')})")
    deepspeed = probe("deepspeed", DEEPSPEED)
    if deepspeed is None:
        yield Finding("absent", "deepspeed: not installed; pip install 'dsframe[deepspeed]'")
    else:
        yield deepspeed.finding or Finding("ok", f"deepspeed {deepspeed.version}")
    if horovod is None:
        yield Finding("absent", f"horovod: not installed; {rebuild}")
    elif horovod.facts is None:
        yield Finding("broken", f"horovod {horovod.version} does not load: {horovod.reason}; {rebuild}")
    else:
        yield Finding("ok", f"horovod {horovod.version} ({_list(horovod.facts, 'gloo', 'mpi', 'nccl')})")
        if not horovod.facts["mpi"]:
            packages = "openmpi-bin libopenmpi-dev"
            yield Finding("absent", f"horovod.op adasum: needs MPI; apt-get install {packages}, then {rebuild}")
        if torch.facts and torch.facts["gpus"] and not horovod.facts["nccl"]:
            yield Finding("absent", f"horovod on GPUs: needs NCCL; install CUDA's nvcc, then {rebuild}")
    vision = probe("torchvision", TORCHVISION)
    if vision is None:
        yield Finding("absent", "torchvision's models: not installed; pip install 'dsframe[vision]'")
    else:
        yield vision.finding or Finding("ok", f"torchvision {vision.version}")


def launchers() -> Iterator[Finding]:
    """The commands that start several processes."""
    install = {
        "deepspeed": f"pip install 'dsframe[deepspeed]', then {ACTIVATE}",
        "horovodrun": "comes with horovod",
        "torchrun": "comes with torch",
        "mpirun": "apt-get install openmpi-bin",
        "srun": "comes with Slurm",
        "pdsh": "apt-get install pdsh; only for deepspeed on several hosts",
    }
    for name, remedy in install.items():
        found = shutil.which(name, path=search_path())
        if found is None:
            yield Finding("absent", f"{name}: not found; {remedy}")
        elif name == "deepspeed" and Path(found).resolve().parent != shipped("bin", "launch/bin").resolve():
            yield Finding("ok", f"{name}: {found}; DeepSpeed's own, without -m: {ACTIVATE}")
        else:
            yield Finding("ok", f"{name}: {found}")


def operators() -> Iterator[Finding]:
    """Yields what compiling DeepSpeed's operators needs. The default configuration needs none."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler and (shutil.which("ninja", path=search_path()) or importlib.util.find_spec("ninja")):
        yield Finding("ok", f"CPU optimizers: {compiler} and ninja")
    else:
        lacking = "g++ (apt-get install g++)" if not compiler else "ninja (pip install ninja)"
        yield Finding("absent", f"CPU optimizers (offload without torch_adam): no {lacking}")
    if any((Path(folder) / "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include")):
        yield Finding("ok", "offload to NVMe: libaio")
    else:
        yield Finding("absent", "offload to NVMe: no libaio; apt-get install libaio-dev")
    if nvcc := shutil.which("nvcc"):
        yield Finding("ok", f"GPU operators: {nvcc}")
    else:
        yield Finding("absent", "GPU operators: no nvcc; install the CUDA toolkit")


def leftovers(*, clean: bool) -> Iterator[Finding]:
    """Locks, buffers and swapped state without a living owner; removed where ``clean`` says so."""
    from dsframe.engines.deepspeed.jit import extensions_directory

    plain = Path.home() / ".cache" / "torch_extensions"  # torch's own default, with one folder per Python
    caches = {extensions_directory(), *(folder for folder in plain.glob("*") if folder.is_dir())}
    locks = sorted({lock for cache in caches for lock in stale_locks(cache)})
    buffers = unused_buffers()
    size = 0
    for path in buffers:
        with contextlib.suppress(FileNotFoundError):  # its run has just ended and removed it
            size += path.stat().st_size
    swapped = [folder for place in swap_places() for folder in unused_swap(place)]
    if clean:
        for path in (*locks, *buffers):
            path.unlink(missing_ok=True)
        for folder in swapped:
            shutil.rmtree(folder, ignore_errors=True)
    state: Literal["ok", "broken"] = "ok" if clean else "broken"
    verb = "removed" if clean else "found"
    hint = "" if clean else "; dsframe doctor --clean"
    for lock in locks:
        yield Finding(state, f"{verb} the lock of a killed build, for which every run would wait: {lock}{hint}")
    if buffers:
        what = f"{len(buffers)} buffers of killed runs in /dev/shm"
        yield Finding(state, f"{verb} {what}, {_gib(size)} GiB of memory{hint}")
    for folder in swapped:
        yield Finding(state, f"{verb} offloaded state of a killed run: {folder}{hint}")
    if not locks and not buffers and not swapped:
        yield Finding("ok", "no stale build locks, no buffers in /dev/shm, no offloaded state of killed runs")


def swap_places() -> list[Path]:
    """Returns the folders of offloaded state: the ``nvme_path`` of every file here and in ds_configs/, and the temporary folder."""
    files = [file for folder in (Path(), Path("ds_configs")) for file in folder.glob("*.json")]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    named = {Path(place) for text in texts for place in re.findall(r'"nvme_path"\s*:\s*"([^"]+)"', text)}
    return sorted({*named, Path(tempfile.gettempdir())})


def communication(torch: Library | None, horovod: Library | None, plot: Path | None = None) -> None:
    """Measures every transport that is there and prints a table of each; draws them into ``plot``. Raises DataError where it
    cannot be written."""
    from dsframe.tools.collectives import HEADER, PROCESSES, measure

    transports = []
    if torch and torch.facts:
        gpus = len(torch.facts["gpus"]) >= PROCESSES
        transports += ["gloo"] * torch.facts["gloo"] + ["nccl"] * (torch.facts["nccl"] and gpus)
        if horovod and horovod.facts:
            transports += [f"horovod-{name}" for name in ("gloo", "mpi") if horovod.facts[name]]
            transports += ["horovod-nccl"] * (horovod.facts["nccl"] and gpus)
    rates: dict[str, dict[str, dict[int, float]]] = {}
    for transport in transports:
        result = measure(transport)
        print(f"\n{transport}, {PROCESSES} processes of one thread")
        if isinstance(result, str):
            print(Finding("broken", result))
            continue
        print(HEADER)
        print(*result, sep="\n", flush=True)
        rates[transport] = {one.collective: one.rates for one in result if one.rates}
    if plot is not None:
        _draw(rates, plot)
        print(f"\n{plot}: the rates by message size")


def _draw(rates: Mapping[str, Mapping[str, Mapping[int, float]]], path: Path) -> None:
    from dsframe.tools.report.pictures import Axis, Chart, Line, write

    size, rate = Axis("bytes of the whole tensor", log=True), Axis("GB/s", log=True)
    charts = []
    for transport, found in rates.items():
        lines = [Line(name, list(of.items()), dashed="," in name) for name, of in found.items()]
        charts.append(Chart(f"{transport}: collectives", size, rate, lines))
    write(path, charts)


def _list(facts: dict[str, Any] | None, *names: str) -> str:
    has = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL"}
    return ", ".join(has[name] if (facts or {}).get(name) else f"no {has[name]}" for name in names)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


if __name__ == "__main__":
    sys.exit(main())
