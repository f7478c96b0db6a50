"""constraints.txt: no pin shuts a declared Python out, and what is installed is what it pins."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.metadata import distributions

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.processes import REPOSITORY

LOCK = REPOSITORY / "constraints.txt"
PYTHONS = ("3.10.0", "3.10.13", "3.11.0", "3.11.2", "3.11.7", "3.12.0", "3.12.1", "3.13.0")
"""Declared by pyproject.toml; the first patch releases, since a pin may ask for a later one (3.11.5)."""
OUR_DISTRIBUTIONS = {"dsframe", "dsframe-check", "dsframe-reference-engines"}


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


def test_every_line_is_one_version_and_says_which_python_it_asks_for(pins: list[Pin]) -> None:
    assert len(pins) > 100
    assert all(re.fullmatch(r"==[^,*]+", str(pin.requirement.specifier)) for pin in pins)
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert all("  # " in line for line in lines), "make lock writes Requires-Python at the end of each line"


@pytest.mark.parametrize("python", PYTHONS)
def test_no_pin_shuts_a_declared_python_out(pins: list[Pin], python: str) -> None:
    assert shut_out(pins, python) == []
    names = [pin.name for pin in pins if pin.applies_to(python)]
    assert len(names) == len(set(names)), "two versions of one package"


def test_a_pin_that_shuts_a_python_out_is_seen() -> None:
    """pymdown-extensions 13.1 was pinned for every Python and needs 3.11.5: Debian 12 has 3.11.2."""
    pins = parse("pymdown-extensions==13.1  # >=3.11.5\nnumpy==2.4.0 ; python_full_version >= '3.11'  # >=3.11\n")
    assert shut_out(pins, "3.11.2") == ["pymdown-extensions==13.1"]
    assert shut_out(pins, "3.11.7") == []


def test_the_lock_covers_what_is_declared(pins: list[Pin]) -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    declared = set(re.findall(r"Python :: (3\.\d+)", project))
    assert declared == {".".join(python.split(".")[:2]) for python in PYTHONS}
    assert "(3, 10) <= sys.version_info[:2] <= (3, 13)" in (REPOSITORY / "launch" / "setup").read_text()


def test_what_is_installed_is_what_the_lock_says(pins: list[Pin]) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    pinned = {pin.name: pin for pin in pins if pin.applies_to(python)}
    differing = []
    for distribution in distributions():
        name = canonicalize_name(distribution.name)
        if name in OUR_DISTRIBUTIONS | {"pip", "uv"}:
            continue
        pin = pinned.get(name)
        version = distribution.version.partition("+")[0]  # torch's build is chosen by launch/setup
        asks_for = (distribution.metadata.get("Requires-Python") or "").replace(" ", "")
        if pin is None or version not in pin.requirement.specifier or SpecifierSet(asks_for) != pin.requires_python:
            differing.append(f"{name} {version} asks for Python {asks_for!r}; constraints.txt: {pin}")
    assert differing == []


def test_no_address_and_no_path_in_it() -> None:
    assert not re.search(r"://|/(home|opt|root|tmp|work)/", LOCK.read_text())
