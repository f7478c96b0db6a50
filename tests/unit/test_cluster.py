"""Whether a machine can play two hosts is asked while tests are collected: whatever goes wrong there is a reason to skip."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cluster import network


@pytest.mark.parametrize(
    "error", [subprocess.TimeoutExpired("ip", 60), OSError("read-only file system"), RuntimeError("ip: no veth")]
)
def test_a_probe_that_fails_is_a_reason(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.os, "getuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda command, path: f"/bin/{command}")
    asked: list[str] = []

    def call(*command: str) -> str:
        asked.append(command[0])
        if command[0] == "ssh-keygen":
            for ending in ("", ".pub"):
                Path(command[-1] + ending).touch()
            return ""
        raise error

    monkeypatch.setattr(network, "_call", call)
    network.missing.cache_clear()
    try:
        assert network.missing() == network.missing() == f"there can be no two hosts on this machine: {error}"
        assert asked == ["ssh-keygen", "ssh-keygen", "ip"], "asked once"
    finally:
        network.missing.cache_clear()
