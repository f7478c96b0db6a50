"""Disks that fail, are full, or lie as network file systems do."""

import contextlib
import errno
import subprocess

from tests.attack.arena import disk, goes_on, held, needs_root, told, train

PLACES = ("/checkpoints/", "/run/", ".safetensors", "manifest.json", "latest", "metrics.jsonl", "rng.json")


def fails(folder, chance):
    """Calls on the run's files fail, once or for ever; the disk is well again afterwards."""
    number = chance.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
    return _faulty(folder, chance, ["write", "fsync", "open", "rename", "mkdir"], number)


def stale(folder, chance):
    """As on NFS after a server's restart: handles are stale."""
    return _faulty(folder, chance, ["write", "fsync", "open"], errno.ESTALE)


def _faulty(folder, chance, operations, number):
    operation, place = chance.choice(operations), chance.choice(PLACES)
    times = chance.choice([1, 2, 10_000])
    ranks = chance.choice([1, 1, 2])
    order = f"{operation}:{number}:{place}:{chance.randrange(12)}:{times}"
    finished = train(folder, ranks=ranks, env=disk(order))
    tried = f"{operation} of {place} {errno.errorcode[number]}, {times} x, {ranks} rank(s)"
    if finished.returncode == 0:
        held("Traceback" not in finished.output, tried, finished)
        if times < 10_000 or not place.startswith("metrics"):
            goes_on(folder, ranks)
        return f"{tried}: trained to its end"
    told(finished, 1, 2, 7, 8)
    goes_on(folder, ranks)
    return f"{tried}: ended with {finished.returncode}"


def renames_late(folder, chance):
    """A rename that returns before it has taken place."""
    place = chance.choice(["/step-", "/latest", "manifest.json", "metrics.jsonl", "summary.json"])
    order = f"rename:0:{place}:{chance.randrange(5)}:{chance.choice([1, 10_000])}"
    finished = train(folder, env=disk(order))
    if finished.returncode:
        told(finished, 8)
    goes_on(folder)
    return f"renames to {place} take place later: exit code {finished.returncode}"


@contextlib.contextmanager
def mounted(folder, options):
    """A file system in memory, at ``folder/run``."""
    needs_root()
    target = folder / "run"
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)], check=True, capture_output=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=False, capture_output=True)


def no_inodes(folder, chance):
    """A file system without a free inode; then there are some again."""
    inodes = chance.randrange(8, 40)
    with mounted(folder, f"size=64m,nr_inodes={inodes}") as target:
        finished = train(folder)
        if finished.returncode:
            told(finished, 1, 2, 8)
        subprocess.run(["mount", "-o", "remount,size=64m,nr_inodes=10000", str(target)], check=True)
        goes_on(folder)
    return f"{inodes} inodes: exit code {finished.returncode}"


def full(folder, chance):
    """A disk that fills up during training, by another's file, and is emptied again."""
    with mounted(folder, "size=400k") as target:

        def fill(running):
            running.wait_for(lambda: "step-00000004" in running.output, timeout_seconds=60, what="a save")
            with contextlib.suppress(OSError), (target / "another's").open("wb", buffering=0) as file:
                for _ in range(1000):
                    file.write(bytes(chance.choice([512, 4096])))

        finished = train(folder, env={"STEP_SECONDS": "0.1"}, during=fill)
        if finished.returncode:
            told(finished, 8)
        (target / "another's").unlink()
        goes_on(folder)
    return f"a full disk: exit code {finished.returncode}"


ATTACKS = {
    "failing disk": fails,
    "stale handles": stale,
    "renames that come late": renames_late,
    "no inodes": no_inodes,
    "full disk": full,
}
