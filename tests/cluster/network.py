"""Two hosts on one machine: network namespaces with a cable between them, each with a name and an ssh server of its own.

    with Network(folder) as network:
        run_ranks(network.on("node1", ["horovodrun", "-np", "2", "-H", "node1:1,node2:1", ...]))

They share the file system, as hosts of a cluster do. Everything is in ``folder`` and in the namespaces, which go away afterwards.
"""

import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

NODES = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
INTERFACE = "eth0"  # Horovod wants one name on all hosts

# Enters a namespace with a host name, an /etc/hosts and an ssh configuration of its own. Not by `ip netns exec`: that mounts
# /sys anew, without the control groups that slurmd looks for.
ENTER = 'set -e; hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/ssh" /etc/ssh; shift 2; exec "$@"'

SSH_CLIENT = """
Host *
  IdentityFile {folder}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
SSH_SERVER = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/sshd-{node}.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""


@functools.cache
def missing():
    """Why there can be no such network here; empty where there can: one has been made, and its hosts have reached each other."""
    if os.getuid() != 0:
        return "network namespaces need root"
    packages = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "nsenter": "util-linux"}
    lacking = [package for command, package in packages.items() if not shutil.which(command, path=_path())]
    if lacking:
        return f"apt-get install {' '.join(lacking)}"
    try:
        with tempfile.TemporaryDirectory() as folder, Network(Path(folder, "probe")) as network:
            # The server listens a moment after its command has returned.
            _call(*network.on("node1", ["ssh", "-o", "ConnectionAttempts=10", "-o", "BatchMode=yes", "node2", "true"]))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"there can be no two hosts on this machine: {error}"
    return ""


def _path():
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class Network:
    """Two hosts, while it is entered."""

    def __init__(self, folder):
        self.folder = folder
        self._names = {node: f"dsframe-{os.getpid()}-{node}" for node in NODES}

    def __enter__(self):
        folder = self.folder
        (folder / "ssh").mkdir(parents=True)
        folder.chmod(0o700)
        for key in ("key", "host_key"):
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        shutil.copy(folder / "key.pub", folder / "authorized_keys")
        (folder / "ssh" / "ssh_config").write_text(SSH_CLIENT.format(folder=folder))
        lines = ["127.0.0.1 localhost", *(f"{address} {node}" for node, address in NODES.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        Path("/run/sshd").mkdir(exist_ok=True)
        try:
            self._wire()
            for node, address in NODES.items():
                config = folder / f"sshd-{node}.conf"
                config.write_text(SSH_SERVER.format(folder=folder, node=node, address=address))
                sshd = shutil.which("sshd", path=_path()) or "sshd"
                _call(*self.on(node, [sshd, "-f", str(config), "-E", str(folder / f"sshd-{node}.log")]))
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind, error, trace):
        self._remove()

    def on(self, node, command):
        """The command that runs ``command`` on a host."""
        namespace = f"--net=/run/netns/{self._names[node]}"
        return [
            "nsenter",
            namespace,
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            ENTER,
            "sh",
            node,
            str(self.folder),
            *command,
        ]

    def cut(self, node="node2"):
        """Takes a host's end of the cable down: what is sent is lost, and nobody is told."""
        _call("ip", "-n", self._names[node], "link", "set", INTERFACE, "down")

    def mend(self, node="node2"):
        """Puts it up again."""
        _call("ip", "-n", self._names[node], "link", "set", INTERFACE, "up")

    def processes(self, node):
        """What runs on a host, its ssh servers aside."""
        listed = _call("ip", "netns", "pids", self._names[node]).split()
        return [int(pid) for pid in listed if "sshd" not in _command(int(pid))]

    def _wire(self):
        for name in self._names.values():
            _call("ip", "netns", "add", name)
        first, second = self._names.values()
        _call("ip", "-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for node, name in self._names.items():
            _call("ip", "-n", name, "addr", "add", f"{NODES[node]}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _call("ip", "-n", name, "link", "set", device, "up")

    def _remove(self):
        for name in self._names.values():
            if not Path("/run/netns", name).exists():
                continue
            limit = time.monotonic() + 10
            while (pids := _call("ip", "netns", "pids", name).split()) and time.monotonic() < limit:
                for pid in pids:
                    with_kill(int(pid))
                time.sleep(0.05)
            _call("ip", "netns", "del", name)


def with_kill(pid):
    """Ends one of the namespace's processes, all of which are ours."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return "sshd, gone meanwhile"


def _call(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
