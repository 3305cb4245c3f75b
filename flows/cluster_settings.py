"""The settings that say which cluster a campaign runs on, checked without Dask."""

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["CLUSTERS", "ClusterName", "SlurmOptions", "is_address", "is_local"]

#: ``auto`` is ``local-cuda`` where a GPU is found or asked for, else ``local``.
CLUSTERS = ("auto", "local", "local-cuda", "slurm")
ADDRESS = re.compile(r"(tcp|tls)://[^\s/@?#]+:[0-9]{1,5}")
ADDRESS_EXPECTED = "tcp://host:port (or tls://) of a running Dask scheduler"


def is_address(cluster: str) -> bool:
    """Whether ``cluster`` is the address of a scheduler."""
    return "://" in cluster


def is_local(cluster: str) -> bool:
    """Whether the workers of ``cluster`` are processes of this machine that the campaign starts itself."""
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
    # It becomes a line of a batch script: a second line in it would be a command.
    if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]{0,198}[\x21-\x7e])?", value):
        raise InputError("not usable in a batch script", got=repr(value)[:80], expected="one line of plain text")
    return value


ClusterName = Annotated[str, BeforeValidator(_check_cluster)]
Line = Annotated[str, BeforeValidator(_check_directive)]


class SlurmOptions(BaseModel):
    """What the batch jobs of a campaign ask Slurm for; each job is one worker, which runs one rank at a time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    partition: Line | None = Field(None, title="Partition", description="As in sbatch --partition.")
    account: Line | None = Field(None, title="Account", description="As in sbatch --account.")
    memory: Line = Field("8GB", title="Memory", description="Memory of one worker and its rank.")
    walltime: Line = Field("01:00:00", title="Walltime", description="As in sbatch --time; the longest a worker lives.")
    cpus: int = Field(1, title="CPUs", description="As in sbatch --cpus-per-task.", ge=1, le=1024, strict=True)
    interface: Line | None = Field(
        None, title="Network interface", description="By which workers reach the scheduler, such as ib0."
    )
    directives: tuple[Line, ...] = Field(
        (), title="Directives", description="More options of sbatch, such as --constraint=epyc.", max_length=50
    )
