"""What dsframe needs to know of each engine before one is imported: the entry points of this package name these.

Imports nothing heavy: ``dsframe check`` reads them.
"""

from __future__ import annotations

from dsframe.engines.table import CUTS, MODELS_OWN, OVERFLOWS, PLACEMENT, REPLICA, Entry

_LIKE_DDP = REPLICA | {"gradient_sum", "skip_nonfinite"}

ALL_REDUCE = Entry(
    "reference_engines.allreduce:AllReduceEngine",
    supports=_LIKE_DDP,
    replicates=PLACEMENT | CUTS,
    ignores=MODELS_OWN,
)
RING = Entry(
    "reference_engines.ring:RingEngine",
    supports=_LIKE_DDP,
    replicates=PLACEMENT | CUTS,
    ignores=MODELS_OWN,
)
PARAMETER_AVERAGING = Entry(
    "reference_engines.averaging:ParameterAveragingEngine",
    supports=REPLICA - OVERFLOWS,
    replicates=PLACEMENT | CUTS,
    ignores=MODELS_OWN,
    otherwise={
        **dict.fromkeys(OVERFLOWS, "would let ranks skip different updates"),
        "gradient_sum": "has no meaning for weights",
    },
    options="reference_engines.options:ParameterAveraging",
    caution="parameter averaging is not the training that this file means on other engines, unless the optimizer is plain "
    "SGD, no clipping bites and every step is averaged: each rank's optimizer sees its own samples alone",
)
PARAMETER_SERVER = Entry(
    "reference_engines.server:ParameterServerEngine",
    supports=REPLICA - OVERFLOWS | {"gradient_sum"},
    replicates=PLACEMENT | CUTS,
    ignores=MODELS_OWN,
    otherwise=dict.fromkeys(OVERFLOWS, "would need the server to tell everybody about overflows"),
    keeps="all optimizer state on rank 0 and the whole model on every rank",
)
ASYNC_PARAMETER_SERVER = Entry(
    "reference_engines.async_server:AsyncParameterServerEngine",
    supports=REPLICA - OVERFLOWS | {"gradient_sum"},
    replicates=PLACEMENT | CUTS,
    ignores=MODELS_OWN,
    otherwise={
        **dict.fromkeys(OVERFLOWS, "would need all workers to leave out the same update"),
        "skip_nonfinite": "would need all workers to leave out the same update",
    },
    keeps="all optimizer state on rank 0 and the whole model on every rank",
    caution="an asynchronous parameter server is not the training that this file means on other engines: workers push gradients "
    "of weights that others have changed since, each is clipped by its own norm and is an update of its own, and no two runs are "
    "alike, nor is one that was resumed",
)
MODEL_PARALLEL = Entry(
    "reference_engines.modelparallel:ModelParallelEngine",
    supports=_LIKE_DDP | {"pipeline"},
    replicates=PLACEMENT,
    ignores=MODELS_OWN,
    keeps="some layers, with all their state, on each rank",
    size="stages",
    rules="reference_engines.rules:model_parallel",
)
DATA_PARALLEL = Entry(
    "reference_engines.dataparallel:DataParallelEngine",
    supports=_LIKE_DDP,
    replicates=PLACEMENT | CUTS,
    ignores=MODELS_OWN,
    keeps="everything in one process",
    size="one",
    rules="reference_engines.rules:data_parallel",
)
