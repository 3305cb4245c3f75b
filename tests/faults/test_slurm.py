"""A campaign whose workers are jobs of a real Slurm: one controller, one node, all of it under the test's folder.

Needs Debian's packages slurm-wlm and munge; without their programs the tests fail and say so.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from precision_time.flows.clusters.cluster import open_cluster
from precision_time.flows.clusters.settings import SlurmOptions
from precision_time.storage.timings import TimingsDataset

DEPLOY = Path(__file__).parents[2] / "deploy"

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
slurm: {{partition: tests, workers_per_job: 2, memory: 500MB, walltime: "00:10:00", interface: lo}}
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


def wait_for(condition: "object", folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        logs = "".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, logs
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


def test_a_cell_that_is_wider_than_a_job_is_refused_and_no_job_is_submitted(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    text = CAMPAIGN.format(data=json.dumps(str(tmp_path / "data"))).replace("workers_per_job: 2, ", "")
    (tmp_path / "campaign.yaml").write_text(text, encoding="utf-8")
    before = submitted(slurm)
    done = subprocess.run(
        [sys.executable, "-m", "precision_time", "campaign", "campaign.yaml", "--json"],
        cwd=tmp_path, env=slurm | {"PREFECT_HOME": str(tmp_path / "prefect")}, capture_output=True, text=True,
        timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stderr.splitlines()[-1])
    assert (error["code"], error["got"]) == ("E-INPUT", "gpus: 2; slurm.workers_per_job: 1")
    assert submitted(slurm) == before


def test_the_workers_of_a_job_share_its_host_and_its_cores(
    slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    options = SlurmOptions(partition="tests", workers_per_job=2, memory="300MB", walltime="00:05:00", interface="lo")
    before = submitted(slurm)
    # Three workers are two jobs, so there are four.
    with open_cluster("cpu", 3, cluster="slurm", slurm=options, wait_s=WAIT_S) as client:
        client.wait_for_workers(4, timeout=WAIT_S)
        jobs = sorted(client.run(os.getenv, "SLURM_JOB_ID").values())
        assert len(jobs) == 4
        assert jobs[0] == jobs[1] != jobs[2] == jobs[3]
        assert {worker["nthreads"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()} == {1}
        shown = answer("scontrol", "--oneliner", "show", "job", jobs[0], environment=slurm).decode()
        assert "NumTasks=1 CPUs/Task=2 " in shown
        assert "MinMemoryNode=573M" in shown  # 600 MB
        assert submitted(slurm) - before == 2


def submitted(slurm: dict[str, str]) -> int:
    """How many jobs there have been."""
    shown = answer("scontrol", "--oneliner", "show", "job", environment=slurm).decode()
    return max((int(line.split("JobId=")[1].split()[0]) for line in shown.splitlines() if "JobId=" in line), default=0)


def submit(slurm: dict[str, str], folder: Path, *, changes: dict[str, str] | None = None, **settings: str) -> str:
    """Submit the batch script for the campaign with ``changes`` of its lines; returns the number of the job."""
    values = dict(line.split(": ", 1) for line in CAMPAIGN.format(data="data").splitlines()) | (changes or {})
    text = "".join(f"{key}: {value}\n" for key, value in values.items() if key not in ("cluster", "slurm"))
    (folder / "campaign.yaml").write_text(text, encoding="utf-8")
    environment = slurm | {
        "VENV": sys.prefix, "WORKERS": "2", "INTERFACE": "lo", "PREFECT_HOME": str(folder / "prefect"), **settings,
    }  # fmt: skip
    command = ["sbatch", "--parsable", "--nodes", "1", DEPLOY / "slurm" / "campaign.sbatch", "campaign.yaml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def job_end(slurm: dict[str, str], job: str, log: Path) -> str:
    """The exit code of a job that Slurm has ended."""
    deadline = time.monotonic() + WAIT_S
    while True:
        shown = answer("scontrol", "--oneliner", "show", "job", job, environment=slurm).decode()
        fields = dict(field.split("=", 1) for field in shown.split() if "=" in field)
        if fields.get("JobState") not in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}:
            return fields["ExitCode"].split(":")[0]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.5)


def test_the_batch_script_measures_in_one_allocation_and_leaves_nothing_running(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    subprocess.run([DEPLOY / "make_certificates.sh", tmp_path / "tls"], check=True, capture_output=True)
    words = shlex.split((tmp_path / "tls" / "tls.sh").read_text(encoding="utf-8"))
    tls = dict(word.split("=", 1) for word in words if word != "export")
    job = submit(slurm, tmp_path, PROTOCOL="tls", **tls)
    log = tmp_path / f"precision-time-{job}.log"
    assert job_end(slurm, job, log) == "0", log.read_text(errors="replace")[-3000:]
    log_text = log.read_text(errors="replace")
    assert "tls://127.0.0.1" in log_text
    assert "tcp://" not in log_text
    assert "Traceback" not in log_text
    assert "workers started within" not in log_text  # all of them were there before the campaign
    assert len(TimingsDataset(str(tmp_path / "data")).recorded_cells()) == 2
    assert not list(tmp_path.glob("scheduler-*.json"))
    # nothing of the job is left: Slurm sets the variable for every process of it
    assert not [
        process.pid for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("SLURM_JOB_ID") == job
        and process.info["environ"].get("PREFECT_HOME") == str(tmp_path / "prefect")
    ]  # fmt: skip


@pytest.mark.long
def test_the_signal_before_the_time_is_up_ends_the_batch_script_after_the_cell_under_way(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    # Cells that measure until their time is up.
    job = submit(slurm, tmp_path, changes={"seconds_per_cell": "15s", "measured_steps": "10000", "batch_sizes": "[64]"})
    log = tmp_path / f"precision-time-{job}.log"
    deadline = time.monotonic() + WAIT_S
    while not (under_way := list(tmp_path.glob("scratch/*/*/rank-0.log"))):
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.1)
    answer("scancel", "--batch", "--signal", "INT", job, environment=slurm)
    time.sleep(5)
    # The rank goes on for as long as its cell takes.
    assert len(list(tmp_path.glob("scratch/*/*/rank-0.log"))) == len(under_way) == 1
    assert TimingsDataset(str(tmp_path / "data")).recorded_cells() == set()
    code = job_end(slurm, job, log)
    recorded = len(TimingsDataset(str(tmp_path / "data")).recorded_cells())
    assert (code, recorded) == ("130", 1), log.read_text(errors="replace")[-3000:]
    assert "interrupted" in log.read_text(errors="replace")
