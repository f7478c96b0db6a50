"""``torchrun`` without its words about a process that failed: that process has said what is wrong."""

from __future__ import annotations

import logging
import signal
import sys


def main() -> int:
    """Runs torchrun on the command line's words; the exit code is the first process's that failed."""
    try:
        return _run()
    except KeyboardInterrupt:  # while torch is imported; later, it is one of the signals below
        return 128 + signal.SIGINT


def _run() -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
