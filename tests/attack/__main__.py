"""Attacks trainings, one after another: a table of what was tried, survived and lost.

    make attack                                        # half an hour
    python -m tests.attack --minutes 5 --seed 7        # as many as there is time for
    python -m tests.attack --only "failing disk" --first 12 --tries 1   # one again, by the number that its line has

"Lost" is a training whose saved state is gone or differs, a process that hangs or stays, a file outside its folder, a traceback
instead of one line. Each attack's chance is its own: its seed, its name and its number.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.attack import ATTACKS
from tests.attack.arena import UntriedError


def main(argv=None):
    """Prints a line for each try, then the table; returns how many were lost."""
    parser = argparse.ArgumentParser(prog="tests.attack", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="begin no further round after that (default: %(default)s)")
    add("--tries", type=int, default=1000, help="of each attack, at most (default: as many as there is time for)")
    add("--first", type=int, default=0, help="number of the first try, to repeat one (default: %(default)s)")
    add("--seed", type=int, default=20261123)
    add("--only", choices=sorted(ATTACKS), action="append", help="this attack; may be given several times")
    options = parser.parse_args(argv)
    names = options.only or list(ATTACKS)
    print(f"seed {options.seed}", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started this in the background
    counts = {name: [0, 0, 0] for name in names}
    untried = {}
    end = time.monotonic() + 60 * options.minutes
    for number in range(options.first, options.first + options.tries):
        for name in names:
            if name in untried or time.monotonic() > end:
                continue
            chance = random.Random(f"{options.seed}/{name}/{number}")
            with tempfile.TemporaryDirectory(prefix="dsframe-attack-") as folder:
                try:
                    said = ATTACKS[name](Path(folder), chance)
                except UntriedError as reason:
                    untried[name] = str(reason)
                    continue
                except Exception as error:
                    counts[name][2] += 1
                    traceback.print_exc()  # with all that was printed
                    said = f"LOST: {str(error).partition(chr(10))[0]}"
                else:
                    counts[name][1] += 1
                counts[name][0] += 1
            print(f"{number:>4} {name}: {said}", flush=True)
    print("\n| attack | tried | survived | lost |\n|---|---|---|---|")
    for name, (tried, survived, lost) in counts.items():
        print(f"| {name} | {untried.get(name) or tried} | {survived} | {lost} |")
    total = [sum(one[column] for one in counts.values()) for column in range(3)]
    print(f"| all | {total[0]} | {total[1]} | {total[2]} |", flush=True)
    return total[2]


if __name__ == "__main__":
    sys.exit(min(main(), 100))
