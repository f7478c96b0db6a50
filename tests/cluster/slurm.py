"""Slurm on the two hosts of a network: a controller, two compute nodes and munge, all in the network's folder."""

import os
import shutil
import subprocess
import time

from tests.cluster.network import NODES

# A job that is preempted is requeued after its grace time. A job in the queue again may start after cred_expire seconds.
CONFIG = """
ClusterName=dsframe
SlurmctldHost=node1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=node[1-2] PriorityTier=9 PreemptMode=OFF State=UP
"""
# By itself slurmd looks for control groups that it may write, and for systemd, even where no plugin above uses either. The
# plugin for the old ones looks for nothing before it is used.
CGROUPS = """
CgroupPlugin=cgroup/v1
CgroupAutomount=no
IgnoreSystemd=yes
"""
COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
READY_SECONDS = 30.0


def missing():
    """Which package lacks; empty where none does."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
    lacking = [command for command in COMMANDS if not shutil.which(command, path=path)]
    return f"no {', '.join(lacking)}: apt-get install slurm-wlm munge" if lacking else ""


class DoesNotStartError(RuntimeError):
    """This machine has Slurm's programs, and something that keeps them from running."""


class Slurm:
    """A cluster of two nodes, while it is entered."""

    def __init__(self, network, folder):
        self._network, self._folder = network, folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        folder = self._folder
        (folder / "state").mkdir(parents=True)
        nodes = [f"NodeName={node} NodeAddr={address} CPUs=4 State=UNKNOWN" for node, address in NODES.items()]
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, nodes="\n".join(nodes)))
        (folder / "cgroup.conf").write_text(CGROUPS)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        munged = ["munged", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
        munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        try:
            self.call("node1", *munged)
            self.call("node1", "slurmctld")
            for node in NODES:
                self.call(node, "slurmd")
            limit = time.monotonic() + READY_SECONDS
            while self.call("node1", "sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() != ["idle"] * len(NODES):
                if time.monotonic() > limit:
                    raise RuntimeError(f"its nodes are not idle after {READY_SECONDS:.0f} s")
                time.sleep(0.2)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise DoesNotStartError(
                f"Slurm does not start here: {str(error).splitlines()[0]}{self._last_words()}"
            ) from error
        return self

    def __exit__(self, kind, error, trace):
        """Nothing to do: everything runs on the network's hosts and ends with them."""

    def _last_words(self):
        """The last line of each daemon's log."""
        logs = {path.name: path.read_text(errors="replace").splitlines() for path in sorted(self._folder.glob("*.log"))}
        return "".join(f"; {name}: {lines[-1]}" for name, lines in logs.items() if lines)

    def submit(self, *options, folder, environment):
        """``sbatch`` from the first host; the job's number."""
        return self.call("node1", "sbatch", "--parsable", *options, cwd=folder, environment=environment).strip()

    def state(self, job):
        """What ``scontrol`` says about a job, such as JobState, Restarts, ExitCode."""
        words = self.call("node1", "scontrol", "-o", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def call(self, node, *command, cwd=None, environment=None):
        """Runs a command on a host of the cluster; what it printed."""
        variables = (environment or dict(os.environ)) | self.environment
        variables["PATH"] += os.pathsep + "/usr/sbin"
        done = subprocess.run(
            self._network.on(node, command),
            cwd=cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
        return done.stdout
