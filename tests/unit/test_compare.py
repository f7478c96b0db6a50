"""``dsframe compare``: what is made of finished runs."""

import pytest

from dsframe.cli import main
from dsframe.tools.compare import verdicts
from tests.files import write_json
from tests.unit.test_report_page import write_run


def test_runs_are_compared(here, capsys):
    for number, name in enumerate(("a", "b"), 1):
        write_run(
            here / name, [2.0, 1.0 + number / 100], description="engine", steps=2, rate=32, unit="samples",
            units_per_step=32, seconds=1.0, first_step_seconds=0.5, metrics={"accuracy": 0.5}, peak_memory_bytes=[2**20],
            launcher="python",
            model={"task": "Net", "parameters": 7}, data={"samples": 10 * number, "sample 0": name},
        )  # fmt: skip
    write_json(here / "b" / "config.json", {"train_batch_size": 8, "gradient_clipping": 2, "dsframe": {"run_dir": "b"}})
    assert main(["compare", "a", "b"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[:3] == [
        "model  the same",
        "data   not the same: samples 10 / 20, sample 0",
        "file   1 key differs",
    ]
    rows = {line.split("  ")[0]: line for line in printed.splitlines()}
    assert rows["loss at step 2"].split()[-1] == "+1.0e-02"
    assert "b: not the same training as a: at step 2" in printed
    write_run(here / "run", [1.0])
    assert main(["compare", "run"]) == 6  # it did not come to its end


@pytest.mark.parametrize(
    ("more", "verdict"), [({}, "not the same"), ({"torch_autocast": {"enabled": True}}, "the same")]
)
def test_only_runs_in_16_bits_may_differ_by_their_rounding(more, verdict, here, capsys):
    finished = {"description": "engine", "steps": 1, "rate": 1, "unit": "samples", "units_per_step": 1, "seconds": 1.0}
    finished |= {"first_step_seconds": 0.5, "metrics": {}, "peak_memory_bytes": [1], "launcher": "python"}
    for name, loss in (("a", 1.0), ("b", 1.001)):
        write_run(here / name, [loss], **finished)
        write_json(here / name / "config.json", {"train_batch_size": 8, **more})
    main(["compare", "a", "b"])
    assert f"b: {verdict} training as a" in capsys.readouterr().out


def test_the_first_steps_that_both_have_decide():
    others = [{1: 1.0, 2: 1.000004, 20: 2.0}, {1: 1.1, 2: 1.2}, {5: 1.0}, {20: 1.0}]
    assert verdicts("abcde", [{1: 1.0, 2: 1.0, 20: 1.0}, *others], 1e-5) == [
        "b: the same training as a: up to step 2 the losses differ by 4.0e-06, as rounding does (up to 1e-05)",
        "c: not the same training as a: at step 1 the losses differ by 1.0e-01, which is more than rounding (up to 1e-05)",
        "d: no step was logged by both runs",
        "e: the same training as a: up to step 20 the losses differ by 0.0e+00, as rounding does (up to 1e-05)",
    ]
