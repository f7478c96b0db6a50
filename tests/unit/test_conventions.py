"""Files that other programs read: their form, and that what they name is there."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import REPOSITORY, run_program

WORKFLOWS = [
    *sorted((REPOSITORY / ".github").rglob("*.yml")),
    REPOSITORY / "action.yml",
    REPOSITORY / ".pre-commit-hooks.yaml",
]
CONTAINERS = REPOSITORY / "launch" / "containers"


@pytest.mark.parametrize("path", [*WORKFLOWS, REPOSITORY / "CITATION.cff"], ids=lambda path: path.name)
def test_yaml_can_be_read(path):
    assert yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["Dockerfile", "dsframe.def"])
def test_a_container_finds_the_launchers(name):
    (program,) = re.findall(r"python -c '([^']+)'", (CONTAINERS / name).read_text())
    done = run_program([sys.executable, "-c", program])
    assert Path(done.stdout.strip()) == REPOSITORY / "launch" / "bin"
