"""The pages on tasks and optimizers: their programs run, their files are right."""

from tests.processes import REPOSITORY
from tests.unit.test_site import texts

PAGES = [REPOSITORY / "docs" / "tasks.md", REPOSITORY / "docs" / "how_to" / "optimizers.md"]


def test_their_programs_run(here):
    names = {"__name__": "tasks"}
    for page in PAGES:
        for text in texts(page, "python"):
            exec(compile(text, page.name, "exec"), names)
    assert names["summary"].steps == 20
    assert len(names["Balanced"]().order(0, 64)) == 64
    file = names["file"] | {"dsframe": {"engine": "single", "steps": 1, "run_dir": "groups"}}
    both = type("Both", (names["NoDecay"], names["Autoencoder"]), {})
    assert names["dsframe"].fit(both(), file).steps == 1
