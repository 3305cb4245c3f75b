"""The snapshot that one retraining works on: recorded timings and tables of measurements, read once."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from precision_time.predictor.rows.observations import Observation, observe, observe_table
from precision_time.predictor.rows.public_table import load_public_table
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.shipped import shipped_bytes
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import InputError, IntegrityError, TooLittleDataError, UnknownNameError
from precision_time.storage.filesystem import open_store
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.work_kinds import kind_of

#: Four of five folds must contain the 9 rows that are needed to calibrate an interval at 0.9.
FEWEST_CELLS = 12
SHIPPED_TABLE = "measurements.parquet"
#: The name that ``load_public_table`` gives a row without an id: its place, which rows of other files share.
_NO_ID = re.compile(r"row \d+")

__all__ = ["FEWEST_CELLS", "Snapshot", "take_snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The measurements at one moment, joined with their cards.

    ``training`` rows may be trained on, ``holdout`` rows never; ``sha256`` is the digest of the data behind both.
    ``workloads`` and ``hardware`` are the cards that campaigns wrote, without those of the package. ``problems`` are
    pairs of a source and, in words, what of it was left out.
    """

    training: tuple[Observation, ...]
    holdout: tuple[Observation, ...]
    workloads: tuple[WorkloadFeatures, ...]
    hardware: tuple[HardwareSpec, ...]
    sha256: str
    problems: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The part of a snapshot that comes from one dataset or table."""

    name: str
    sha256: str
    observations: list[Observation]
    workloads: tuple[WorkloadFeatures, ...] = ()
    hardware: tuple[HardwareSpec, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()


def take_snapshot(
    data: str | None = None,
    *,
    public: bool = False,
    measurements: str | None = None,
    holdout_models: Sequence[str] = (),
) -> Snapshot:
    """Read every given source, and set the rows of ``holdout_models`` aside.

    ``data`` is the URL or folder of a timings dataset, ``public`` adds the shipped table, ``measurements`` is another
    CSV or Parquet file with its columns. All names of a held-out model's network are held out, because rows under
    another name would teach the same network. Damaged files and unusable rows are left out and listed in ``problems``.
    Raises ``InputError`` when no source is given or two tables share a row, ``TooLittleDataError`` when nothing is
    recorded or too little is left to train on, and ``UnknownNameError`` when a model to hold out was never measured.
    """
    tables = [None] * public + ([measurements] if measurements is not None else [])
    sources = [_read_table(path) for path in tables] + ([_read_dataset(data)] if data is not None else [])
    if not sources:
        raise InputError(
            "no data to train on",
            expected="a dataset of timings, the shipped table, or a file of measurements",
            fix="give --data, --public or --measurements",
        )
    observations = [row for source in sources for row in source.observations]
    if len(tables) > 1:
        _check_distinct(observations)
    held_out = _find_held_out(observations, holdout_models)
    training = tuple(row for row in observations if row.network not in held_out)
    if len(training) < FEWEST_CELLS:
        raise TooLittleDataError(
            "too few measured cells to train and validate on",
            got=f"{len(training)} cells in {', '.join(source.name for source in sources)}",
            expected=f"at least {FEWEST_CELLS}, without held-out models",
            fix="add cells to the campaign, or train on the public table too (--public; Public table in the form)",
        )
    return Snapshot(
        training=training,
        holdout=tuple(row for row in observations if row.network in held_out),
        workloads=tuple(card for source in sources for card in source.workloads),
        hardware=tuple(spec for source in sources for spec in source.hardware),
        sha256=_join_digests([source.sha256 for source in sources]),
        problems=tuple(problem for source in sources for problem in source.problems),
    )


def _read_dataset(url: str) -> _Source:
    dataset = TimingsDataset(url)
    recorded = dataset.measurements()
    kinds = [kind_of(row.model) for row in recorded]
    measured = [row for row, kind in zip(recorded, kinds, strict=True) if not kind.unlearnable]
    unlearnable = Counter(kind.unlearnable for kind in kinds if kind.unlearnable)
    if not measured:
        names = ", ".join(sorted({kind.name for kind in kinds}))
        raise TooLittleDataError(
            "no measurements to train on",
            got=f"{url}: {len(recorded)} cells of {names} only" if recorded else url,
            expected="a dataset with recorded cells",
            fix="first run a campaign of networks",
        )
    workloads = tuple(WorkloadFeatures.from_dict(card) for card in dataset.read_cards("workloads"))
    hardware = tuple(HardwareSpec.from_dict(card) for card in dataset.read_cards("hardware"))
    problems = tuple(dataset.problems)
    try:
        observations = observe(measured, workloads=workloads, hardware=hardware)
    except UnknownNameError as error:
        if not problems:
            raise
        path, reason = problems[0]
        raise IntegrityError(
            "a card that the measurements need is damaged",
            got=f"{path}: {reason}",
            expected=error.expected,
            fix="`precision-time data verify --set-aside`, then run the campaign again, which rewrites its cards",
        ) from error
    unusable = ((url, f"{count} cells cannot be used: {reason}") for reason, count in unlearnable.items())
    return _Source(
        name=url,
        sha256=dataset.snapshot_sha256(),
        observations=observations,
        workloads=workloads,
        hardware=hardware,
        problems=(*problems, *unusable),
    )


def _read_table(path: str | None) -> _Source:
    """The rows of the shipped table, or of the file at ``path``, that can be trained on."""
    table = load_public_table(path)
    observations, refused = observe_table(table.kept)
    name = SHIPPED_TABLE if path is None else path
    problems = []
    if len(table.quarantined):
        counts = sorted(table.count_reasons().items(), key=lambda count: -count[1])
        listed = ", ".join(f"{reason} {count}" for reason, count in counts)
        total = len(table.kept) + len(table.quarantined)
        problems.append((name, f"{len(table.quarantined)} of {total} rows are set aside: {listed}"))
    if refused:
        listed = ", ".join(f"{reason} {count}" for reason, count in Counter(refused.values()).most_common())
        problems.append((name, f"{len(refused)} sound rows cannot be used: {listed}"))
    return _Source(
        name=name,
        sha256=hashlib.sha256(_read_bytes(path)).hexdigest(),
        observations=[_identify(row) for row in observations],
        problems=tuple(problems),
    )


def _read_bytes(path: str | None) -> bytes:
    if path is None:
        return shipped_bytes(SHIPPED_TABLE)
    if "://" in path or path.startswith("file:"):
        folder, _, name = path.rpartition("/")
        return open_store(folder).read_bytes(name)
    return Path(path).expanduser().read_bytes()


def _identify(row: Observation) -> Observation:
    """``row``, with the digest of its content as its id if it has none, so that a later gate recognises it."""
    if not _NO_ID.fullmatch(row.measurement.cell_id):
        return row
    content = repr(replace(row.measurement, cell_id=""))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return replace(row, measurement=replace(row.measurement, cell_id=digest))


def _check_distinct(observations: Sequence[Observation]) -> None:
    """Refuse a row that two tables share; a campaign's cells have ids of their own and are not compared."""
    counts = Counter(row.measurement.cell_id for row in observations if row.index >= 0)
    repeated = [row for row, count in counts.items() if count > 1]
    if repeated:
        raise InputError(
            "two tables have rows in common",
            got=f"{len(repeated)} row ids, {', '.join(repeated[:5])}, ...",
            expected="a file of rows that are not in the shipped table",
            fix="leave --public out when the file holds the shipped rows too",
        )


def _find_held_out(observations: Sequence[Observation], models: Sequence[str]) -> frozenset[str]:
    """The networks of ``models``, each of which is the name of a measured model or network."""
    names = {(name, row.network) for row in observations for name in (row.measurement.model, row.network)}
    known = {name for name, _ in names}
    for model in models:
        if model not in known:
            raise UnknownNameError("model to hold out", model, sorted(known), fix="hold out a model that was measured")
    return frozenset(network for name, network in names if name in models)


def _join_digests(digests: Sequence[str]) -> str:
    """A single source keeps its own digest, so that the artifact of a dataset alone is recognised."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
