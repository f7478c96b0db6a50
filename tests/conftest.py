"""What every test of this repository shares."""

import os
import signal
from pathlib import Path

import pytest

# One thread: two processes of a test would otherwise fight for two cores, and sums depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whoever starts the tests in the background (nohup, a script's &) leaves them signals that are ignored, and so they would be
# in every process that a test starts: a launcher that a test interrupts would not even notice.
STOPPING = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
for _number in STOPPING:
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


LONGEST = (
    "test_nvme",
    "test_launchers",
    "test_two_hosts",
    "test_slurm",
    "test_mpi",
    "test_failures",
    "test_foreign",
    "test_standin",
    "test_equivalence",
    "test_sharded_memory",
    "test_attack",
    "test_accuracy",
    "test_commands",
    "test_tensor",
    "test_groups",
    "test_resume",
    "test_semantics",
    "test_ds_configs",
    "test_forms",
)
"""Files that take minutes, long ones first. NVMe's is the first of them: it compiles an op that test_equivalence.py needs too,
which comes later, in any process, and so finds the op."""


def pytest_collection_modifyitems(items):
    """Units first, which tell most of what there is to tell in the first minutes. Then the longest files, and the rest: none of the
    long ones is left for the end, where the other processes would have nothing to do."""
    rank = {name: place for place, name in enumerate(LONGEST, start=1)}

    def turn(item):
        return rank.get(item.path.stem, 0 if item.path.parent.name == "unit" else len(rank) + 1)

    items.sort(key=turn)


@pytest.fixture(autouse=True)
def process_as_before():
    """What a later test starts would inherit signals that are ignored, or blocked as ``supervise.run`` leaves them, and a
    rank."""
    ranks = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    after = {number: signal.getsignal(number) for number in STOPPING}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert after == handlers, "the test leaves other handlers of signals than it found"
    assert ranks == {name: os.environ.get(name) for name in ranks}, "the test leaves a rank in the environment"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The test's own folder, in which it runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Where pytest-xdist shares the tests among processes, a file's stay together, with what they share; and so do those that make
    hosts of their own, whose addresses there are once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = Path(nodeid.partition("::")[0])
            return "cluster" if file.parent.name == "cluster" or file.stem == "test_launchers" else str(file)

    return ByFile(config, log)
