"""A real Slurm of two nodes on this machine, apart from the system's own, all state in one temporary folder.

Each node claims 32 CPUs, 600 GB and 8 GPUs (empty files), as the batch scripts' headers ask for.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.runs import free_port
from tests.toolbox import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "setpriv")
NODES = ("n1", "n2")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE"}
PATH = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"  # Debian's daemons are in sbin

# cred_expire also is how long a requeued job waits before it starts again (120 s by default).
SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdSpoolDir={root}/spool-%n
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdLogFile={root}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
GresTypes=gpu
ReturnToService=2
KillWait=10
SchedulerParameters=sched_interval=2,bf_interval=2
FirstJobId={first_job}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=32 RealMemory=600000 Gres=gpu:8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=32 RealMemory=600000 Gres=gpu:8
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 GraceTime=90
PartitionName=gpu Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """What this machine lacks for a cluster, in words; empty if nothing."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"not installed: {', '.join(absent)} (Debian: apt-get install slurm-wlm munge)" if absent else ""


@dataclass
class Cluster:
    root: Path
    env: dict[str, str]

    def run(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Runs a Slurm client; returns its stdout. Raises with its stderr if it fails."""
        done = subprocess.run(command, cwd=cwd, env=self.env | env, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def sbatch(self, *args: str, cwd: Path, **env: str) -> str:
        """Submits from the folder `cwd`; returns the job id."""
        return self.run("sbatch", "--parsable", *args, cwd=cwd, **env)

    def show(self, job: str) -> dict[str, str]:
        """The job's record: JobState, ExitCode, Restarts, StdOut, ..."""
        record = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(field.split("=", 1) for field in record.split() if "=" in field)

    def wait(self, job: str, timeout: float) -> dict[str, str]:
        """Waits until the job has ended and returns its record; fails after `timeout` seconds."""
        wait_for(lambda: self.show(job)["JobState"] in ENDED, timeout, every=1)
        return self.show(job)


@contextmanager
def local_cluster() -> Iterator[Cluster]:
    """Starts the cluster and stops every process of it afterwards, whatever happens in between."""
    # Not pytest's tmp_path: munged refuses a socket that other users cannot reach.
    root = Path(tempfile.mkdtemp(prefix="slurm-test-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        root.chmod(0o755)
        _write_config(root)
        cluster = Cluster(root, _clean_environment() | {"SLURM_CONF": str(root / "slurm.conf"), "PATH": PATH})
        stack.callback(_kill_jobs, cluster)
        munge = root / "munge"
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        user = ["--reuid=munge", "--regid=munge", "--clear-groups"]
        _daemon(stack, cluster, ["munged", "--foreground", f"--socket={munge}/socket", *files], user)
        wait_for((munge / "socket").exists, 200)
        _daemon(stack, cluster, ["slurmctld", "-D", "-c"])
        for node in NODES:
            _daemon(stack, cluster, ["slurmd", "-D", "-N", node])
        wait_for(lambda: _idle_nodes(cluster) == len(NODES), 600)
        yield cluster


def _write_config(root: Path) -> None:
    for name in ("state", "munge"):
        (root / name).mkdir()
    owner = pwd.getpwnam("munge")
    key = root / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for path in (key, key.parent):
        os.chown(path, owner.pw_uid, owner.pw_gid)
    for i in range(8):
        (root / f"gpu{i}").touch()
    (root / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={root}/gpu[0-7]\n")
    # Job ids decide the runs' rendezvous ports: clusters of two test runs must not count alike.
    first_job = 1 + int.from_bytes(os.urandom(2), "big")
    host = socket.gethostname().split(".")[0]
    ports = [free_port() for _ in range(3)]
    (root / "slurm.conf").write_text(SLURM_CONF.format(root=root, host=host, ports=ports, first_job=first_job))


def _clean_environment() -> dict[str, str]:
    foreign = ("SLURM", "SBATCH", "SRUN", "ACCELERATE_", "LAUNCH", "NUM_GPUS", "NUM_PROCESSES", "MAX_REQUEUES")
    return {key: value for key, value in os.environ.items() if not key.startswith(foreign)}


def _daemon(stack: ExitStack, cluster: Cluster, command: list[str], user: list[str] | None = None) -> None:
    """Starts a daemon in the foreground; it dies with the test process, also if that is killed."""
    command = ["setpriv", *(user or []), "--pdeathsig=TERM", *command]
    quiet = subprocess.DEVNULL  # they have log files
    process = subprocess.Popen(command, env=cluster.env, stdout=quiet, stderr=quiet)
    stack.callback(process.wait)
    stack.callback(process.kill)


def _idle_nodes(cluster: Cluster) -> int:
    command = ["sinfo", "-h", "-N", "-p", "main", "-o", "%T"]
    return subprocess.run(command, env=cluster.env, capture_output=True, text=True).stdout.split().count("idle")


def _kill_jobs(cluster: Cluster) -> None:
    """Ends what still has this cluster's slurm.conf in its environment: slurmstepd, batch scripts, children."""
    mark = f"SLURM_CONF={cluster.root}/".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):  # ended meanwhile
            continue
