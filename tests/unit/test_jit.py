"""Ops that DeepSpeed compiles: none on the default path, and no waiting for the locks of the dead."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.engines.deepspeed import jit
from dsframe.errors import EngineError
from dsframe.host.leftovers import host
from dsframe.model import optimizers

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
OWN = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": False}}
CPU = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
NVME = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}


@pytest.mark.parametrize(
    ("optimizer", "zero", "ops"),
    [
        (ADAMW, {"stage": 3}, ()),
        (ADAMW, CPU, ()),
        (OWN, {"stage": 1}, ("fused_adam",)),
        (OWN, CPU, ("cpu_adam",)),
        (ADAMW, NVME, ("async_io",)),
        ({"type": "Adagrad", "params": {}}, CPU, ("cpu_adagrad",)),
    ],
)
def test_which_ops_a_file_asks_for(optimizer, zero, ops):
    config = load({"train_batch_size": 8, "optimizer": optimizer, "zero_optimization": zero})
    assert jit.needed_ops(config, optimizers.read(config)) == ops


def test_a_run_says_what_it_removed_and_compiles_nothing_that_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "async_io.so").touch()
    lock = tmp_path / "async_io" / "lock"
    lock.touch()
    jit.prepare(("async_io",), World(1, 2, 1, 2))
    assert lock.exists(), "one rank of a host does it"
    jit.prepare(("async_io",), World(0, 2, 0, 2))
    assert not lock.exists()
    assert capsys.readouterr().err == f"dsframe: removed {lock}, left by a process that was killed\n"
    (tmp_path / "async_io" / "build.ninja").write_text("cflags = -std=c++20 -O3 -g -Wno-reorder\n")
    jit.prepare(("async_io",), World(0, 2, 0, 2))
    assert "compiling async_io" in capsys.readouterr().err, "ninja would compile it with other options"


def test_every_process_asks_for_the_same_options(tmp_path, monkeypatch):
    """Else one that finds the op compiles it again."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "async_io.so").touch()
    jit.prepare(("async_io",), World())
    assert "-g" not in AsyncIOBuilder().cxx_args()


def test_what_cannot_be_compiled_is_said_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_has_libaio", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(EngineError, match="apt-get install libaio-dev"):
        jit.prepare(("async_io",), World())
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(EngineError, match=r"asks for cpu_adam, .* no C\+\+ compiler"):
        jit.prepare(("cpu_adam",), World())


def test_every_environment_has_its_own_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine = jit.extensions_directory()
    monkeypatch.setattr("sys.prefix", "/another/environment")
    assert jit.extensions_directory() != mine
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/given")
    assert jit.extensions_directory() == Path("/given")


def on_nfs(folder, monkeypatch):
    mounts = [SimpleNamespace(mountpoint=str(place), fstype=kind) for place, kind in (("/", "ext4"), (folder, "nfs4"))]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)


def test_hosts_that_share_a_home_compile_each_for_itself(tmp_path, monkeypatch):
    """For its own processor, and with locks whose owner can be told to be alive."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    local = jit.extensions_directory()
    on_nfs(tmp_path, monkeypatch)
    own = jit.extensions_directory()
    assert own == local / host()
    for cache in (own, local / "another-host"):
        (cache / "cpu_adam").mkdir(parents=True)
        (cache / "cpu_adam" / "lock").touch()
    assert jit.remove_stale_locks(own) == [own / "cpu_adam" / "lock"]
    assert jit.remove_stale_locks(local / "another-host") == [], "its owner may be alive there"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(own))
    assert jit.extensions_directory() == own, "as it is set for DeepSpeed, and may be asked for again"
