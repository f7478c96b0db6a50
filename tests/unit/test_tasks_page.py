"""The pages on tasks and optimizers: their programs run, their files are right."""

import re

import torch

from tests.processes import REPOSITORY

PAGES = [REPOSITORY / "docs" / "tasks.md", REPOSITORY / "docs" / "how_to" / "optimizers.md"]


def blocks(language):
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_their_programs_run(here):
    names = {"__name__": "tasks"}
    for block in blocks("python"):
        exec(compile(block, "docs/tasks.md", "exec"), names)
    assert names["summary"].steps == 20
    assert len(names["Balanced"]().order(0, 64)) == 64
    file = names["file"] | {"dsframe": {"engine": "single", "steps": 1, "run_dir": "groups"}}
    both = type("Both", (names["NoDecay"], names["Autoencoder"]), {})
    assert names["dsframe"].fit(both(), file).steps == 1
    sums = {"loss": names["dsframe"].Sum(torch.tensor(8.0), 2)}
    assert names["Measured"]().finalize(sums) == {"loss": 4.0, "rmse": 2.0}
