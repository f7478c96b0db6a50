"""What we say DeepSpeed raises, it raises: files with one real engine each, in one process.
What we let pass: test_check_starts.py.

The parser alone accepts most of these: they fail in the engine, after every process of a run has started.
"""

import json
import os
import socket
import sys

import pytest

from dsframe.config.load import examine
from tests.files import zero
from tests.processes import REPOSITORY, run_program

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def adam(**params):
    return {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, **params}}}


REFUSED = {
    "gradient norm off with clipping": zero(1, compute_grad_norm=False),
    "prescaling with reduce-scatter": {"prescale_gradients": True, **zero(2)},
    "predivide factor with reduce-scatter": {"gradient_predivide_factor": 2.0, **zero(3)},
    "SGD untested with ZeRO": {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **zero(1)},
    "AMSGrad in DeepSpeed's Adam": adam(amsgrad=True),
    "an argument of torch's Adam": adam(fused=True),
    "an argument of DeepSpeed's Adam": adam(bias_correction=True, torch_adam=True),
    "max_grad_norm": adam(max_grad_norm=1.0),
    "an optimizer with a closure": {"optimizer": {"type": "LBFGS", "params": {"lr": 1e-3}}},
    "Nesterov without momentum": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}},
    "Lamb with a fixed loss scale": {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}, "fp16": {"loss_scale": 4}},
    "no warm-up steps": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
    "a parameter type that contradicts": {"data_types": {"param_dtype": "bf16"}},
    "gradients in bf16 without ZeRO": {"data_types": {"grad_accum_dtype": "bf16"}},
    "the old stage 1": zero(1, legacy_stage1=True),
    "unmanaged accumulation with overlap": {"managed_gradient_accumulation": False, **zero(1, overlap_comm=True)},
}


def content(keys):
    return {"train_batch_size": 2, "optimizer": ADAM, **keys}


@pytest.fixture(scope="module")
def outcomes():
    """Name -> what DeepSpeed raised, by building an engine and taking two steps; None where both went well."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    done = run_program(
        [sys.executable, "-m", "tests.unit.test_check_claims"],
        input=json.dumps({name: content(keys) for name, keys in REFUSED.items()}),
        cwd=REPOSITORY,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", REFUSED)
def test_deepspeed_raises_what_we_refuse(name, outcomes):
    problems = examine(json.dumps(content(REFUSED[name])), "x.json").problems
    assert [problem for problem in problems if problem.severity == "error"]
    assert outcomes[name] is not None


def child():
    """Build an engine for each file from standard input, take two steps, and print what was raised."""
    import contextlib
    import io
    import logging

    import deepspeed
    import deepspeed.ops
    import torch

    logging.disable(logging.CRITICAL)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # it compiles for a minute and leaks 66 MiB of /dev/shm
    )
    found = {}
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed("gloo", verbose=False)
        for name, config in json.load(sys.stdin).items():
            model = torch.nn.Linear(4, 2)
            try:
                engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
                for _ in range(2):
                    engine.backward(engine(torch.ones(2, 4)).sum())
                    engine.step()
                found[name] = None
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        torch.distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    child()
