"""``dsframe launch`` without processes: hosts, each launcher's command line, and when a failed run is started again."""

import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest

from dsframe.errors import WorldError
from dsframe.host import supervise
from dsframe.run_dir import outcome
from dsframe.tools.launch import attempts, command, devices, hosts, launchers, torchrun
from dsframe.tools.launch.attempts import Attempts
from dsframe.tools.launch.hosts import Host
from tests.files import ds_config, write_json
from tests.processes import REPOSITORY, python, run_program, run_ranks

TWO = (Host("node1", 2), Host("node2", 2))


@pytest.mark.parametrize(
    "text",
    [
        "node1 slots=2\nnode2 slots=2\n",
        "# ours\n\nnode1:2\nnode2:2  # the new one\n",
        "\ufeffnode1 slots = 2 max_slots=4\nnode2:2",
    ],
)
def test_host_files(text, tmp_path):
    (tmp_path / "hosts").write_text(text)
    assert hosts.read_file(tmp_path / "hosts") == TWO


@pytest.mark.parametrize("text", ["node1:2\nnode2 slot=2", "node1:0", "node1:2\nnode1:2", "# nothing\n"])
def test_host_files_that_are_wrong(text, tmp_path):
    (tmp_path / "hosts").write_text(text, encoding="latin-1")
    with pytest.raises(WorldError, match=r"hosts: \"node[12]|hosts names no host"):
        hosts.read_file(tmp_path / "hosts")


def test_hosts_of_a_slurm_allocation():
    environment = {"SLURM_JOB_NODELIST": "node[1-2],gpu1", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert hosts.from_slurm(environment) == (*TWO, Host("gpu1", 1))
    assert hosts.from_slurm({}) == ()


@pytest.fixture
def shown(capsys, monkeypatch):
    """The commands that ``dsframe launch --print`` shows."""

    def lines(typed, threads="3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        monkeypatch.setattr(launchers, "python", lambda: "python")
        monkeypatch.setattr(launchers.sys, "executable", "/env/bin/python")
        monkeypatch.setattr(launchers.os, "getuid", lambda: 1)
        monkeypatch.setattr(command, "free_port", lambda: 4321)
        monkeypatch.setattr(command, "interface_to", lambda name: "eth0")
        assert command.main(["--print", *typed.split()]) == 0
        return capsys.readouterr().out.splitlines()

    return lines


def test_variables_of_the_network_travel_with_mpirun(monkeypatch, shown):
    for name in ("FI_PROVIDER", "UCX_TLS", "NCCL_DEBUG", "SECRET_OF_MINE"):
        monkeypatch.setenv(name, "some")
    (line,) = shown("-H node1:2,node2:2 --launcher mpirun")
    words = line.split()
    sent = {after for word, after in itertools.pairwise(words) if word == "-x"}
    assert {"FI_PROVIDER", "UCX_TLS", "NCCL_DEBUG", "PATH", "MASTER_ADDR"} <= sent
    assert "SECRET_OF_MINE" not in sent


def test_the_command_is_shown_without_keys_of_accounts(shown):
    typed = "--config zero3.json -np 2 --set comet.api_key=the-key"
    (line,) = shown(typed)
    assert "comet.api_key=***" in line
    assert "the-key" not in line


PROGRAM = "-m dsframe.train --config zero3.json"
EXPORTED = "-x OMP_NUM_THREADS -x MASTER_ADDR -x MASTER_PORT"


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ("-np 4", [f"deepspeed --num_gpus=4 --master_port=4321 --module{PROGRAM[2:]}"]),
        ("-np 1", [f"python {PROGRAM}"]),
        ("-np 4 --engine horovod --interface eth1", [f"horovodrun -np 4 python {PROGRAM} --engine horovod"]),
        (
            "-np 4 -- --engine ddp",
            [f"torchrun --nproc-per-node=4 --master-addr=127.0.0.1 --master-port=4321 {PROGRAM} --engine ddp"],
        ),
        (
            "-np 2 --launcher mpirun",
            [f"MASTER_ADDR=127.0.0.1 MASTER_PORT=4321 mpirun -np 2 --oversubscribe --bind-to none {EXPORTED} python {PROGRAM}"],
        ),
        ("-np 2 --launcher srun", [f"MASTER_PORT=4321 srun --ntasks=2 --kill-on-bad-exit=1 python {PROGRAM}"]),
        ("-np 2 --script circles.py --launcher torchrun", [
            "torchrun --nproc-per-node=2 --master-addr=127.0.0.1 --master-port=4321 circles.py --config zero3.json"
        ]),
        (
            "-H node1:2,node2:2 --launcher horovodrun",
            [f"horovodrun -np 4 -H node1:2,node2:2 --network-interfaces eth0 python {PROGRAM}"],
        ),
    ],
)  # fmt: skip
def test_each_launchers_command(options, lines, shown):
    found = shown(f"--config zero3.json {options}")
    assert [line.replace("OMP_NUM_THREADS=3 ", "") for line in found] == lines
    assert all("OMP_NUM_THREADS=3 " in line for line in found)


def test_a_quiet_launch_has_the_variables_of_a_loud_one():
    launch = launchers.quietly(launchers.Launch(("deepspeed", "x.py"), {"CUDA_VISIBLE_DEVICES": "1"}))
    assert launch.command == ("deepspeed", "--quiet", "x.py")
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "1"


def counted_by_scripts(folder, variables):
    command, environment = [str(REPOSITORY / "launch" / "gpus"), str(folder)], {"PATH": os.environ["PATH"], **variables}
    return run_program(command, env=environment).stdout


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("NoDevFiles", []),
        ("1,-1,2", ["1"]),
        ("1,4,2", ["1"]),
        ("GPU-1b,MIG-2c", ["GPU-1b", "MIG-2c"]),
    ],
)
def test_gpus_are_those_that_cuda_would_show(visible, gpus, tmp_path):
    """Up to the first that is none, by CUDA's own rule; `dsframe launch` and the scripts of launch/ count the same."""
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices.visible(variables, tmp_path) == ()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert list(devices.visible(variables, tmp_path)) == gpus
    assert counted_by_scripts(tmp_path, variables) == f"{len(gpus)}\n"


def test_gpus_of_wsl_are_counted_by_nvidia_smi(tmp_path, monkeypatch):
    """WSL2 has /dev/dxg in place of a file for each GPU."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1b)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for expected in (0, 1):
        assert devices.installed(tmp_path) == expected
        assert counted_by_scripts(tmp_path, {}) == f"{expected}\n"
        (tmp_path / "dxg").touch()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")  # no driver on Windows' side
    assert devices.installed(tmp_path) == 0


def test_cuda_visible_devices_are_what_a_run_takes(monkeypatch, tmp_path, shown):
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    for number in range(8):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    start = "OMP_NUM_THREADS=3 CUDA_VISIBLE_DEVICES={} deepspeed --master_port=4321 --module" + PROGRAM[2:]
    for options, chosen in (("", "2,3"), ("-np 1 --launcher deepspeed", "2")):
        assert shown(f"--config zero3.json {options}") == [start.format(chosen)]
    for visible, options, words in (
        ("2,3", "--launcher torchrun", "--nproc-per-node=2"),
        ("", "-np 3 --launcher torchrun", "--nproc-per-node=3"),  # on the CPU
        (None, "", "deepspeed --num_gpus=8"),
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES") if visible is None else monkeypatch.setenv(
            "CUDA_VISIBLE_DEVICES", visible
        )
        assert words in shown(f"--config zero3.json {options}")[0]
    for visible, options, message in (
        ("2,3", "-np 3", "^-np 3, but CUDA_VISIBLE_DEVICES=2,3 shows 2: "),
        ("GPU-1b,GPU-2c", "", "^CUDA_VISIBLE_DEVICES=GPU-1b,GPU-2c: deepspeed sets"),
        ("", "-np 3", "^CUDA_VISIBLE_DEVICES=: deepspeed sets that variable itself"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(WorldError, match=message):
            shown(f"--config zero3.json {options}")


def test_threads_are_those_of_the_fullest_host(monkeypatch, shown):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for written, threads in (("", 2), (" --set dsframe.threads_per_rank=5", 5)):
        typed = f"--config zero3.json -H node1:2,node2:4 --launcher mpirun{written}"
        (line,) = shown(typed, threads="")
        assert line.startswith(f"OMP_NUM_THREADS={threads} ")


def test_this_machine_has_a_short_name_and_may_have_no_gpu_to_hide(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "node1.cluster")
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    assert Host("node1", 1).is_here
    assert not devices.hidden({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(("names", "nodes"), [("node[1-2]", 2), ("localhost", 1)])
def test_slurm_chooses_srun(names, nodes, monkeypatch, shown):
    monkeypatch.setenv("SLURM_JOB_NODELIST", names)
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", f"2(x{nodes})")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    (line,) = shown("--config zero3.json")
    start = "OMP_NUM_THREADS=8 MASTER_PORT=4321 srun"  # the task's cores, not what the login node had
    assert (
        line == f"{start} --ntasks={2 * nodes} --nodes={nodes} --cpus-per-task=8 --kill-on-bad-exit=1 python {PROGRAM}"
    )


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ("-H node1:2,node2:1 --launcher torchrun", {}, "torchrun starts the processes of one host"),
        ("-H node1:2,node2:1 -np 4", {}, "4 processes, but the hosts have 3 slots"),
        ("-np 2 --launcher python", {}, "plain python starts one process here, not 2"),
        ("-H node1:1 --launcher python", {}, "plain python starts one process here, not 1; name a launcher"),
        (
            "-np 2",
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "the variables of torchrun",
        ),
    ],
)
def test_what_cannot_be_launched(options, variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=message):
        command.main(["--config", "zero3.json", *options.split(), "--print"])


@pytest.mark.parametrize("option", [["--num_gpus", "2"], ["--nproc-per-node=2"]])
def test_other_launchers_options_are_answered(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(option)
    assert f"unrecognized arguments: {option[0]}; the number of processes in all is -np N" in capsys.readouterr().err


def test_a_wrong_file_starts_nothing(here, capsys):
    (here / "odd.json").write_text('{"train_batch_size": 3, "dsframe": {}}')
    arguments = ["-np", "2", "--config", "odd.json", "--run-dir", "run", "--quiet"]
    assert command.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "", "what it says is for a person"
    assert "train_batch_size: 3" in printed.err
    assert not (here / "run").exists()


@pytest.fixture(autouse=True)
def _as_it_is(monkeypatch):
    """Nothing is cleaned up, nobody waits."""
    monkeypatch.setattr(attempts, "clean", lambda: None)
    monkeypatch.setattr(supervise, "wait_for_signal", lambda seconds: 0)


class Played:
    """Attempts that say what a script tells them to, and the options that each of them got."""

    def __init__(self, attempts, *script):
        self._report, self._script = attempts.report, list(script)
        self.resumed = []

    def __call__(self, resume, received):
        self.resumed.append(resume)
        return self._script.pop(0)(self._report)


def says(code, *records, saved=None):
    """An attempt whose launcher ends with ``code`` and whose processes say ``records``."""

    def play(report):
        if saved is not None:
            (report.parent / "checkpoints" / f"step-{saved:08}").mkdir(parents=True)
        for record in records:
            reporter = outcome.Reporter(str(report), int(str(record.get("rank", 0))))
            reporter.say(**record)
        return code

    return play


BEGAN = {"began": True}
DONE = {"done": True}


def failed(step, message, code=1, rank=0):
    return {"rank": rank, "step": step, "code": code, "message": message}


def lost(step):
    return failed(step, outcome.LOST_A_PEER, code=7, rank=1)


@pytest.mark.parametrize(
    ("script", "code", "resumed", "said"),
    [
        pytest.param([says(250, BEGAN, DONE)], 0, [False], "the launcher then exited with 250", id="an abort after success"),
        pytest.param(
            [says(0, BEGAN)] * 4, 1, [False] * 2, "the launcher ended with 0, but no process said", id="exit code 0 of a crash"
        ),
        pytest.param(
            [says(1, BEGAN, lost(7), saved=5), says(1, lost(5)), says(0, DONE)],
            0, [False, True, True], "after step 7: a process was killed", id="a kill, and one at the start"
        ),
        pytest.param(
            [says(1, lost(0), saved=5), says(0, DONE)], 0, [False, False], "", id="killed before it began: old checkpoints"
        ),
        pytest.param(
            [says(1, BEGAN, failed(7, "ValueError: odd"), saved=5), says(1, BEGAN, failed(7, "ValueError: odd", rank=1))],
            1, [False, True], "failed 2 times in a row after step 7: rank 1: ValueError: odd", id="the same error again",
        ),
        pytest.param(
            [says(1, BEGAN, failed(7, "a")), says(1, BEGAN, failed(9, "a")), says(1, failed(9, "b")), says(1, failed(3, "b"))],
            1, [False] * 4, "all 3 restarts are used", id="other errors, other steps",
        ),
        pytest.param([says(1, lost(4))] * 4, 7, [False] * 3, "failed 3 times in a row after step 4", id="kills at one step"),
        pytest.param([says(1, failed(0, "port", WorldError.exit_code))] * 2 + [says(0, DONE)], 0, [False] * 3, "", id="a port"),
        pytest.param([says(9, BEGAN, saved=5), says(0, DONE)], 0, [False, True], "failed after step 5: ", id="all killed"),
        pytest.param([says(1, failed(0, "no such key", 2))], 2, [False], "would not change that", id="a mistake in the file"),
        pytest.param([says(1, BEGAN, failed(0, "odd", 5))], 5, [False], "would not change that", id="the task's own, at once"),
        pytest.param(
            [says(1, BEGAN, failed(7, "timeout", 5), saved=5), says(0, DONE)],
            0, [False, True], "timeout", id="the task's own, later",
        ),
        pytest.param([says(1, failed(6, "stopped after step 6", 75), saved=6)], 75, [False], "", id="stopped and saved"),
    ],
)  # fmt: skip
def test_restarts(
    script,
    code,
    resumed,
    said,
    tmp_path,
    capfd,
):
    launched = Attempts(tmp_path, restarts=3, wait_seconds=1.0)
    played = Played(launched, *script)
    assert launched.run(played) == code
    assert played.resumed == resumed
    assert said in capfd.readouterr().err
    assert not list(tmp_path.glob("outcome*")), "it was for the launcher alone"


@pytest.mark.parametrize(("saved", "advised"), [(5, True), (None, False)])
def test_a_launch_without_restarts_says_how_to_go_on(saved, advised, tmp_path, capfd):
    launched = Attempts(tmp_path, restarts=0, wait_seconds=1.0)
    launched.run(Played(launched, says(9, BEGAN, lost(7), saved=saved)))
    said = capfd.readouterr().err
    assert "failed after step 7: a process was killed" in said
    assert ("; continue with --resume auto" in said) is advised


def test_a_program_that_is_not_there_starts_no_process(here, capsys):
    (here / "circles.py").touch()
    write_json(here / "config.json", {"train_batch_size": 2})
    with pytest.raises(SystemExit):
        command.main(["--config", "config.json", "-np", "2", "--script", "cirlces.py"])
    assert "--script: cirlces.py is not a file; did you mean circles.py?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--config", "config.json", "-np", "2", "circles.py"])
    assert "unrecognized arguments: circles.py; did you mean --script circles.py?" in capsys.readouterr().err


@pytest.mark.parametrize(("script", "noted"), [(["--script", "own.py"], False), ([], True)])
def test_a_program_needs_no_task_in_the_file(script, noted, here, capfd):
    (here / "own.py").touch()
    write_json(here / "config.json", ds_config(2, "SGD", 0.1, engine="single", steps=1))
    request = command.read(command.parser().parse_args(["-np", "1", *script]), ["--config", "config.json"])
    assert command._check(request, program=bool(script)) == 0
    assert ('no "task"' in capfd.readouterr().err) is noted


def test_a_second_launch_in_a_runs_directory_leaves_its_report_alone(tmp_path):
    """Its processes are refused; what the first's have said, and say afterwards, is still read."""
    first, second = (Attempts(tmp_path, restarts=0, wait_seconds=1.0) for _ in range(2))
    codes = []

    def play(report):
        says(0, BEGAN, DONE)(report)
        refused = says(1, failed(0, "the directory is in use", WorldError.exit_code))
        codes.append(second.run(Played(second, refused)))
        return says(1, lost(4))(report)

    assert first.run(Played(first, play)) == 0
    assert codes == [WorldError.exit_code]


@pytest.mark.parametrize("left", ["nothing", "step-00000005.damaged"])
def test_what_was_saved_and_is_gone_is_not_trained_again(left, tmp_path, capfd):
    """A disk that is away, or damage: the next attempt would begin at step 0, for nobody to see until it is over."""

    def loses(report):
        folder = report.parent / "checkpoints"
        shutil.move(folder / "step-00000005", folder / left if left != "nothing" else tmp_path / "away")
        return says(1, lost(8))(report)

    launched = Attempts(tmp_path, restarts=9, wait_seconds=1.0)
    played = Played(launched, says(1, BEGAN, lost(7), saved=5), loses, says(0, DONE))
    assert launched.run(played) == 7
    assert played.resumed == [False, True]
    said = capfd.readouterr().err
    assert f"{tmp_path / 'checkpoints'} has no complete checkpoint any more" in said
    assert ("step-00000005.damaged" in said) == (left != "nothing")


def test_waits_grow_and_a_signal_ends_them(tmp_path, monkeypatch):
    waits = []

    def wait(seconds):
        waits.append(seconds)
        return int(signal.SIGTERM) if len(waits) == 5 else 0

    monkeypatch.setattr(supervise, "wait_for_signal", wait)
    steps = [says(1, BEGAN, lost(step), saved=8 if step == 9 else None) for step in (1, 2, 3, 9, 10)]
    launched = Attempts(tmp_path, restarts=9, wait_seconds=20.0)
    assert launched.run(Played(launched, *steps)) == 128 + signal.SIGTERM
    assert waits == [20, 40, 60, 20, 40], "a new checkpoint is progress"


@pytest.mark.parametrize("code", [130, 246, 1])
def test_a_signal_of_ours_is_no_failure(code, tmp_path, capfd):
    """``code``: torchrun's, DeepSpeed's and horovodrun's where workers were asked to end before they could hear it."""

    def attempt(resume, received):
        received.append(signal.SIGINT)
        return code

    assert Attempts(tmp_path, restarts=9, wait_seconds=1.0).run(attempt) == 130
    assert "ended by SIGINT" in capfd.readouterr().err


def test_the_report_is_lines_of_many_processes(tmp_path):
    path = tmp_path / "run" / "outcome.jsonl"
    assert outcome.read(path) == outcome.Outcome()
    first, second = (outcome.Reporter(str(path), rank) for rank in (0, 1))
    first.step, second.step = 2, 3
    second.failed(7, outcome.LOST_A_PEER)
    first.failed(6, "the disk is gone\nand more")
    with path.open("a") as file:
        file.write('{"rank": 1, "cut o')
    assert outcome.read(path) == outcome.Outcome(code=6, rank=0, step=3, message="the disk is gone")
    outcome.Reporter("/proc/nowhere/outcome.jsonl", 0).failed(1, "said nowhere")


@pytest.mark.parametrize(
    "torn",
    [
        b'{"rank": 2, "st{"rank": 3, "step": 1}\n',
        b"\xff\xfe\x00\x00\n",
        b"17\n",
        b'{"code": 7}\n',
        b'{"rank": 2, "step": 1, "code": 7}\n',
        b"\n",
    ],
)
def test_lines_that_hosts_wrote_over_one_another_are_left_out(tmp_path, torn):
    """As NFS leaves them, where appending is no single step over several hosts."""
    path = tmp_path / "outcome.jsonl"
    outcome.Reporter(str(path), 0).say(began=True)
    with path.open("ab") as file:
        file.write(torn)
    outcome.Reporter(str(path), 1).failed(6, "the disk is gone")
    assert outcome.read(path) == outcome.Outcome(began=True, code=6, rank=1, step=0, message="the disk is gone")


def test_deepspeed_reads_a_host_file(tmp_path, shown):
    file = tmp_path / "hosts"
    file.write_text("node1 slots=2\nnode2 slots=4\n")
    (line,) = shown(f"--config zero3.json --hostfile {file} --launcher deepspeed")
    meeting = "--master_addr=node1 --master_port=4321"
    assert line == f"OMP_NUM_THREADS=3 deepspeed --hostfile={file} {meeting} --module{PROGRAM[2:]}"
    for words in (["-H", "node1:2,node2:2"], ["--hostfile", str(file), "-np", "3"]):
        with pytest.raises(WorldError, match="name it with --hostfile, without -np"):
            command.main(["--print", "--config", "zero3.json", *words, "--launcher", "deepspeed"])


@pytest.mark.parametrize(
    ("engine", "installed", "launcher"),
    [
        ("deepspeed", ("deepspeed", "pdsh", "mpirun"), "deepspeed"),
        ("deepspeed", ("deepspeed", "mpirun"), "mpirun"),
        ("ddp", ("mpirun", "pdsh"), "mpirun"),
        ("ddp", (), "torchrun"),
        ("horovod", (), "horovodrun"),
    ],
)
def test_several_hosts_take_what_is_installed(engine, installed, launcher, monkeypatch):
    monkeypatch.setattr(launchers.shutil, "which", lambda name, path: name if name in installed else None)
    job = launchers.Job(4, ("-m", "dsframe.train"), (), hosts=TWO, hostfile=Path("hosts"))
    assert launchers.natural(engine, job) == launcher
    assert launchers.natural(engine, launchers.replace(job, hostfile=None)) != "deepspeed"


def test_what_the_check_says_is_said_once(tmp_path):
    """By the launch, and not again by the process that trains."""
    settings = {"engine": "single", "steps": 1, "run_dir": "run", "task": {"name": "tests.lines:Line"}}
    write_json(tmp_path / "file.json", ds_config(4, "SGD", 0.1, {"_why": "a comment"}, **settings))
    words = ["-m", "dsframe.cli", "launch", "--config", "file.json", "-np", "1"]
    finished = run_ranks(python(words), cwd=tmp_path, timeout_seconds=120).check()
    assert finished.output.count("taken as a comment") == 1


def test_ctrl_c_while_torch_is_imported_is_no_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(torchrun, "_run", interrupted)
    assert torchrun.main() == 130
