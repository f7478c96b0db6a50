"""dsframe as its users start it: one contestant of ``benchmarks.compare``.

LAUNCHER benchmarks/ours.py NAME WORKLOAD SOCKET MICRO --config FILE ...     # what follows is dsframe.train's own
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script

if __name__ == "__main__":
    from dsframe.cluster.world import here
    from dsframe.config import load
    from dsframe.run import settle_threads

    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    name, workload, path, micro = words[:4]
    # Before torch is imported, which the task does: dsframe.train itself reads it from the file later.
    settle_threads(here(), load(words[5]).settings.threads_per_rank)

    import dsframe
    from benchmarks import workloads
    from benchmarks.gate import CHECKED_STEPS, Gate

    gate = Gate(path, name, int(micro))
    sys.exit(dsframe.main(workloads.task(workload, gate, checked=CHECKED_STEPS * int(micro)), words[4:]))
