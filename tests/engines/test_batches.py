"""Batches that are no tensors: the loop by hand on every engine, and nothing said of them that is not so."""

import pytest
import torch
from torch import nn

from dsframe.host import generators
from dsframe.model.forward import call
from dsframe.tools.compare import losses
from tests import kept
from tests.engines import batch_tasks
from tests.engines.test_foreign import SETUPS

TASKS = ("Packed", "Nested", "OfGraphs", "OfNodes")
STEPS = 4


def by_hand(name):
    task = getattr(batch_tasks, name)()
    generators.seed(0)
    model, data, found = task.model().train(), task.train_data(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(STEPS):
        batch = task.collate([data[step * 8 + row] for row in range(8)])
        inputs, targets = ({"rows": batch["rows"]}, batch["labels"]) if isinstance(batch, dict) else batch
        loss = task.loss(call(model, inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train(name, setup, folder):
    processes, changes = SETUPS[setup]
    document = {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
        **changes,
        "dsframe": {
            "task": {"name": f"tests.engines.batch_tasks:{name}"},
            "steps": STEPS,
            "order": "sequential",
            "log_every_steps": 1,
            "run_dir": "run",
            **changes.get("dsframe", {}),
        },
    }
    return kept.train(folder, document, processes).check()


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    "setup", ["zero3", *(pytest.param(setup, marks=pytest.mark.long) for setup in ("single", "ddp", "horovod", "fsdp"))]
)
def test_batches_that_are_no_tensors(name, setup, tmp_path):
    finished = train(name, setup, tmp_path)
    assert list(losses(tmp_path / "run").values()) == pytest.approx(by_hand(name), rel=1e-6)
    for claim in ("draws random numbers", "give another sample", "was not examined", "depends on"):
        assert claim not in finished.stderr


def test_a_mean_over_nodes_is_said(tmp_path):
    assert "loss is neither a mean nor a sum over rows" in train("OfNodesUnsaid", "ddp", tmp_path).stderr
