"""``precision-time doctor``: is all here that campaigns, workers and predictions need, and safe to leave on?"""

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
from precision_time.flows.stack.doctor_server import examine_server
from precision_time.flows.stack.findings import Finding, fine, is_loopback, problem, warning
from precision_time.flows.stack.up import STATE, read_addresses
from precision_time.storage.configuration import configured_registry_url
from precision_time.storage.errors import PrecisionTimeError
from precision_time.storage.filesystem import open_store

__all__ = ["Installation", "examine"]

PACKAGE = "precision-time"
#: Under this much free space a campaign of an ordinary size does not fit.
LITTLE_BYTES = 2**30
CONNECT_S = 3.0
#: A store that is asked for the first time may have to be logged in to.
STORE_ANSWER_S = 10.0
_COUNT_DEVICES = "import json, torch; print(json.dumps([torch.version.cuda, torch.cuda.device_count()]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What is looked at; None for what is not set up here. Nothing else is asked over the network."""

    api: str | None
    login: str | None
    cluster: str | None
    data: str | None
    registry: str | None
    unclean_home: str | None = None

    @classmethod
    def find(cls, home: Path, *, cluster: str | None = None, data: str | None = None) -> "Installation":
        """What the environment names, else what ``precision-time up`` runs or left in ``home``."""
        running = read_addresses(home)
        left = home / "precision-time-data"
        registry = home / "precision-time-registry"
        return cls(
            api=os.environ.get("PREFECT_API_URL") or (running.api if running else None),
            login=os.environ.get("PREFECT_API_AUTH_STRING") or os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or None,
            cluster=cluster or (running.scheduler if running else None),
            data=data or (str(left) if left.is_dir() else None),
            registry=configured_registry_url() or (str(registry) if registry.is_dir() else None),
            unclean_home=str(home) if running is None and (home / STATE).exists() else None,
        )


def examine(installation: Installation) -> list[Finding]:
    """All findings, topic by topic; a check that fails itself is a finding too. Takes some seconds."""
    findings = [*_guarded("versions", lambda: list(_examine_versions()))]
    if installation.unclean_home is not None:
        what = "the stack of this home ended without tidying up"
        findings.append(warning("up", what, evidence=installation.unclean_home, fix="precision-time up takes it over"))
    cluster = installation.cluster

    def server() -> list[Finding]:
        nonlocal cluster
        found, theirs = examine_server(installation.api, login=installation.login)
        cluster = cluster or theirs
        return found

    findings += _guarded("prefect", server)
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
        fix = "run the check by hand, or report it"
        return [problem(topic, "the check itself failed", evidence=f"{type(error).__name__}: {error}"[:300], fix=fix)]


def _examine_versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    found = {name: version for name in ("xgboost", "xgboost-cpu") if (version := _version(name)) is not None}
    if len(found) > 1:
        yield problem(
            "versions",
            "xgboost and xgboost-cpu are both installed; they own the same files",
            evidence=", ".join(f"{name} {version}" for name, version in found.items()),
            fix="pip uninstall -y xgboost xgboost-cpu && pip install xgboost-cpu",
        )
    wrong, right, absent = [], [], []
    for text in importlib.metadata.requires(PACKAGE) or []:
        wanted = Requirement(text)
        if wanted.marker is None or not wanted.marker.evaluate({"extra": "campaign"}) or wanted.extras:
            continue
        version = _version(wanted.name)
        if version is None:
            absent.append(wanted.name)
        elif not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} {version}, wanted {wanted.specifier}")
        elif wanted.specifier:
            right.append(f"{wanted.name} {version}")
    if absent:
        fix = f"pip install '{PACKAGE}[campaign]'"
        yield warning("versions", "campaigns and retraining lack libraries", evidence=", ".join(absent), fix=fix)
    if wrong:
        fix = f"pip install '{PACKAGE}[campaign]'; from a checkout with -c constraints.txt"
        yield problem("versions", "a library is of a release that does not fit", evidence="; ".join(wrong), fix=fix)
    elif right:
        here = f"{PACKAGE} {_version(PACKAGE)}, Python {sys.version.split()[0]}"
        yield fine("versions", "the releases fit each other", ", ".join([here, *right]))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine_cluster(cluster: str | None) -> list[Finding]:
    if cluster is None or not is_address(cluster):
        return [fine("dask", "no scheduler is set, so each campaign starts workers of its own")]
    findings = []
    if not is_loopback(cluster) and urlsplit(cluster).scheme != "tls":
        findings.append(
            problem(
                "tls",
                "whoever reaches the scheduler runs code as its user, and nothing is encrypted",
                evidence=cluster,
                fix="start scheduler and workers with --tls-ca-file, --tls-cert and --tls-key, and use tls://",
            )
        )
    parts = urlsplit(cluster)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=CONNECT_S).close()
    except OSError as error:
        fix = "precision-time up, or dask scheduler; see deploy/README.md"
        return [*findings, problem("dask", "no scheduler answers", evidence=f"{cluster}: {error}", fix=fix)]
    from precision_time.flows.clusters.cluster import open_cluster

    # It refuses another release, workers of several threads, and a scheduler that would run ranks again by itself.
    with open_cluster("auto", 1, cluster=cluster, wait_s=CONNECT_S) as client:
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
    return [*findings, fine("dask", f"the scheduler answers, with {workers} workers of one thread", cluster)]


def _examine_gpus() -> list[Finding]:
    listed = count_gpus()
    if listed == 0:
        return [fine("gpus", "the driver lists no GPU, so campaigns measure on the CPU")]
    asked = subprocess.run([sys.executable, "-c", _COUNT_DEVICES], capture_output=True, text=True, check=False)
    if asked.returncode:
        fix = f"pip install '{PACKAGE}[campaign]'"
        return [problem("gpus", "torch does not start", evidence=asked.stderr.strip()[-300:], fix=fix)]
    cuda, usable = json.loads(asked.stdout)
    evidence = f"driver {listed}, torch {usable} (built for CUDA {cuda})"
    if usable != listed:
        fix = "install a build of torch for this driver, and look at CUDA_VISIBLE_DEVICES"
        return [problem("gpus", "torch does not see every GPU of the driver", evidence=evidence, fix=fix)]
    if _version("dask-cuda") is None:
        fix = f"pip install '{PACKAGE}[gpu-cu12]', or gpu-cu13"
        return [problem("gpus", "campaigns on GPUs need dask-cuda", evidence=evidence, fix=fix)]
    return [fine("gpus", f"torch uses all {usable} of them", evidence)]


def _examine_store(topic: str, url: str | None) -> list[Finding]:
    if url is None:
        return [fine(topic, "no place is set")]
    open_store(url, timeout_s=STORE_ANSWER_S).check_writable()
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(url).free
        if free < LITTLE_BYTES:
            fix = "make room, or name another place"
            return [warning(topic, "there is little room left", evidence=f"{free:,} bytes at {url}", fix=fix)]
    return [fine(topic, "can be written", url)]
