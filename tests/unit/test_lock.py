"""constraints.txt: no pin shuts a declared Python out, and what is installed is what it pins."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.processes import REPOSITORY

LOCK = REPOSITORY / "constraints.txt"
PYTHONS = ("3.10.0", "3.10.13", "3.11.0", "3.11.2", "3.11.7", "3.12.0", "3.12.1", "3.13.0")
"""Declared by pyproject.toml; the first patch releases, since a pin may ask for a later one (3.11.5)."""


@dataclass(frozen=True)
class Pin:
    requirement: Requirement
    requires_python: SpecifierSet

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    def applies_to(self, python: str) -> bool:
        environment = default_environment() | {
            "python_full_version": python,
            "python_version": ".".join(python.split(".")[:2]),
        }
        return self.requirement.marker is None or self.requirement.marker.evaluate(dict(environment))


def parse(text: str) -> list[Pin]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pins = []
    for line in lines:
        requirement, _, python = line.partition("  # ")
        pins.append(Pin(Requirement(requirement), SpecifierSet("" if python == "*" else python)))
    return pins


def shut_out(pins: list[Pin], python: str) -> list[str]:
    """Returns the pins that apply to this Python and that its pip would refuse."""
    return [str(pin.requirement) for pin in pins if pin.applies_to(python) and python not in pin.requires_python]


@pytest.fixture(scope="module")
def pins() -> list[Pin]:
    return parse(LOCK.read_text())


@pytest.mark.parametrize("python", PYTHONS)
def test_no_pin_shuts_a_declared_python_out(pins: list[Pin], python: str) -> None:
    assert shut_out(pins, python) == []
    names = [pin.name for pin in pins if pin.applies_to(python)]
    assert len(names) == len(set(names)), "two versions of one package"


def test_the_lock_covers_what_is_declared(pins: list[Pin]) -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    declared = set(re.findall(r"Python :: (3\.\d+)", project))
    assert declared == {".".join(python.split(".")[:2]) for python in PYTHONS}
    assert "(3, 10) <= sys.version_info[:2] <= (3, 13)" in (REPOSITORY / "launch" / "setup").read_text()
