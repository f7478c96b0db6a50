"""Checks that all ranks are about to do the same, before any library starts.

Ranks with different engines would each wait for another library's collective, forever or until one aborts. So they
compare in a torch store, which needs no engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from dsframe.cluster.exchange import Ranks, all_gather_json, same
from dsframe.cluster.process_group import meet, rendezvous_address
from dsframe.cluster.world import World
from dsframe.errors import WorldError

_MESSAGE = "the processes of this run differ: {}; start all with the same files, options and versions"
_MOST = 5
"""Number of differences that are listed."""


def assert_ranks_agree(world: World, facts: Mapping[str, str]) -> bool:
    """**Collective.** Raises WorldError on every rank, naming the ranks that differ from rank 0, and the differences.

    Returns False without a rendezvous address (mpirun on several nodes): use :func:`assert_engines_agree`.
    """
    if world.size == 1:
        return True
    try:
        address, port = rendezvous_address(world)
    except WorldError:
        return False
    store = meet(world, address, port)
    store.set(f"facts/{world.rank}", json.dumps(dict(facts)))
    if world.is_main:
        of_ranks = [json.loads(store.get(f"facts/{rank}")) for rank in range(world.size)]
        store.set("differences", "; ".join(differences(of_ranks)))
    text = store.get("differences").decode()
    if text:
        time.sleep(2.0 * world.is_main)  # the others must read it from this process first
        raise WorldError(_MESSAGE.format(text))
    return True


def assert_engines_agree(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """**Collective.** The same check, over an existing engine."""
    if not same(ranks, json.dumps(dict(facts), sort_keys=True)):
        of_ranks = all_gather_json(ranks, dict(facts))
        raise WorldError(_MESSAGE.format("; ".join(differences(of_ranks))))


def differences(of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns a text for each fact that differs from rank 0: at most five, and the number of further ones."""
    first = of_ranks[0]
    lines = [
        f"{name} is {facts.get(name, 'not there')} on rank {rank} and {first.get(name, 'not there')} on rank 0"
        for rank, facts in enumerate(of_ranks)
        for name in {**first, **facts}
        if facts.get(name) != first.get(name)
    ]
    more = [f"{len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return lines[:_MOST] + more
