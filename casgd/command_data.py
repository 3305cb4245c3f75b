"""The data and the ranks of one ``precision-time glm`` command."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from precision_time.casgd.column_cache import convert_libsvm, open_cache
from precision_time.casgd.communicator import Communicator, DelayedCommunicator, agree
from precision_time.casgd.datasets import BUILTIN, Dataset, Standardiser, load_builtin, synth
from precision_time.casgd.errors import InputError
from precision_time.casgd.mpi import find_communicator
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.problem import Problem
from precision_time.casgd.training import place_features
from precision_time.casgd.validation import share_columns

__all__ = ["CommandData", "join_ranks", "read_data"]

# Data sets that are drawn at random; the objective follows the dash.
_MADE_UP = ("synth-logistic", "synth-squared", "synth-poisson")

# Variables that MPICH, Open MPI and Slurm set in the processes that they start.
_STARTED_BY_MPI = ("PMI_SIZE", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE")


def join_ranks(choice: str, *, delay_us: float = 0.0) -> Communicator:
    """The ranks of this job: 'none', 'mpi', or 'auto', which is MPI under mpiexec and one process otherwise.

    ``delay_us`` microseconds are added to every sum, to emulate a network.

    Raises:
        InputError: another choice. CommunicationError: MPI is missing.
    """
    if choice not in ("auto", "none", "mpi"):
        raise InputError("unknown ranks", got=repr(choice), expected="auto, none or mpi")
    started = any(name in os.environ for name in _STARTED_BY_MPI)
    comm = find_communicator("mpi" if choice == "mpi" or (choice == "auto" and started) else None)
    return DelayedCommunicator(comm, delay_us * 1e-6) if delay_us != 0 else comm


@dataclass(frozen=True, kw_only=True, eq=False)
class CommandData:
    """This rank's columns of a data set, with the mean and scale that undo their standardisation.

    features: (m, n_local).
    targets: (m,), -1/+1 for the logistic loss.
    columns: n over all ranks.
    mean, scale: (n_local,), of this rank's columns; 0 and 1 if they were not standardised.
    """

    name: str
    objective: str
    features: Any
    targets: np.ndarray
    columns: int
    mean: np.ndarray
    scale: np.ndarray

    def problem(self, *, l2: float, fit_intercept: bool = True) -> Problem:
        """The problem with these data."""
        return Problem(
            features=self.features,
            targets=self.targets,
            objective=find_objective(self.objective),
            l2=l2,
            fit_intercept=fit_intercept,
        )


def read_data(
    name: str,
    *,
    comm: Communicator,
    objective: str | None = None,
    n_features: int | None = None,
    cache: Path | None = None,
    sparse: bool = False,
    rows: int = 20_000,
    seed: int = 0,
    standardise: bool = True,
    device: str = "auto",
) -> CommandData:
    """The data set ``name``: a built-in or made-up one, a cache of columns, or a LIBSVM file, which is cached first.

    objective: by default that of a built-in or made-up set, otherwise logistic.
    n_features: columns of a LIBSVM file (required) or of a made-up set (default 28).
    cache: folder of the cache; by default beside the file, with ``.columns`` added to its name.
    sparse: hold a LIBSVM file as CSR.
    rows: of a made-up set.
    standardise: scale columns to mean 0 and deviation 1, before any rounding; sparse columns are not centred.
    device: as `training.place_features` takes it.

    Every rank calls it; an error on one rank is raised on all.

    Raises:
        InputError: an unknown name, or data that do not suit the objective.
    """

    def read() -> CommandData:
        if name in BUILTIN or name in _MADE_UP:
            data = _own_share(_load(name, n_features=n_features, rows=rows, seed=seed), objective, comm)
        else:
            data = _from_disk(
                Path(name), objective or "logistic", comm=comm, n_features=n_features, cache=cache, sparse=sparse
            )
        if standardise:
            scaler = Standardiser.fit(data.features, centre=not hasattr(data.features, "tocsr"))
            data = replace(data, features=scaler.apply(data.features), mean=scaler.mean, scale=scaler.scale)
        return replace(data, features=place_features(data.features, device=device))

    return agree(comm, read)


def _load(name: str, *, n_features: int | None, rows: int, seed: int) -> Dataset:
    if name in BUILTIN:
        return load_builtin(name)
    return synth(name.partition("-")[2], rows, 28 if n_features is None else n_features, seed=seed)


def _own_share(whole: Dataset, objective: str | None, comm: Communicator) -> CommandData:
    first, past = share_columns(whole.features, comm.size)[comm.rank]
    return _describe(
        whole.name,
        objective or whole.objective,
        features=whole.features[:, first:past],
        targets=whole.targets,
        columns=int(whole.features.shape[1]),
    )


def _from_disk(
    path: Path, objective: str, *, comm: Communicator, n_features: int | None, cache: Path | None, sparse: bool
) -> CommandData:
    find_objective(objective)
    if (path / "header.json").is_file():
        columns = open_cache(path)
    elif path.is_file():
        if n_features is None:
            raise InputError("a LIBSVM file does not state its number of columns", got=path, fix="add --n-features")
        columns = convert_libsvm(
            path,
            cache or path.with_name(f"{path.name}.columns"),
            n_features=n_features,
            layout="csr" if sparse else "dense",
            labels="binary" if objective == "logistic" else "numbers",
            blocks=min(16, n_features),
        )
    else:
        raise InputError(
            "there are no such data",
            got=repr(str(path)),
            expected=f"{', '.join((*BUILTIN, *_MADE_UP))}, a LIBSVM file, or a cache that was made from one",
        )
    features = columns.features(rank=comm.rank, size=comm.size)
    return _describe(path.name, objective, features=features, targets=columns.targets(), columns=columns.shape[1])


def _describe(name: str, objective: str, *, features: Any, targets: np.ndarray, columns: int) -> CommandData:
    if objective == "logistic" and not np.isin(targets, (-1.0, 1.0)).all():
        values = np.unique(targets)
        raise InputError(
            "the logistic loss needs labels of two classes",
            got=f"{values.size} values: {', '.join(f'{value:g}' for value in values[:5])}, ...",
            expected="-1/+1, 0/1 or 1/2",
            fix="--objective squared or poisson",
        )
    if objective == "poisson" and (targets < 0).any():
        raise InputError("the Poisson loss needs counts", got=f"{targets.min():g}", expected="0 and above")
    local = int(features.shape[1])
    return CommandData(
        name=name,
        objective=objective,
        features=features,
        targets=np.asarray(targets, dtype=np.float64),
        columns=columns,
        mean=np.zeros(local),
        scale=np.ones(local),
    )
