"""``torchrun`` without its output about a failed process, which has reported the error itself."""

from __future__ import annotations

import logging
import signal
import sys


def main() -> int:
    """Runs torchrun with the command line's arguments; returns the exit code of the first failed process."""
    try:
        return _run()
    except KeyboardInterrupt:  # while torch is imported; later it is a SignalException
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
