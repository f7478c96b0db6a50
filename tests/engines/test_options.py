"""Settings of DDP and FSDP do what they say: hooks, buckets, units, shards."""

from tests.processes import run_ranks, warm


def test_options_of_ddp_and_fsdp():
    finished = run_ranks(warm(2, ["-m", "tests.engines.options"]), timeout_seconds=200).check()
    assert "all options do what they say" in finished.stdout
