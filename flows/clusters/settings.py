"""The settings that choose and configure the cluster of a campaign, checked without Dask."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["CLUSTERS", "DASK_SETTINGS", "ClusterName", "SlurmOptions", "dask_environment", "is_address", "is_local"]

#: ``auto`` is ``local-cuda`` where a GPU is found or asked for, else ``local``.
CLUSTERS = ("auto", "local", "local-cuda", "slurm")
#: A dead worker costs one attempt of one cell. Therefore Dask must not repeat a rank by itself, and a rank whose worker
#: is gone must end with an error instead of waiting for ever. A running scheduler has its own settings, which the
#: campaign checks: see deploy/README.md.
DASK_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "distributed.scheduler.allowed-failures": 0,
        "distributed.scheduler.no-workers-timeout": "30s",
        "distributed.comm.retry.count": 3,
        # Ranks are separate processes with their own limit; by these settings Dask would pause or kill their worker.
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
        # A worker that profiles itself and ticks often takes 4 % of a core from its rank.
        "distributed.worker.profile.enabled": False,
        "distributed.admin.system-monitor.interval": "5s",
        "distributed.admin.tick.interval": "1s",
        "distributed.admin.tick.limit": "60s",
    }
)
ADDRESS = re.compile(r"(tcp|tls)://[^\s/@?#]+:[0-9]{1,5}")
ADDRESS_EXPECTED = "tcp://host:port (or tls://) of a running Dask scheduler"


def dask_environment() -> dict[str, str]:
    """``DASK_SETTINGS`` as environment variables for Dask's own commands."""
    return {
        "DASK_" + name.upper().replace("-", "_").replace(".", "__"): str(value) for name, value in DASK_SETTINGS.items()
    }


def is_address(cluster: str) -> bool:
    """Whether ``cluster`` is the address of a scheduler."""
    return "://" in cluster


def is_local(cluster: str) -> bool:
    """Whether the campaign itself starts the workers of ``cluster`` on this machine."""
    return cluster in ("auto", "local", "local-cuda")


def _check_cluster(value: object) -> object:
    if not isinstance(value, str):
        raise InputError(
            "not a cluster", got=repr(value)[:80], expected=f"{', '.join(CLUSTERS)}, or {ADDRESS_EXPECTED}"
        )
    if is_address(value):
        if not ADDRESS.fullmatch(value):
            raise InputError("not the address of a scheduler", got=repr(value)[:80], expected=ADDRESS_EXPECTED)
    elif value not in CLUSTERS:
        raise UnknownNameError("cluster", value, CLUSTERS, fix=f"one of these, or {ADDRESS_EXPECTED}")
    return value


def _check_directive(value: object) -> object:
    # It becomes a line of a batch script, where a second line would be a command.
    if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]{0,198}[\x21-\x7e])?", value):
        raise InputError("not usable in a batch script", got=repr(value)[:80], expected="one line of plain text")
    return value


ClusterName = Annotated[str, BeforeValidator(_check_cluster)]
Line = Annotated[str, BeforeValidator(_check_directive)]


class SlurmOptions(BaseModel):
    """What the batch jobs of a campaign request from Slurm; a job runs on one host and starts one or more workers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    partition: Line | None = Field(None, title="Partition", description="As in sbatch --partition.")
    account: Line | None = Field(None, title="Account", description="As in sbatch --account.")
    workers_per_job: int = Field(
        1,
        title="Workers per job",
        description="Workers in one job, one per rank. The ranks of a cell that share a host must fit into one job, "
        "because Slurm may place each job on another host.",
        ge=1,
        le=256,
        strict=True,
    )
    memory: Line = Field("8GB", title="Memory", description="Memory of one worker and its rank.")
    walltime: Line = Field("01:00:00", title="Walltime", description="As in sbatch --time: how long a worker may run.")
    cpus: int = Field(1, title="CPUs", description="Cores of one worker and its rank.", ge=1, le=1024, strict=True)
    interface: Line | None = Field(
        None, title="Network interface", description="The interface by which workers reach the scheduler, such as ib0."
    )
    directives: tuple[Line, ...] = Field(
        (), title="Directives", description="More options of sbatch, such as --constraint=epyc.", max_length=50
    )
