"""Who am I: every launcher's variables, and environments that contradict themselves."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dsframe.cluster import world
from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.errors import ConfigError, WorldError
from dsframe.run import _signals_restored, choose, settle_threads
from tests.files import ds_config

# As the launchers set them on the second of two hosts with two processes each (measured), less what is not read.
ENVIRONMENTS = {
    "torchrun": {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "node1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "none",
    },
    "deepspeed": {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
        "MASTER_ADDR": "node1", "MASTER_PORT": "29511",
    },
    "horovodrun": {
        "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
    },
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "srun": {
        "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0",
    },
}  # fmt: skip


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_each_launcher_is_understood(launcher):
    found = world.read(ENVIRONMENTS[launcher])
    assert found.launcher == launcher
    assert (found.rank, found.size, found.local_rank, found.local_size, found.node) == (3, 4, 1, 2, 1)
    assert not found.is_main


def test_hydra_names_of_mpich_and_intel_mpi():
    found = world.read({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert found == World(1, 2, 1, 2, 0, "mpirun")
    with pytest.raises(WorldError, match="MPI_LOCALNRANKS is not set, though the launcher's other variables are"):
        world.read({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"})


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "PMI_SIZE=4"),
        ({"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}, "PALS_LOCAL_SIZE=2"),
    ],
)
def test_one_of_many_processes_of_an_unknown_launcher_does_not_train_alone(variables, named):
    with pytest.raises(WorldError, match=rf"^{named} says .* export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"):
        world.read(variables)
    for size in ("1", "0"):  # Slurm's PMI has 0 outside of a step
        assert world.read({"PMI_RANK": "0", "PMI_SIZE": size}) == World()


# The least that torch's env:// needs, on the second of two hosts with two processes each.
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29511"}


def test_variables_set_by_hand_within_srun_are_sruns():
    """``RANK=$SLURM_PROCID`` and its like say nothing new, and not how many processes a host has."""
    given = ENVIRONMENTS["srun"] | BY_HAND | {"MASTER_ADDR": "node9"}
    assert world.read(given) == World(3, 4, 1, 2, 1, "srun", "node9", 29511)
    steps = [world.read(ENVIRONMENTS["srun"] | {"SLURM_STEP_ID": step}) for step in "01"]
    assert steps[0].master_address == "node1"
    assert steps[0].master_port != steps[1].master_port


def test_variables_set_by_hand_may_be_those_of_several_hosts():
    with pytest.raises(WorldError, match=r"^LOCAL_WORLD_SIZE is not set, and MASTER_ADDR=node1 may be another host"):
        world.read(BY_HAND)
    # Slurm's say something else: its tasks are not the processes of this run.
    with pytest.raises(WorldError, match=r"^LOCAL_WORLD_SIZE is not set"):
        world.read(ENVIRONMENTS["srun"] | BY_HAND | {"WORLD_SIZE": "8"})
    for address in ("localhost", "127.0.0.1", "::1"):
        assert world.read(BY_HAND | {"LOCAL_RANK": "3", "MASTER_ADDR": address}).local_size == 4
    assert world.read(BY_HAND | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).local_size == 1
    assert world.read(BY_HAND | {"LOCAL_WORLD_SIZE": "2"}).node == 1
    assert world.read({"RANK": "1", "WORLD_SIZE": "2"}).local_rank == 1


def test_horovodrun_over_mpi_is_horovodrun():
    """Where Horovod was built with MPI, horovodrun starts mpirun; who types horovodrun still wants Horovod."""
    options = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib", "OMPI_MCA_orte_tag_output": "1"}
    found = world.read({**ENVIRONMENTS["mpirun"], **options})
    assert (found.launcher, found.rank, found.size) == ("horovodrun", 3, 4)
    assert world.read({**ENVIRONMENTS["mpirun"], "OMPI_MCA_pml": "ob1"}).launcher == "mpirun"


def test_elastic_horovodrun_is_refused():
    variables = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "2"}
    assert world.read(variables).size == 2
    with pytest.raises(WorldError, match=r"--min-np.* not supported.*dsframe launch --restarts"):
        world.read({**variables, "HOROVOD_ELASTIC": "1"})


def test_no_launcher_is_one_process():
    assert world.read({}) == World()
    # Inside an sbatch script, before srun: the allocation's variables alone start nobody.
    assert world.read({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) == World()


@pytest.mark.parametrize("inner", ["torchrun", "deepspeed", "horovodrun", "mpirun"])
def test_a_launcher_inside_srun_wins(inner):
    assert world.read({**ENVIRONMENTS["srun"], **ENVIRONMENTS[inner]}).launcher == inner


def test_a_process_keeps_its_place_whatever_engines_set(monkeypatch):
    assert world.read(ENVIRONMENTS["torchrun"] | {"LOCAL_SIZE": "2"}).launcher == "torchrun"
    before = world.here()
    monkeypatch.setenv("RANK", "7")
    assert world.here() is before


def test_two_launchers_at_once_are_named():
    with pytest.raises(WorldError, match=r"deepspeed \(RANK=3\) and horovodrun \(HOROVOD_RANK=3\)"):
        world.read({**ENVIRONMENTS["deepspeed"], **ENVIRONMENTS["horovodrun"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"LOCAL_WORLD_SIZE": "8"}, "local rank 1 of 8"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four' is not an integer"),
    ],
)
def test_numbers_that_do_not_fit_are_named(change, message):
    with pytest.raises(WorldError, match=message):
        world.read({**ENVIRONMENTS["torchrun"], **change})


@pytest.mark.parametrize(("layout", "node", "tasks"), [("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("1,4(x2)", 1, 4)])
def test_slurm_layouts(layout, node, tasks):
    assert world.slurm_tasks(layout)[node] == tasks


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("node[03-05,9],gpu1", ["node03", "node04", "node05", "node9", "gpu1"]),
        ("a,n[9-10]-ib", ["a", "n9-ib", "n10-ib"]),
        ("rack[0-1]node[1-2],x", ["rack0node1", "rack0node2", "rack1node1", "rack1node2", "x"]),
        ("[1-2]n", ["1n", "2n"]),
        ("", []),
    ],
)
def test_slurm_node_lists(nodes, hosts):
    assert world.slurm_hosts(nodes) == hosts


@pytest.mark.parametrize("nodes", ["node[1-2", "node[a-b]", "node[1-]", "node[]", "a,,b", "a,", "n[1[2-3]]", "a b"])
def test_what_is_no_slurm_node_list_is_refused(nodes):
    with pytest.raises(WorldError, match="is not a list of hosts in Slurm's form"):
        world.slurm_hosts(nodes)


@pytest.mark.parametrize(
    ("local_size", "launcher", "variables", "written", "threads"),
    [
        (4, "torchrun", {}, None, 2),  # of the host, whose other ranks are elsewhere
        (64, "torchrun", {"OMP_NUM_THREADS": "2"}, None, 2),
        (64, "torchrun", {"OMP_NUM_THREADS": "2"}, 3, 3),
        (1, "torchrun", {"OMP_NUM_THREADS": "3,2"}, None, 3),  # OpenMP's form for nested regions
        # srun --cpus-per-task=8 has shared the cores out before, unless it binds nobody and all are still there.
        (4, "srun", {"SLURM_CPUS_PER_TASK": "8"}, None, 8),
        (4, "srun", {"SLURM_CPUS_PER_TASK": "2"}, None, 2),
        (4, "torchrun", {"SLURM_CPUS_PER_TASK": "8"}, None, 2),  # of a task that is a whole host
    ],
)
def test_threads_are_shared_among_the_ranks_of_a_host(local_size, launcher, variables, written, threads, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for name, value in {"OMP_NUM_THREADS": "", **variables}.items():
        monkeypatch.setenv(name, value)  # restored afterwards, whatever the call sets
    assert settle_threads(World(0, 64, 0, local_size, launcher=launcher), written) == threads
    assert settle_threads(World(0, 64, 0, 64), None) == threads, "what is set by now holds"


def test_a_number_of_threads_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(WorldError, match="OMP_NUM_THREADS='many'"):
        settle_threads(World(), None)


def test_a_thread_may_train_though_it_sets_no_handlers_of_signals():
    def run():
        with _signals_restored():
            return True

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result()


def test_a_missing_package_is_said_before_the_engine_is_chosen(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load(ds_config(4, "SGD", 0.1, sections={"wandb": {"enabled": True}}, engine="single"))
    with pytest.raises(ConfigError, match="needs the package wandb"):
        choose(config, World())
