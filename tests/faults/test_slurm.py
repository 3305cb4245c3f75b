"""A campaign whose workers are jobs of a real Slurm: one controller, one node, all of it under the test's folder.

Needs Debian's packages slurm-wlm and munge; without their programs the tests fail and say so.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from precision_time.storage.timings import TimingsDataset

pytestmark = [pytest.mark.faults, pytest.mark.slurm]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
WAIT_S = 240

CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,sched_min_interval=100000
KillWait=5
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=4000 State=UNKNOWN
PartitionName=tests Nodes=localhost Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""

CAMPAIGN = """\
name: slurm
models: [mlp]
precisions: [fp32]
gpus: [1, 2]
batch_sizes: [4]
device: cpu
cluster: slurm
slurm: {{partition: tests, memory: 500MB, walltime: "00:10:00", interface: lo}}
data: {data}
warmup_steps: 2
measured_steps: 3
seconds_per_cell: 5s
timeout_per_cell: 2m
"""


def find(program: str) -> str:
    path = shutil.which(program, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))
    assert path, f"{program} is missing; apt-get install slurm-wlm munge"
    return path


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands reach a cluster of this machine alone."""
    programs = {program: find(program) for program in PROGRAMS}
    folder = tmp_path_factory.mktemp("slurm")
    # munged refuses keys and sockets in folders that others may write.
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    port = 20_000 + os.getpid() % 20_000
    text = CONF.format(folder=folder, user=user, port=port, node_port=port + 1, cpus=os.cpu_count() or 1)
    (folder / "slurm.conf").write_text(text)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    with (folder / "daemons.log").open("w") as log:

        def start(*command: str) -> "subprocess.Popen[bytes]":
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

        daemons = [
            start(
                programs["munged"], "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
                f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
            )
        ]  # fmt: skip
        wait_for(lambda: (folder / "munge.socket").exists(), folder)
        daemons.append(start(programs["slurmctld"], "-D", "-c"))
        daemons.append(start(programs["slurmd"], "-D", "-N", "localhost"))
        try:
            wait_for(lambda: b"idle" in answer("sinfo", "-h", "-o", "%T", environment=environment), folder)
            yield environment
        finally:
            answer("scancel", "--full", "--partition", "tests", environment=environment)
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(30)


def answer(*command: str, environment: dict[str, str]) -> bytes:
    return subprocess.run(command, env=environment, capture_output=True, timeout=60).stdout


def wait_for(holds: "object", folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not holds():  # type: ignore[operator]
        said = "".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, said
        time.sleep(0.2)


def test_a_campaign_measures_on_jobs_of_slurm_and_leaves_none(slurm: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN.format(data=json.dumps(str(data))), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "precision_time", "campaign", "campaign.yaml", "--json"],
        cwd=tmp_path, env=slurm | {"PREFECT_HOME": str(tmp_path / "prefect")}, capture_output=True, text=True,
        timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cells_measured"] == 2
    assert len(TimingsDataset(str(data)).recorded_cells()) == 2
    deadline = time.monotonic() + 60
    while answer("squeue", "-h", environment=slurm):
        assert time.monotonic() < deadline, "a job is left"
        time.sleep(0.5)
    assert not list(tmp_path.glob("slurm-*.out"))
    assert list((tmp_path / "scratch").iterdir()) == []
