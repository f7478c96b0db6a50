"""Attacks on trainings with real processes; ``python -m tests.attack`` runs them, each file has those of one idea."""

from tests.attack import clocks, disks, files, jobs, network

ATTACKS = {**disks.ATTACKS, **clocks.ATTACKS, **jobs.ATTACKS, **network.ATTACKS, **files.ATTACKS}
"""By name."""
