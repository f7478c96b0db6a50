"""What every test of this repository shares."""

from __future__ import annotations

import os

# One thread: two processes of a test would otherwise fight for two cores, and sums depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
