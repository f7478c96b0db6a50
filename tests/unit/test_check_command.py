"""The command: what it prints, in which format, with which exit code, and what it does not import."""

import io
import json
import re
import sys

import pytest

from dsframe.cli import COMMANDS, main
from dsframe.config import load
from tests.files import ds_config, write_json
from tests.processes import REPOSITORY

CLEAN = (
    '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}'
)
WARNS = '{"train_batch_size": 8, "zero_optimization": {"stage": 1, "cpu_offload": true}}'
MICRO = "train_micro_batch_size_per_gpu"
WRONG = '{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 1}\n}'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in {"clean": CLEAN, "warns": WARNS, "wrong": WRONG}.items():
        (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["warns.json"], 0),
        (["clean.json", "--strict"], 0),
        (["clean.json", "wrong.json", "clean.json"], 2),
        (["clean.json", "warns.json", "--strict"], 1),
        (["clean.json", "-np", "3"], 2),
        (["clean.json", "--set", "gradient_clipping=-1"], 2),
    ],
)
def test_exit_codes(folder, arguments, code, capsys):
    assert main(["check", *arguments]) == code
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [["--nonsense"], [], ["clean.json", "-np", "0"]])
def test_wrong_usage(folder, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["check", *arguments])
    assert caught.value.code == 2
    assert "usage: dsframe check" in capsys.readouterr().err


NO_TASK = (
    'note: no "task" in "dsframe": unless a program gives its own, this is the built-in image classifier; write '
    '"task": {"name": "module:Class"}'
)


def test_text(folder, capsys):
    main(["check", "wrong.json", "warns.json", "clean.json", "-np", "2"])
    assert capsys.readouterr().out.splitlines() == [
        'wrong.json:3:3: error: zero_optimisation: unknown key; did you mean "zero_optimization"? [unknown-key]',
        "wrong.json: 1 error",
        'warns.json:1:59: warning: zero_optimization.cpu_offload: deprecated; write "offload_optimizer": {"device": "cpu"} '
        "[deprecated]",
        f"warns.json: {NO_TASK}",
        "warns.json: batch 8 = 4 (micro) x 1 (accumulation) x 2 (data-parallel ranks); derived: gradient_accumulation_steps = 1 "
        "(DeepSpeed's default), train_micro_batch_size_per_gpu = 4 = 8 / 1 (accumulation) / 2 (ranks)",
        "warns.json: the file does not say, so inherited: gradient_clipping 1.0; DeepSpeed's defaults",
        "warns.json: 1 warning",
        f"clean.json: {NO_TASK}",
        "clean.json: batch 8 = 4 (micro) x 1 (accumulation) x 2 (data-parallel ranks); derived: gradient_accumulation_steps = 1 "
        "(DeepSpeed's default), train_micro_batch_size_per_gpu = 4 = 8 / 1 (accumulation) / 2 (ranks)",
        "clean.json: the file does not say, so inherited: gradient_clipping 1.0, betas [0.9, 0.999], eps 1e-08, "
        "weight_decay 0.0, bias_correction true; DeepSpeed's defaults",
        "clean.json: no problems",
    ]


def test_what_it_prints_is_annotated_on_github(folder, capsys):
    """By the matcher that ``action.yml`` names."""
    (matcher,) = json.loads((REPOSITORY / "check" / "matcher.json").read_text())["problemMatcher"]
    (pattern,) = matcher["pattern"]
    main(["check", "wrong.json"])
    match = re.match(pattern["regexp"], capsys.readouterr().out.splitlines()[0])
    assert [match[pattern[key]] for key in ("file", "line", "column", "severity")] == ["wrong.json", "3", "3", "error"]


def test_resolved_is_a_file_that_runs(folder, capsys):
    content = ds_config("auto", "AdamW", "auto", sections={MICRO: 4, "gradient_accumulation_steps": "auto"})
    write_json(folder / "auto.json", content)
    main(["check", "auto.json"])
    assert 'auto.json: note: 3 values are "auto"; --resolved shows what they become' in capsys.readouterr().out
    assert main(["check", "auto.json", "-np", "2", "--resolved"]) == 0
    printed = capsys.readouterr()
    sizes = re.findall(r'^  "(.*)": (\d+),$', printed.out, re.MULTILINE)
    assert sizes == [("train_batch_size", "8"), (MICRO, "4"), ("gradient_accumulation_steps", "1")]
    assert "\n// gradient_clipping: inherited, DeepSpeed's default" in printed.out
    assert "auto.json: no problems" not in printed.out
    assert '\n// optimizer.params.lr: "auto": the default of Hugging Face\'s Trainer' in printed.out
    assert "\n// derived: train_batch_size = 8 = 4 (micro) x 1 (accumulation) x 2 (data-parallel ranks)" in printed.out
    (folder / "again.json").write_text(printed.out)
    again = load("again.json")
    assert again.problems == ()
    handed, auto = again.for_deepspeed(2), load("auto.json")
    for one in auto.inherited:  # which is written in what was printed
        owner = handed["optimizer"]["params"] if len(one.path) > 1 else handed
        assert owner.pop(str(one.path[-1])) == one.value
    assert handed == auto.for_deepspeed(2)


@pytest.mark.parametrize(
    ("engine", "override", "message"),
    [
        (
            "fsdp",
            "optimizer.type=Rprop",
            "Rprop, which computes updates from full parameters, is not supported by engine fsdp",
        ),
        ("fsdp", "zero_optimization.stage=1", "fsdp keeps shards of everything on every rank, as at ZeRO stage 3"),
        ("horovod", "dsframe.ddp.communication=bf16", "communication by bf16 is not supported by engine horovod"),
    ],
)
def test_what_an_engine_cannot_do_is_said(folder, engine, override, message, capsys):
    untested = "zero_allow_untested_optimizer=true"
    main(["check", "clean.json", "--engine", engine, "--set", override, "--set", untested])
    assert message in capsys.readouterr().out


def test_engine(folder, capsys):
    assert main(["check", "clean.json", "--engine", "horovd"]) == 2
    assert 'no engine "horovd"; did you mean "horovod"?' in capsys.readouterr().out
    assert main(["check", "clean.json", "--engine", "horovod"]) == 0
    assert "horovod keeps a full replica on every rank" in capsys.readouterr().out
    assert main(["check", "clean.json", "--engine", "ddp", "--set", "data_efficiency.enabled=true"]) == 2


ZERO3 = "zero_optimization.stage=3"
OFFLOAD = "zero_optimization.offload_optimizer.device=cpu"


@pytest.mark.parametrize(
    ("asked", "message", "remedy"),
    [
        (
            ["torch_autocast.enabled=true", "torch_autocast.dtype=float16"],
            'torch_autocast: torch.autocast to float16 (write "dtype": "bfloat16") is refused: DeepSpeed 0.19.8 clips',
            ["torch_autocast.dtype=bfloat16"],
        ),
        (
            ["fp16.enabled=true", "zero_optimization.stage=0"],
            'fp16: fp16 at ZeRO stage 0 (write "zero_optimization": {"stage": 1}) is refused: DeepSpeed',
            ["zero_optimization.stage=1"],
        ),
        (
            [ZERO3, OFFLOAD, "zero_optimization.offload_optimizer.ratio=0.9"],
            "zero_optimization.offload_optimizer.ratio: optimizer offload in part is refused: the part that is",
            ["zero_optimization.offload_optimizer.ratio=1.0"],
        ),
    ],
)
def test_what_deepspeed_would_train_otherwise_is_refused(folder, asked, message, remedy, capsys):
    """Engines of full replicas train all of it; DeepSpeed 0.19.8 another training, or none from some step on."""

    def check(engine, changes):
        return main(["check", "clean.json", "--engine", engine, *[text for one in changes for text in ("--set", one)]])

    assert check("ddp", asked) == 0
    assert check("deepspeed", [*asked, *remedy]) == 0
    assert message not in capsys.readouterr().out
    assert check("deepspeed", asked) == 2
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "stages", "processes", "message"),
    [
        ("single", 1, 2, 'engine "single" is one process, not 2; start one, or choose "ddp"'),
        (
            "reference-model-parallel",
            2,
            4,
            "has one process for each of pipeline.stages, which is 2, not 4; start 2",
        ),
    ],
)
def test_an_engine_that_takes_other_numbers_of_processes_says_so(folder, engine, stages, processes, message, capsys):
    command = ["check", "clean.json", "--engine", engine, "--set", f"pipeline.stages={stages}", "-np"]
    assert main([*command, str(processes)]) == 2
    assert message in capsys.readouterr().out
    assert main([*command, str(stages)]) == 0


def test_an_engine_of_full_replicas_is_judged_by_itself(folder):
    command = ["check", "clean.json", "--set", "tensor_parallel.autotp_size=2", "--set", "dsframe.task.model=cnn"]
    assert main(command) == 2
    assert main([*command, "--engine", "ddp"]) == 0
    assert main(["check", "clean.json", "--engine", "reference-model-parallel"]) == 2, "there is one stage"


def test_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(WRONG.encode())))
    assert main(["check", "-"]) == 2
    assert capsys.readouterr().out.startswith("<stdin>:3:3: error: zero_optimisation: unknown key")


def test_the_command_names_its_commands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)
    assert main(["chek"]) == 2
    assert 'no command "chek"; did you mean "check"?' in capsys.readouterr().err


def test_a_file_for_an_engine_has_an_optimizer(folder, capsys):
    (folder / "bare.json").write_text('{"train_batch_size": 8}')
    assert main(["check", "bare.json"]) == 0
    assert main(["check", "bare.json", "--engine", "ddp"]) == 2
    assert "optimizer: is required" in capsys.readouterr().out
