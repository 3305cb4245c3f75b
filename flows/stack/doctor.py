"""``precision-time doctor``: whether an installation has all that campaigns and predictions need, and is secured."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from precision_time.flows.clusters.local_gpus import count_gpus
from precision_time.flows.clusters.settings import is_address
from precision_time.flows.ground.addresses import is_loopback
from precision_time.flows.stack.doctor_server import examine_server
from precision_time.flows.stack.findings import Finding, fine, problem, warning
from precision_time.flows.stack.up import STATE, read_addresses
from precision_time.storage.configuration import configured_registry_url
from precision_time.storage.errors import PrecisionTimeError
from precision_time.storage.filesystem import open_store

__all__ = ["Installation", "examine"]

PACKAGE = "precision-time"
#: With less free space an ordinary campaign does not fit.
LITTLE_BYTES = 2**30
CONNECT_S = 3.0
#: The first answer of a store may include a login.
STORE_ANSWER_S = 10.0
_COUNT_DEVICES = "import json, torch; print(json.dumps([torch.version.cuda, torch.cuda.device_count()]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What is examined; None for what is not set up. Nothing else is contacted over the network.

    ``unclean_home`` is the home of a stack that was killed.
    """

    api: str | None
    login: str | None
    cluster: str | None
    data: str | None
    registry: str | None
    unclean_home: str | None = None

    @classmethod
    def find(cls, home: Path, *, cluster: str | None = None, data: str | None = None) -> "Installation":
        """What the environment names, else what ``precision-time up`` runs from ``home`` or keeps there."""
        running = read_addresses(home)
        timings = home / "precision-time-data"
        registry = home / "precision-time-registry"
        return cls(
            api=os.environ.get("PREFECT_API_URL") or (running.api if running else None),
            login=os.environ.get("PREFECT_API_AUTH_STRING") or os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or None,
            cluster=cluster or (running.scheduler if running else None),
            data=data or (str(timings) if timings.is_dir() else None),
            registry=configured_registry_url() or (str(registry) if registry.is_dir() else None),
            unclean_home=str(home) if running is None and (home / STATE).exists() else None,
        )


def examine(installation: Installation) -> list[Finding]:
    """All findings, topic by topic; a check that breaks is a finding too. Takes some seconds."""
    findings = [*_guarded("versions", lambda: list(_examine_versions()))]
    if installation.unclean_home is not None:
        what = "the last precision-time up of this home ended without cleaning up"
        fix = "start it again: it cleans up"
        findings.append(warning("up", what, evidence=installation.unclean_home, fix=fix))
    cluster = installation.cluster

    def examine_prefect() -> list[Finding]:
        nonlocal cluster
        of_server, deployed_cluster = examine_server(installation.api, login=installation.login)
        cluster = cluster or deployed_cluster
        return of_server

    findings += _guarded("prefect", examine_prefect)
    findings += _guarded("dask", lambda: _examine_cluster(cluster))
    findings += _guarded("gpus", _examine_gpus)
    for topic, url in (("data", installation.data), ("registry", installation.registry)):
        findings += _guarded(topic, partial(_examine_store, topic, url))
    return findings


def _guarded(topic: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except PrecisionTimeError as error:
        return [
            problem(topic, error.what, evidence=error.got or "", fix=error.fix or error.expected or "see the message")
        ]
    except Exception as error:
        fix = "check it by hand, or report it"
        return [problem(topic, "the check itself failed", evidence=f"{type(error).__name__}: {error}"[:300], fix=fix)]


def _examine_versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    installed = {name: version for name in ("xgboost", "xgboost-cpu") if (version := _version(name)) is not None}
    if len(installed) > 1:
        yield problem(
            "versions",
            "xgboost and xgboost-cpu are both installed; they own the same files",
            evidence=", ".join(f"{name} {version}" for name, version in installed.items()),
            fix="pip uninstall -y xgboost xgboost-cpu && pip install xgboost-cpu",
        )
    unsupported, supported, missing = [], [], []
    for text in importlib.metadata.requires(PACKAGE) or []:
        requirement = Requirement(text)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": "campaign"}) or requirement.extras:
            continue
        version = _version(requirement.name)
        if version is None:
            missing.append(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            unsupported.append(f"{requirement.name} {version}, wanted {requirement.specifier}")
        elif requirement.specifier:
            supported.append(f"{requirement.name} {version}")
    if missing:
        fix = f"pip install '{PACKAGE}[campaign]'"
        what = "libraries for campaigns and retraining are missing"
        yield warning("versions", what, evidence=", ".join(missing), fix=fix)
    if unsupported:
        fix = f"pip install '{PACKAGE}[campaign]'; in a checkout with -c constraints.txt"
        what = "a library has a version that is not supported"
        yield problem("versions", what, evidence="; ".join(unsupported), fix=fix)
    elif supported:
        here = f"{PACKAGE} {_version(PACKAGE)}, Python {sys.version.split()[0]}"
        yield fine("versions", "the installed versions are supported", ", ".join([here, *supported]))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine_cluster(cluster: str | None) -> list[Finding]:
    if cluster is None or not is_address(cluster):
        return [fine("dask", "no scheduler is set, so each campaign starts its own workers")]
    findings = []
    if not is_loopback(cluster) and urlsplit(cluster).scheme != "tls":
        findings.append(
            problem(
                "tls",
                "anyone who reaches the scheduler can run code as its user, and nothing is encrypted",
                evidence=cluster,
                fix="start scheduler and workers with --tls-ca-file, --tls-cert and --tls-key, and use tls://",
            )
        )
    parts = urlsplit(cluster)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=CONNECT_S).close()
    except OSError as error:
        fix = "start precision-time up, or a dask scheduler; see deploy/README.md"
        return [*findings, problem("dask", "no scheduler answers", evidence=f"{cluster}: {error}", fix=fix)]
    from precision_time.flows.clusters.cluster import open_cluster

    # Opening it also refuses other versions, workers of several threads, and a scheduler that repeats ranks by itself.
    with open_cluster("auto", 1, cluster=cluster, wait_s=CONNECT_S) as client:
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
    return [*findings, fine("dask", f"the scheduler answers and has {workers} workers of one thread each", cluster)]


def _examine_gpus() -> list[Finding]:
    listed = count_gpus()
    if listed == 0:
        return [fine("gpus", "the driver lists no GPU, so campaigns measure on the CPU")]
    counted = subprocess.run([sys.executable, "-c", _COUNT_DEVICES], capture_output=True, text=True, check=False)
    if counted.returncode:
        fix = f"pip install '{PACKAGE}[campaign]'"
        return [problem("gpus", "torch does not start", evidence=counted.stderr.strip()[-300:], fix=fix)]
    cuda, usable = json.loads(counted.stdout)
    evidence = f"driver {listed}, torch {usable} (built for CUDA {cuda})"
    if usable != listed:
        fix = "install a build of torch for this driver, and check CUDA_VISIBLE_DEVICES"
        return [problem("gpus", "torch does not see every GPU of the driver", evidence=evidence, fix=fix)]
    if _version("dask-cuda") is None:
        fix = f"pip install '{PACKAGE}[gpu-cu12]', or gpu-cu13"
        return [problem("gpus", "campaigns on GPUs need dask-cuda", evidence=evidence, fix=fix)]
    return [fine("gpus", f"torch sees all {usable} GPUs", evidence)]


def _examine_store(topic: str, url: str | None) -> list[Finding]:
    if url is None:
        return [fine(topic, "no folder or URL is set")]
    open_store(url, timeout_s=STORE_ANSWER_S).check_writable()
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(url).free
        if free < LITTLE_BYTES:
            fix = "free some space, or use another folder"
            return [warning(topic, "little space is left", evidence=f"{free:,} bytes at {url}", fix=fix)]
    return [fine(topic, "it can be written", url)]
