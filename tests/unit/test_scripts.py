"""What launch/ holds for people to copy: the commands that its scripts run, and the fields of its manifests.

launch/slurm.sbatch is run by a real Slurm in tests/cluster, launch/one-machine is tested beside launch/setup.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsframe.config import load
from dsframe.train import parse
from tests.processes import REPOSITORY

MANIFESTS = REPOSITORY / "launch" / "kubernetes"


def said(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a script runs, with stand-ins that say how they were called."""
    shutil.copytree(REPOSITORY / "launch", tmp_path / "launch")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    for name in ("dsframe", "mpirun"):
        (programs / name).write_text('#!/bin/sh\necho "$(basename "$0") $*; $MASTER_ADDR:$MASTER_PORT"\n')
        (programs / name).chmod(0o755)
    return subprocess.run(
        [tmp_path / "launch" / script, *arguments],
        cwd=tmp_path,
        env=os.environ | {"MASTER_ADDR": "here", "MASTER_PORT": "1234"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_many_machines(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    done = said(tmp_path, "many-machines", "hosts", "--config", "x.json", "--set", "a=1")
    assert done.stdout == "dsframe launch --hostfile hosts --restarts 10 --config x.json --set a=1; here:1234\n", done


def test_mpi(tmp_path: Path) -> None:
    done = said(tmp_path, "mpi", "4", "--config", "x.json", "--", "--hostfile", "hosts")
    exported = "-x MASTER_ADDR -x MASTER_PORT -x PATH"
    as_root = "--allow-run-as-root " * (os.getuid() == 0)
    assert done.stdout == (
        f"mpirun -np 4 {as_root}--bind-to none --oversubscribe {exported} --hostfile hosts "
        "python -m dsframe.train --config x.json; here:1234\n"
    ), done


@pytest.mark.parametrize(("script", "usage"), [("many-machines", "HOSTFILE"), ("mpi", "PROCESSES")])
def test_without_arguments_they_say_how(script: str, usage: str, tmp_path: Path) -> None:
    done = said(tmp_path, script)
    assert done.returncode == 2
    assert f"launch/{script} {usage} --config" in done.stderr
    assert "set -euo" not in done.stderr


@pytest.mark.parametrize("script", ["many-machines", "mpi", "slurm.sbatch", "one-machine", "setup"])
def test_scripts_are_bash(script: str) -> None:
    path = REPOSITORY / "launch" / script
    subprocess.run(["bash", "-n", path], check=True, timeout=30)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")


def test_slurm_reads_its_options() -> None:
    """Only in comments right at the top does sbatch look for them."""
    lines = (REPOSITORY / "launch" / "slurm.sbatch").read_text().splitlines()
    top = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    asked = " ".join(line.removeprefix("#SBATCH ") for line in top if line.startswith("#SBATCH "))
    assert {"--requeue", "--signal=USR1@120", "--open-mode=append"} <= set(asked.split())


# The operators' own schemas, as far as these manifests use them. Sources: the CustomResourceDefinitions of kubeflow/mpi-operator
# 0.8.2 and kubeflow/training-operator 1.9.0; Kubernetes' PodSpec. A tuple names the values that are allowed, a type what is held.
POLICY = {"cleanPodPolicy": ("None", "Running", "All"), "backoffLimit": int, "activeDeadlineSeconds": int}
CONTAINER = {
    "name": str, "image": str, "workingDir": str, "command": [str], "args": [str],
    "env": [{"name": str, "value": str}],
    "resources": {"limits": {"nvidia.com/gpu": int, "cpu": int, "memory": str}},
    "volumeMounts": [{"name": str, "mountPath": str}],
}  # fmt: skip
POD = {
    "spec": {
        "terminationGracePeriodSeconds": int,
        "containers": [CONTAINER],
        "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str}}],
    }
}
REPLICAS = {"replicas": int, "restartPolicy": ("Never", "OnFailure", "Always", "ExitCode"), "template": POD}
SCHEMAS: dict[str, dict[str, Any]] = {
    "mpijob.yaml": {
        "apiVersion": ("kubeflow.org/v2beta1",),
        "kind": ("MPIJob",),
        "metadata": {"name": str},
        "spec": {
            "slotsPerWorker": int,
            "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
            "runPolicy": POLICY,
            "mpiReplicaSpecs": {"Launcher": REPLICAS, "Worker": REPLICAS},
        },
    },
    "pytorchjob.yaml": {
        "apiVersion": ("kubeflow.org/v1",),
        "kind": ("PyTorchJob",),
        "metadata": {"name": str},
        "spec": {
            "nprocPerNode": str,
            "runPolicy": POLICY,
            "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS},
        },
    },
}


NODE = {key: value for key, value in CONTAINER.items() if key not in ("command", "args", "resources")}
RUNTIME = {
    "apiVersion": ("trainer.kubeflow.org/v1alpha1",),
    "kind": ("TrainingRuntime",),
    "metadata": {"name": str, "labels": {"trainer.kubeflow.org/framework": ("torch",)}},
    "spec": {
        "mlPolicy": {"numNodes": int, "torch": {}},
        "template": {
            "spec": {
                "failurePolicy": {"maxRestarts": int},
                "replicatedJobs": [
                    {
                        "name": ("node",),
                        "template": {
                            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": ("trainer",)}},
                            "spec": {"template": {"spec": {**POD["spec"], "containers": [NODE]}}},
                        },
                    }
                ],
            }
        },
    },
}
TRAIN_JOB = {
    "apiVersion": ("trainer.kubeflow.org/v1alpha1",),
    "kind": ("TrainJob",),
    "metadata": {"name": str},
    "spec": {
        "runtimeRef": {"apiGroup": str, "kind": ("TrainingRuntime", "ClusterTrainingRuntime"), "name": str},
        "trainer": {
            "numNodes": int, "numProcPerNode": int, "command": [str], "args": [str],
            "resourcesPerNode": {"limits": {"nvidia.com/gpu": int, "cpu": int, "memory": str}},
        },
    },
}  # fmt: skip
"""Kubeflow Trainer v2's, as far as they are used. Volumes are in the runtime: how a job overrides them is another field in each
release."""


def differences(value: Any, schema: Any, where: str = "") -> list[str]:
    """Where a manifest is not what the schema says."""
    if isinstance(schema, tuple):
        return [] if value in schema else [f"{where}: {value!r} is none of {schema}"]
    if isinstance(schema, type):
        return [] if type(value) is schema else [f"{where}: {value!r} is no {schema.__name__}"]
    if isinstance(schema, list):
        entries = value if isinstance(value, list) else [value]
        return [
            text for number, entry in enumerate(entries) for text in differences(entry, schema[0], f"{where}[{number}]")
        ]
    unknown = [f"{where}.{key}: unknown" for key in value if key not in schema]
    return unknown + [
        text for key in value if key in schema for text in differences(value[key], schema[key], f"{where}.{key}")
    ]


def test_a_wrong_manifest_would_be_found() -> None:
    wrong = {"kind": "MPIJobs", "spec": {"slotsPerWorkers": 4, "runPolicy": {"backoffLimit": "10"}}}
    assert len(differences(wrong, SCHEMAS["mpijob.yaml"])) == 3


@pytest.mark.parametrize("name", SCHEMAS)
def test_manifests(name: str) -> None:
    manifest = yaml.safe_load((MANIFESTS / name).read_text())
    assert differences(manifest, SCHEMAS[name]) == []
    replicas = next(value for key, value in manifest["spec"].items() if key.endswith("ReplicaSpecs"))
    pods = {role: part["template"]["spec"] for role, part in replicas.items()}
    for pod in pods.values():
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
    first = pods.get("Launcher", pods.get("Master"))
    assert first
    (container,) = first["containers"]
    words = [*container["command"], *container["args"]]
    training = parse(words[words.index("dsframe.train") + 1 :])
    load(training.config, overrides=training.set)
    assert training.resume == "auto"
    assert any(training.run_dir.startswith(mount["mountPath"]) for mount in container["volumeMounts"])


def test_the_mpi_job_starts_as_many_processes_as_its_workers_have() -> None:
    spec = yaml.safe_load((MANIFESTS / "mpijob.yaml").read_text())["spec"]
    words = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
    workers = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert int(words[words.index("-np") + 1]) == workers * spec["slotsPerWorker"]


def test_no_target_of_make_is_taken_for_a_file() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):", text, re.MULTILINE)
    assert len(targets) > 10
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert sorted(phony.split()) == sorted(targets)


def test_a_train_job_of_kubeflow_trainer() -> None:
    runtime, job = yaml.safe_load_all((MANIFESTS / "trainjob.yaml").read_text())
    assert differences(runtime, RUNTIME) == []
    assert differences(job, TRAIN_JOB) == []
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    assert job["spec"]["trainer"]["command"] == ["torchrun", "-m", "dsframe.train"]
    options = parse(job["spec"]["trainer"]["args"])
    assert options.resume == "auto"
    load(options.config)
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
