"""launch/bin: what `deepspeed` and `horovodrun` hand to the libraries' own launchers, and what they do when those misbehave.

DeepSpeed's launcher is a stand-in here, of the same build: a runner that starts a middle process that starts the workers.
The real one is in tests/faults.
"""

import ast
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import MARK, REPOSITORY, marked, run_program, run_ranks

COMMAND = REPOSITORY / "launch" / "bin" / "deepspeed"
ON_CPU = os.environ | {"DS_ACCELERATOR": "cpu"}


def load_command():
    loader = importlib.machinery.SourceFileLoader("deepspeed_command", str(COMMAND))
    spec = importlib.util.spec_from_loader("deepspeed_command", loader)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    try:
        loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module


command = load_command()


def rewritten(typed, *, gpus=False, hostfile=False, visible=None):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    arguments = command.rewrite(typed.split(), environment, gpus=gpus, hostfile=hostfile, port=1234)
    return " ".join(arguments)


@pytest.mark.parametrize(
    ("typed", "handed_over"),
    [
        # -m is the launcher's own only before the script or module.
        ("-m pkg.train", "--master_port=1234 --module pkg.train"),
        ("-mpkg.train -m x", "--master_port=1234 --module pkg.train -m x"),
        ("--module pkg.train -m x", "--master_port=1234 --module pkg.train -m x"),
        ("--num_gpus 4 -m pkg.train", "--num_gpus 4 --master_port=1234 --module pkg.train"),
        ("train.py -m x --num_gpus=3", "--master_port=1234 train.py -m x --num_gpus=3"),
        # A value is not the script; every way argparse knows to write one.
        ("-H hosts -m pkg", "-H hosts --module pkg"),
        ("-Hhosts train.py", "-Hhosts train.py"),
        ("-i localhost:0 -m pkg", "-i localhost:0 --master_port=1234 --module pkg"),
        ("-e h:1 train.py", "-e h:1 --master_port=1234 train.py"),
        ("--num_a 2 -m pkg", "--num_a 2 --master_port=1234 --module pkg"),
        ("--launcher_args -m -m pkg", "--launcher_args -m --master_port=1234 --module pkg"),
        (
            "--enable_each_rank_log x --bind_cores_to_rank t.py",
            "--enable_each_rank_log x --bind_cores_to_rank --master_port=1234 t.py",
        ),
        # A port only where this machine alone decides, and only if none was given.
        ("--master_port 5 train.py", "--master_port 5 train.py"),
        ("--no_ssh --node_rank 1 -H hosts train.py", "--no_ssh --node_rank 1 -H hosts train.py"),
        ("--master_addr node1 train.py", "--master_addr node1 train.py"),
        ("--help", "--help"),
        # Quiet for dsframe alone, and not when asked to be verbose.
        ("-m dsframe.train --config x", "--master_port=1234 --quiet --module dsframe.train --config x"),
        ("-q -m dsframe.train", "-q --master_port=1234 --module dsframe.train"),
        ("--log_level info -m dsframe.train", "--log_level info --master_port=1234 --module dsframe.train"),
        ("-m dsframework.train", "--master_port=1234 --module dsframework.train"),
    ],
)
def test_command_line(typed, handed_over):
    assert rewritten(typed) == handed_over


CONSOLE_SCRIPT = (
    "#!/env/bin/python3\n\nfrom deepspeed.launcher.runner import main\n\nif __name__ == '__main__':\n    main()\n"
)


@pytest.mark.parametrize(
    ("options", "script"),
    [
        # What needs the runner: it counts devices, finds hosts, tunes, and says what is wrong with a number.
        *(
            (options, CONSOLE_SCRIPT)
            for options in (
                "", "--num_gpus=0", "--num_gpus=two", "--num_gpus=2 --num_accelerators=2", "--num_gpus=2 --autotuning=run",
                "--num_gpus=2 --num_nodes=1", "--num_gpus=2 --master_addr=node1", "--num_gpus=2 -H hosts",
                "--num_gpus=2 --force_multi",
            )
        ),
        # Somebody else's program of that name.
        ("--num_gpus=2", CONSOLE_SCRIPT.replace("python3", "python3 -s")),
        ("--num_gpus=2", "#!/bin/sh\n# from deepspeed.launcher.runner import main\n"),
        ("--num_gpus=2", CONSOLE_SCRIPT.replace("runner", "other")),
    ],
)  # fmt: skip
def test_what_needs_the_runner_gets_it(options, script, tmp_path):
    (tmp_path / "deepspeed").write_text(script)
    assert command.launch(str(tmp_path / "deepspeed"), rewritten(f"{options} t.py").split()) is None


RUN_RUNNER = """
import json, sys, types
from deepspeed.launcher import runner
class Started(Exception): pass
def start(command, env): raise Started(command)
runner.subprocess = types.SimpleNamespace(Popen=start)
try: runner.main(sys.argv[1:])
except Started as started: print(json.dumps(started.args[0]))
"""


def test_it_is_started_as_the_installed_runner_would():
    """But for what the runner always names and what is its default."""
    typed = "--num_gpus=2 --master_port=1234 --no_local_rank --module pkg.train --config x"
    ran = run_program([sys.executable, "-c", RUN_RUNNER, *typed.split()], env=ON_CPU)
    theirs = json.loads(ran.stdout.splitlines()[-1])
    installed = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    assert installed
    ours = command.launch(installed, typed.split())
    defaults = {"--log_level=info", "--enable_each_rank_log=None"}
    (mine, rest), (other, others) = (
        (line[1 : line.index("pkg.train")], line[line.index("pkg.train") :]) for line in (ours, theirs)
    )
    assert {*mine} == {*other} - defaults
    assert rest == others


SHOW = """
import json, os, sys
kept = {name: value for name, value in os.environ.items() if not name.startswith(("_", "DSFRAME"))}
os.write(1, f"\\n{json.dumps([sys.argv, kept], sort_keys=True)}\\n".encode())  # one write: two ranks share this output
"""


@pytest.mark.parametrize("begins", [["show.py"], ["--no_local_rank", "--module", "show"]])
def test_ranks_find_what_deepspeeds_launcher_gives_them(begins, tmp_path):
    """Without its log the launcher of one host's processes is ours, which imports no DeepSpeed: no rank may see which it was."""
    (tmp_path / "show.py").write_text(SHOW)
    installed = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    assert installed
    typed = ["--num_gpus=2", "--master_port=1234", *begins, "-x", "--y=1"]
    theirs, ours = command.launch(installed, typed), command.launch(installed, ["--quiet", *typed])
    assert ours[3] == command.ranks.__file__
    found = []
    for words in (theirs, ours):
        done = run_program(words, env=ON_CPU | {"RANK": "7"}, cwd=tmp_path)
        found.append(sorted(line for line in done.stdout.splitlines() if line.startswith("[[")))
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_the_short_launcher_imports_the_standard_library_alone():
    program = f"import runpy, sys; runpy.run_path({command.ranks.__file__!r}); print([*sys.modules])"
    done = run_program([sys.executable, "-S", "-c", program])
    assert not {"torch", "deepspeed", "numpy", "argparse"} & set(ast.literal_eval(done.stdout))


LIST_OPTIONS = """
import argparse, json, deepspeed.launcher.runner
def options(parser, args=None):
    print(json.dumps([[a.option_strings, a.nargs] for a in parser._actions if a.option_strings]))
    raise SystemExit
argparse.ArgumentParser.parse_args = options
deepspeed.launcher.runner.parse_args()
"""


def test_knows_every_option_of_the_installed_launcher():
    listed = run_program([sys.executable, "-c", LIST_OPTIONS], env=ON_CPU)
    options = json.loads(listed.stdout.splitlines()[-1])
    takes_value = {name: nargs != 0 for names, nargs in options for name in names if name.startswith("--")}
    assert {name for name, takes in takes_value.items() if takes} == set(command.WITH_VALUE)
    assert {name for name, takes in takes_value.items() if not takes} == set(command.WITHOUT_VALUE)
    short = {name: long for names, _ in options for name in names for long in names if name[1] != "-" == long[1]}
    assert short == command.SHORT


def test_visible_devices_choose_the_gpus():
    assert (
        rewritten("--num_gpus=2 t.py", gpus=True, visible="2,3,5") == "--master_port=1234 --include=localhost:2,3 t.py"
    )
    assert rewritten("--num_gpus 1 t.py", gpus=True, visible="7") == "--master_port=1234 --include=localhost:7 t.py"


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        ("", "CUDA_VISIBLE_DEVICES= hides all GPUs"),
        ("2", "--num_gpus=2, but CUDA_VISIBLE_DEVICES=2 shows 1"),
        ("GPU-1b,GPU-2c", "CUDA_VISIBLE_DEVICES=GPU-1b,GPU-2c: deepspeed accepts GPU numbers only"),
    ],
)
def test_gpus_that_the_user_hid_are_not_taken(visible, said):
    """DeepSpeed drops the variable where ``--num_gpus`` is given, and takes GPUs 0 to N-1."""
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        rewritten("--num_gpus=2 t.py", gpus=True, visible=visible)
    assert rewritten("--num_gpus=2 t.py", visible=visible) == "--num_gpus=2 --master_port=1234 t.py"


def test_deepspeed_without_a_number_takes_what_is_visible():
    for visible in (None, "2,3"):
        assert rewritten("t.py", gpus=True, visible=visible) == "--master_port=1234 t.py"
    assert rewritten("--num_gpus=2 t.py", gpus=True) == "--num_gpus=2 --master_port=1234 t.py"


def test_a_host_file_where_deepspeed_looks_for_one_means_several_machines():
    assert rewritten("--num_gpus=2 t.py", gpus=True, hostfile=True, visible="2,3") == "--num_gpus=2 t.py"


def test_finds_the_next_one_on_path(tmp_path, monkeypatch):
    (tmp_path / "deepspeed").write_text("")
    monkeypatch.setenv("PATH", f"{COMMAND.parent}:{tmp_path}")
    assert command.supervise.next_on_path(COMMAND) is None, "not executable"
    (tmp_path / "deepspeed").chmod(0o755)
    assert command.supervise.next_on_path(COMMAND) == str(tmp_path / "deepspeed")
    link = tmp_path / "link"
    link.symlink_to(COMMAND.parent)
    monkeypatch.setenv("PATH", f"{link}:{COMMAND.parent}")
    assert command.supervise.next_on_path(COMMAND) is None


# The runner starts the middle process, which starts two workers and waits for them, as in deepspeed/launcher.
STAND_IN = """#!{python} -S
import os, signal, subprocess, sys, time
role = os.environ.get("ROLE", "runner")
os.write(1, f"{{role}} {{os.getpid()}}\\n".encode())  # one write: several processes share this output
if role == "runner":
    own = [sys.executable, "-S", __file__]
    middle = subprocess.Popen(own, env=os.environ | {{"ROLE": "middle"}}, start_new_session=bool(os.environ.get("AWAY")))
    code = middle.wait()
    sys.exit(code if code > 0 else 0)       # DeepSpeed's mistake: a signal is not a failure
if role == "middle":
    workers = [
        subprocess.Popen([sys.executable, "-S", __file__], env=os.environ | {{"ROLE": "worker", "LOCAL_RANK": str(rank)}})
        for rank in range(2)
    ]
    sys.exit(max(worker.wait() for worker in workers))
def usr1(number, frame):
    print("heard USR1", flush=True)
    os._exit(0)
signal.signal(signal.SIGUSR1, usr1)
if os.environ.get("DEAF"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(float(os.environ["SLEEP"]))
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def stand_in(tmp_path):
    (tmp_path / "deepspeed").write_text(STAND_IN.format(python=sys.executable))
    (tmp_path / "deepspeed").chmod(0o755)
    return {"PATH": f"{COMMAND.parent}:{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "SLEEP": "60"}


def pid_of(running, role):
    return next(int(line.split()[1]) for line in running.stdout.splitlines() if line.startswith(role))


def when_ready(running):
    running.wait_for(lambda: running.stdout.count("ready") == 2, timeout_seconds=20, what="both workers were ready")


def sends(number):
    """What sends it to the launcher."""

    def send(running):
        when_ready(running)
        running.process.send_signal(number)

    return send


IMPATIENT = """
import sys
from dsframe.host import ranks
ranks.PATIENCE_SECONDS = 0.2
sys.exit(ranks.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (["grep", "-Pqz", r"SigBlk:\s\w*0{7}\nSigIgn:\s\w*0{7}\n", "/proc/self/status"], 0),  # dash would unblock them
        (["sh", "-c", "[ $RANK = 1 ] && exit 3; exec sleep 60"], 3),
        (["sh", "-c", "[ $RANK = 1 ] && kill -9 $$; exec sleep 60"], 256 - signal.SIGKILL),
        (["sh", "-c", "trap '' TERM; [ $RANK = 1 ] && sleep 1 && exit 3; exec sleep 60"], 3),
        (["sh", "-c", "echo ready; exec sleep 60"], 1),
        (["./missing"], 127),
    ],
)
def test_ranks_end_with_the_first_that_fails(program, code, tmp_path):
    """None is left (``run_ranks`` would see it): not at a Ctrl-C, nor if one does not end by itself."""
    words = [f"--{word}" for word in ("num=2", "port=1", "python=a=b", "no_python", "no_local_rank")]
    finished = run_ranks(
        [sys.executable, "-S", "-c", IMPATIENT, *words, *program],
        env={"PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        timeout_seconds=20,
        settle_seconds=0,
        while_running=sends(signal.SIGINT) if code == 1 else None,
    )
    assert finished.returncode == code, finished


def test_horovodrun_gets_the_command_line_as_typed(tmp_path):
    (tmp_path / "horovodrun").write_text('#!/bin/sh\nprintf "<%s>" "$@"\nexit 3\n')
    (tmp_path / "horovodrun").chmod(0o755)
    path = f"{COMMAND.parent}:{tmp_path}:{os.environ['PATH']}"
    typed = ["horovodrun", "-np", "2", "--mpi-args=--a --b", "python", "-m", "x y"]
    finished = run_ranks(typed, env={"PATH": path}, timeout_seconds=30)
    assert finished.stdout == "<-np><2><--mpi-args=--a --b><python><-m><x y>"
    assert finished.returncode == 3


def test_usr1_reaches_the_workers_and_no_launcher(stand_in):
    words = ["deepspeed", "t.py"]
    finished = run_ranks(words, env=stand_in, timeout_seconds=30, while_running=sends(signal.SIGUSR1))
    assert finished.returncode == 0
    assert finished.stdout.count("heard USR1") == 2


def test_workers_that_will_not_end_are_killed(stand_in):
    def kill(running):
        when_ready(running)
        psutil.Process(pid_of(running, "runner")).kill()
        psutil.Process(pid_of(running, "middle")).kill()

    finished = run_ranks(
        ["deepspeed", "t.py"],
        env=stand_in | {"DEAF": "1"},
        timeout_seconds=40,
        settle_seconds=0,
        while_running=kill,
    )
    assert finished.returncode == 128 + signal.SIGKILL


def test_nohup_is_respected(stand_in):
    words, hang_up = ["nohup", "deepspeed", "t.py"], sends(signal.SIGHUP)
    finished = run_ranks(words, env=stand_in | {"SLEEP": "3"}, timeout_seconds=30, while_running=hang_up)
    assert finished.returncode == 0


def test_stopping_stops_the_workers_and_continuing_continues_them(stand_in):
    def stop(running):
        when_ready(running)
        worker = psutil.Process(pid_of(running, "worker"))
        running.process.send_signal(signal.SIGTSTP)
        mark = worker.environ()[MARK]
        running.wait_for(
            lambda: {process.status() for process in marked(mark)} == {psutil.STATUS_STOPPED},
            timeout_seconds=5,
            what="all stopped",
        )
        time.sleep(0.2)
        running.process.send_signal(signal.SIGCONT)
        running.wait_for(lambda: worker.status() != psutil.STATUS_STOPPED, timeout_seconds=5, what="the worker went on")
        running.process.terminate()

    finished = run_ranks(["deepspeed", "t.py"], env=stand_in, timeout_seconds=30, while_running=stop)
    assert finished.returncode == 128 + signal.SIGTERM
