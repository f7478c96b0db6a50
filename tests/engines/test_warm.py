"""Jobs of tests/warm.py end as jobs of a launcher do."""

import pytest

from tests.processes import HAS_GPUS, WARM, run_ranks, warm

pytestmark = pytest.mark.skipif(HAS_GPUS, reason="torch that has looked for GPUs cannot be forked: no job is warm")

SCRIPT = """
import os, sys, time
said = f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} in {os.getcwd()} {sys.argv[1:]}\\n"
os.write(1, said.encode())  # at once: print writes each word by itself, and two ranks' words mix
if os.environ.get("RANK") == "1":
    raise ValueError("a mistake")
time.sleep(1000)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_rank_that_fails_ends_the_others(script, tmp_path):
    finished = run_ranks(warm(2, [script, "--more"]), cwd=tmp_path, timeout_seconds=60)
    assert finished.returncode == 1
    assert sorted(finished.stdout.splitlines()) == [f"rank {rank} of 2 in {tmp_path} ['--more']" for rank in (0, 1)]
    assert "ValueError: a mistake" in finished.stderr


def test_what_hangs_is_ended_and_seen(script, tmp_path):
    with pytest.raises(
        AssertionError,
        match=r"still running after 3 s[\s\S]*rank None of None[\s\S]*rank 0: [\s\S]*<module> \(.*script\.py:7",
    ):
        run_ranks(warm(1, [script]), cwd=tmp_path, timeout_seconds=3)


FORKS = """
import ctypes, os, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"another name")
    os.fork()
    time.sleep(1000)
"""


def test_what_ranks_leave_behind_is_seen_and_ended(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FORKS)
    with pytest.raises(AssertionError, match=r"left over 1 s after the end: \d+ \(.*; \d+ \("):
        run_ranks(warm(1, [str(script)]), cwd=tmp_path, timeout_seconds=20, settle_seconds=1)


def test_imports_warn_of_nothing(script, tmp_path):
    """What libraries say when they are imported is the server's to hear, and no job's."""
    run_ranks(warm(2, [script]), cwd=tmp_path, timeout_seconds=60)
    assert "arning" not in (WARM / "said-plain").read_text()
