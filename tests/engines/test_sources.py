"""Joined data sets in a training: the samples of each step on two ranks, a worker killed, and on with one."""

from dsframe.data import Loader
from tests.engines.sources_task import Sources
from tests.files import ds_config, write_json
from tests.processes import run_ranks, warm

FILE = ds_config(
    12,
    "SGD",
    0.01,
    engine="ddp",
    steps=9,
    seed=5,
    log_every_steps=1,
    run_dir="run",
    checkpoints={"every_steps": 3},
    task={"name": "tests.engines.sources_task:Sources", "options": {"workers": 2}},
)


def test_joined_data_sets_go_on_with_the_same_samples_on_another_number_of_ranks(tmp_path, monkeypatch):
    write_json(tmp_path / "my.json", FILE)
    train = ["-m", "dsframe.train", "--config", "my.json"]
    killed = run_ranks(warm(2, train), cwd=tmp_path, timeout_seconds=100, env={"FAULT": "worker"})
    assert killed.returncode == 6, str(killed)
    assert (
        "a process that reads data has ended, perhaps because memory was short: DataLoader worker (pid" in killed.stderr
    )
    before = [(tmp_path / f"seen-{rank}").read_text().split() for rank in range(2)]
    for rank in range(2):
        (tmp_path / f"seen-{rank}").unlink()
    run_ranks(warm(1, [*train, "--resume", "auto"]), cwd=tmp_path, timeout_seconds=100).check()
    after = (tmp_path / "seen-0").read_text().split()

    monkeypatch.chdir(tmp_path)
    loader = Loader(Sources().train_data(), seed=5, micro_batch_size=12)
    expected = [",".join(map(str, targets.tolist())) for _, targets in loader.stream(0, 9)]
    assert [",".join(step) for step in zip(*(rank[:5] for rank in before), strict=True)] == expected[:5]
    assert after == expected[9 - len(after) :]
    assert 6 <= len(after) <= 9 - 3
