"""The Dask cluster of a campaign: local workers, a running scheduler, or jobs of Slurm."""

import contextlib
import importlib.metadata
import os
import shutil
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dask
from dask.utils import parse_bytes
from distributed import Client, LocalCluster

from precision_time.flows.clusters.device_claims import claim_devices
from precision_time.flows.clusters.local_gpus import name_devices
from precision_time.flows.clusters.settings import DASK_SETTINGS, SlurmOptions, is_address, is_local
from precision_time.storage.errors import InputError, NoWorkersError, PrecisionTimeError
from precision_time.tasks.gangs.leases import install_gangs, lease_workers
from precision_time.tasks.probing.probe_device import ProbeReport, probe_device
from precision_time.tasks.processes.rank_process import visible_devices

__all__ = ["Client", "check_scratch", "open_cluster", "probe_cluster", "probe_worker"]

#: How long local workers may take to appear.
LOCAL_WAIT_S = 120.0
CONNECT_S = 30.0
PROBE_S = 300.0
PACKAGE = "precision-time"


@contextlib.contextmanager
def open_cluster(
    device_type: str,
    workers: int,
    *,
    cluster: str = "auto",
    slurm: SlurmOptions | None = None,
    wait_s: float = LOCAL_WAIT_S,
) -> Iterator[Client]:
    """A client of a cluster of at least ``workers`` single-threaded workers, closed at the end of the block.

    ``device_type`` is ``cpu``, ``cuda``, or ``auto`` where the workers are not ours. ``cluster`` is ``local`` (CPU
    workers of this machine), ``local-cuda`` (dask-cuda: each worker sees its own GPU first), ``auto`` (whichever of
    these fits ``device_type``), ``slurm`` (batch jobs with the options ``slurm``), or the address of a running
    scheduler. A cluster started here listens on the loopback address only, Slurm's on the network. A local cluster
    locks its devices. Raises ``InputError`` when the cluster does not fit the device, lacks a package or has unsuitable
    settings, or when another cluster holds the devices; ``NoWorkersError`` when fewer workers appear within ``wait_s``.
    """
    settings = dict(DASK_SETTINGS) | {"logging.distributed": "critical"}
    settings |= {} if device_type == "cuda" else {"distributed.diagnostics.nvml": False}
    with dask.config.set(settings), _restored_environment(), contextlib.ExitStack() as stack:
        with _blocked_interrupts():
            if is_address(cluster):
                client = stack.enter_context(_connect(cluster))
            else:
                if cluster == "slurm":
                    started = _start_slurm(device_type, workers, slurm)
                else:
                    stack.enter_context(claim_devices(name_devices(device_type, count=workers)))
                    started = _start_local(device_type, workers, cluster)
                client = stack.enter_context(Client(stack.enter_context(started)))
        if is_address(cluster):
            _check_scheduler(client)
        _await_workers(client, workers, wait_s=wait_s)
        if not is_local(cluster):
            _check_workers(client, device_type=device_type)
        install_gangs(client)
        yield client


@contextlib.contextmanager
def _restored_environment() -> Iterator[None]:
    """Undo Dask's changes to the environment: it sets one thread for its local workers in this process as well."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _start_local(device_type: str, workers: int, cluster: str) -> Any:
    if (cluster, device_type) in {("local", "cuda"), ("local-cuda", "cpu")}:
        raise InputError(
            "the cluster does not fit the device",
            got=f"cluster: {cluster} for device: {device_type}",
            expected="local with cpu, local-cuda with cuda, or auto",
        )
    options: dict[str, Any] = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "host": "127.0.0.1",
        "dashboard_address": None,
        # Without it the scheduler opens a fixed HTTP port, and a second campaign warns that the port is taken.
        "scheduler_kwargs": {"dashboard_address": "127.0.0.1:0"},
        "silence_logs": "CRITICAL",
    }
    if device_type != "cuda":
        return LocalCluster(processes=True, memory_limit=None, **options)
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise InputError(
            "dask-cuda is needed to run on GPUs and does not import",
            got=error,
            expected="the extra gpu-cu12 or gpu-cu13",
            fix="pip install 'precision-time[gpu-cu12]'",
        ) from error
    # The GPUs are those of CUDA_VISIBLE_DEVICES, else all. The worker itself must not use their memory (a pool, a
    # cache): all of it is for the rank that it starts.
    return LocalCUDACluster(device_memory_limit=None, memory_limit=None, protocol="tcp", **options)


def _start_slurm(device_type: str, workers: int, options: SlurmOptions | None) -> Any:
    if device_type == "cuda":
        # NCCL on one host needs to see its peers' GPUs, and Slurm confines each job to its own GPU.
        raise InputError(
            "cluster: slurm starts CPU workers only",
            got="device: cuda",
            expected="one allocation that runs dask cuda worker, and its scheduler's address as cluster",
            fix="start from deploy/slurm/campaign.sbatch",
        )
    try:
        from dask_jobqueue.slurm import SLURMCluster
    except ImportError as error:
        raise InputError(
            "dask-jobqueue is needed for cluster: slurm and does not import",
            got=error,
            expected="the extra slurm",
            fix="pip install 'precision-time[slurm]'",
        ) from error
    if shutil.which("sbatch") is None:
        raise InputError("this machine has no Slurm", got="no command sbatch", expected="a host that can submit jobs")
    options = options or SlurmOptions.model_validate({})
    per_job = options.workers_per_job
    return SLURMCluster(
        # Workers come in whole jobs; "cores" are Dask's threads, one per worker.
        n_workers=workers,
        cores=per_job,
        processes=per_job,
        job_cpu=per_job * options.cpus,
        memory=f"{per_job * _read_memory(options.memory)}B",
        walltime=options.walltime,
        queue=options.partition,
        account=options.account,
        interface=options.interface,
        job_name="precision-time",
        # Without it each job leaves a slurm-<n>.out in the folder where the campaign was started.
        job_extra_directives=["--output=/dev/null", *options.directives],
        scheduler_options={"dashboard_address": "127.0.0.1:0"},
        silence_logs="CRITICAL",
    )


def _read_memory(text: str) -> int:
    try:
        return int(parse_bytes(text))
    except ValueError as error:
        raise InputError("slurm.memory is not a size", got=repr(text), expected="bytes of one worker: 8GB") from error


def _connect(address: str) -> Client:
    try:
        return Client(address, timeout=CONNECT_S)
    except TypeError as error:  # Dask's answer to tls:// without certificates
        raise InputError(
            "the cluster requires TLS, and no certificate is set",
            got=f"{address}: {error}",
            expected="DASK_DISTRIBUTED__COMM__TLS__CA_FILE, CLIENT__CERT and CLIENT__KEY",
            fix="deploy/make_certificates.sh; see deploy/README.md",
        ) from error
    except (OSError, TimeoutError, ValueError) as error:
        raise InputError(
            "no scheduler answers at the cluster's address",
            got=f"{address}: {error}",
            expected="a running dask scheduler of the same Dask release",
            fix="dask scheduler; see deploy/README.md",
        ) from error


def _await_workers(client: Client, workers: int, *, wait_s: float) -> None:
    try:
        client.wait_for_workers(workers, timeout=wait_s)
    except TimeoutError as error:
        raise NoWorkersError(
            "too few workers of the cluster appeared",
            got=f"{len(client.scheduler_info(n_workers=-1)['workers'])} of {workers} within {wait_s:g} s",
            expected="a worker for every rank of the widest cell",
            fix="start more workers, wait longer (workers_timeout), or leave the wide cells out of gpus",
        ) from error


def _check_scheduler(client: Client) -> None:
    """Refuse a scheduler that would repeat ranks by itself, or that has another version of this package."""
    try:
        failures = client.run_on_scheduler(_read_allowed_failures)
        version = client.run_on_scheduler(_read_version)
    except (ImportError, AttributeError) as error:
        raise _lacks_package("the scheduler", error) from error
    if version != _read_version():
        raise _lacks_package("the scheduler", version)
    if failures:
        raise InputError(
            "the scheduler would repeat the ranks of a dead worker by itself",
            got=f"distributed.scheduler.allowed-failures: {failures}",
            expected="0",
            fix="DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=0 dask scheduler",
        )


def _check_workers(client: Client, *, device_type: str) -> None:
    """Refuse workers that run several ranks at once, share a GPU, or have another version of this package."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    threaded = sorted(address for address, worker in workers.items() if worker["nthreads"] != 1)
    if threaded:
        more = f" and {len(threaded) - 1} more" if len(threaded) > 1 else ""
        raise InputError(
            "a worker of the cluster would run several ranks at once",
            got=f"{workers[threaded[0]]['nthreads']} threads on {threaded[0]}{more}",
            expected="workers of one thread",
            fix="dask worker --nthreads 1, or dask cuda worker",
        )
    for address, version in client.run(_read_version, on_error="return").items():
        if version != _read_version():
            raise _lacks_package(f"worker {address}", version)
    if device_type == "cuda":
        _check_devices(client)


def _check_devices(client: Client) -> None:
    """Refuse workers of one host that put the same GPU first: cells side by side would share it."""
    workers_by_gpu: dict[tuple[str | None, str], str] = {}
    for address, visible in client.run(visible_devices).items():
        first_gpu = (urlsplit(address).hostname, (visible or "").split(",")[0])
        other = workers_by_gpu.setdefault(first_gpu, address)
        if other != address:
            raise InputError(
                "two workers of a host have no GPU of their own",
                got=f"CUDA_VISIBLE_DEVICES={visible} on {other} and {address}",
                expected="workers that see their own GPU first",
                fix="start them with dask cuda worker",
            )


def _read_allowed_failures(dask_scheduler: Any) -> int:
    return int(dask_scheduler.allowed_failures)


def _read_version() -> str:
    return importlib.metadata.version(PACKAGE)


def _lacks_package(where: str, got: object) -> InputError:
    return InputError(
        f"{where} does not have this version of {PACKAGE}",
        got=got,
        expected=f"{PACKAGE} {_read_version()} wherever the scheduler and the workers run",
        fix="start them from the same environment as the campaign",
    )


def probe_cluster(
    device: str, *, cluster: str, workers: int, slurm: dict[str, Any] | None = None, wait_s: float = LOCAL_WAIT_S
) -> ProbeReport:
    """The hardware of a worker of a cluster that is not local; the cluster is opened for this and closed again.

    ``device`` is as in ``probe_device``, the others as in ``open_cluster``. Raises what that and ``probe_worker`` do.
    """
    options = None if slurm is None else SlurmOptions.model_validate(slurm)
    with open_cluster(device, workers, cluster=cluster, slurm=options, wait_s=wait_s) as client:
        report = probe_worker(client, device, wait_s=wait_s)
        if report.environment.device_type == "cuda":
            _check_devices(client)
        return report


def probe_worker(client: Client, device: str, *, wait_s: float | None = None) -> ProbeReport:
    """The hardware of a worker of ``client``, measured on a lease, because a shared cluster may be busy.

    ``device`` is as in ``probe_device``. ``device_count`` of the report is the most ranks that one host of the cluster
    takes, and workers and hosts are counted. ``wait_s`` limits the wait for a free worker. Raises ``InputError`` when
    the device does not exist, and ``NoWorkersError`` when no worker becomes free in time.
    """
    with lease_workers(client, 1, timeout_s=wait_s) as lease:
        probing = client.submit(
            probe_device, device, workers=list(lease.workers), allow_other_workers=False, pure=False, retries=0
        )
        try:
            report: ProbeReport = probing.result(timeout=PROBE_S)
        except TimeoutError as error:
            probing.cancel(force=True)
            raise PrecisionTimeError(
                "the probe of a worker did not end", got=f"{PROBE_S:g} s", fix=f"see the log of {lease.workers[0]}"
            ) from error
        lease.mark_clean()
    return _count_ranks(client, report)


def _count_ranks(client: Client, report: ProbeReport) -> ProbeReport:
    """``report`` with the ranks that the hosts of the cluster take: at most one per worker and one per GPU."""
    workers = Counter(urlsplit(address).hostname for address in client.scheduler_info(n_workers=-1)["workers"])
    gpus = report.device_count if report.environment.device_type == "cuda" else None
    ranks = [count if gpus is None else min(count, gpus) for count in workers.values()]
    return replace(report, device_count=max(ranks), worker_count=sum(ranks), host_count=len(ranks))


def check_scratch(client: Client, folder: Path) -> None:
    """Raise ``InputError`` unless every worker of ``client`` can read what this process writes to ``folder``."""
    mark = folder / "mark"
    text = uuid.uuid4().hex
    mark.write_text(text, encoding="utf-8")
    answers = client.run(Path.read_text, mark, on_error="return")
    unable = sorted(address for address, answer in answers.items() if answer != text)
    if unable:
        raise InputError(
            "a worker does not see the scratch folder",
            got=f"{folder} on {', '.join(unable[:5])}",
            expected="scratch: with a folder on a file system that all hosts share",
        )


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C: a terminal sends it to all of them, and only the flow may act on it.

    They inherit the signal mask; a Ctrl-C during the block reaches this process at the end of the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Python's resource tracker unblocks SIGINT in the thread that starts it, so it starts first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
