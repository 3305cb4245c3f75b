"""Take one snapshot of recorded timings and of tables of measurements, and fit the predictor on it."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.observations import Observation, observe, observe_table
from precision_time.predictor.rows.public_table import load_public_table
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import InputError, IntegrityError, TooLittleDataError, UnknownNameError
from precision_time.storage.filesystem import open_store
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.work_kinds import kind_of

#: Four of five folds must leave the 9 rows from which an interval at 0.9 can be calibrated.
FEWEST_CELLS = 12
SHIPPED_TABLE = "measurements.parquet"
#: What ``load_public_table`` calls a row that has no id: its place, which another file has too.
_NO_ID = re.compile(r"row \d+")

__all__ = ["FEWEST_CELLS", "Snapshot", "fit_predictor", "take_snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The measurements of one moment, joined with their cards: what one retraining reads, once.

    ``training`` rows may be learned from, ``holdout`` rows never; ``sha256`` is the digest of the data behind both.
    ``workloads`` and ``hardware`` are the cards that a campaign wrote: what the package ships is not among them.
    ``refused`` counts, by reason, sound rows of tables that could not be used, such as those of a model without a
    card; ``problems`` says in words, by source, what was left out.
    """

    training: tuple[Observation, ...]
    holdout: tuple[Observation, ...]
    workloads: tuple[WorkloadFeatures, ...]
    hardware: tuple[HardwareSpec, ...]
    sha256: str
    problems: tuple[tuple[str, str], ...]
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What one dataset or table gives to a snapshot."""

    name: str
    sha256: str
    observations: list[Observation]
    workloads: tuple[WorkloadFeatures, ...] = ()
    hardware: tuple[HardwareSpec, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    refused: Counter[str] = field(default_factory=Counter)


def take_snapshot(
    data: str | None = None,
    *,
    public: bool = False,
    measurements: str | None = None,
    holdout_models: Sequence[str] = (),
) -> Snapshot:
    """Read every source that is named, and set the rows of ``holdout_models`` aside.

    ``data`` is the URL or folder of a timings dataset, ``public`` stands for the shipped table, ``measurements`` for
    another CSV or Parquet file with its columns. A held-out model leaves together with its network's other names:
    what was learned under one of them would answer for it. Damaged files and rows that cannot be used are left out
    and listed in ``problems``. Raises ``InputError`` when nothing is named, or two tables have a row in common,
    ``TooLittleDataError`` when nothing is recorded or too little is left to train on, and ``UnknownNameError`` when a
    model to hold out was never measured.
    """
    tables = [None] * public + ([measurements] if measurements is not None else [])
    sources = [_read_table(path) for path in tables] + ([_read_dataset(data)] if data is not None else [])
    if not sources:
        raise InputError(
            "no data to train on",
            expected="a dataset of timings, the shipped table, or a file of measurements",
            fix="give --data, --public or --measurements",
        )
    observations = [seen for source in sources for seen in source.observations]
    if len(tables) > 1:
        _check_distinct(observations)
    held_out = _find_held_out(observations, holdout_models)
    training = tuple(seen for seen in observations if seen.network not in held_out)
    if len(training) < FEWEST_CELLS:
        raise TooLittleDataError(
            "too few measured cells to train and validate on",
            got=f"{len(training)} cells in {', '.join(source.name for source in sources)}",
            expected=f"at least {FEWEST_CELLS}, held-out models not counted",
            fix="add cells to the campaign, or train on the public table too (--public; Public table in the form)",
        )
    return Snapshot(
        training=training,
        holdout=tuple(seen for seen in observations if seen.network in held_out),
        workloads=tuple(card for source in sources for card in source.workloads),
        hardware=tuple(spec for source in sources for spec in source.hardware),
        sha256=_join_digests([source.sha256 for source in sources]),
        problems=tuple(problem for source in sources for problem in source.problems),
        refused=dict(sum((source.refused for source in sources), Counter[str]())),
    )


def fit_predictor(snapshot: Snapshot, *, seed: int) -> HierarchicalPredictor:
    """Fit on the training rows of ``snapshot``; the same snapshot and seed give the same trees."""
    return HierarchicalPredictor.fit(snapshot.training, seed=seed)


def _read_dataset(url: str) -> _Source:
    dataset = TimingsDataset(url)
    recorded = dataset.measurements()
    kinds = [kind_of(measurement.model) for measurement in recorded]
    measured = [seen for seen, kind in zip(recorded, kinds, strict=True) if not kind.unlearnable]
    refused = Counter(kind.unlearnable for kind in kinds if kind.unlearnable)
    if not measured:
        raise TooLittleDataError(
            "no measurements to train on",
            got=f"{url}: {len(recorded)} cells of {', '.join({kind.name for kind in kinds})} only" if refused else url,
            expected="a dataset with recorded cells",
            fix="run a campaign of networks first",
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
            fix="`precision-time data verify --set-aside`, then run the campaign again: it writes its cards anew",
        ) from error
    return _Source(
        name=url,
        sha256=dataset.snapshot_sha256(),
        observations=observations,
        workloads=workloads,
        hardware=hardware,
        problems=(*problems, *((url, f"{count} cells cannot be used: {reason}") for reason, count in refused.items())),
        refused=refused,
    )


def _read_table(path: str | None) -> _Source:
    """The rows of the shipped table, or of the file at ``path``, that can be learned from."""
    table = load_public_table(path)
    observations, refused = observe_table(table.kept)
    reasons = Counter(refused.values())
    name = SHIPPED_TABLE if path is None else path
    problems = []
    if len(table.quarantined):
        counts = sorted(table.count_reasons().items(), key=lambda count: -count[1])
        listed = ", ".join(f"{reason} {count}" for reason, count in counts)
        total = len(table.kept) + len(table.quarantined)
        problems.append((name, f"{len(table.quarantined)} of {total} rows are set aside: {listed}"))
    if refused:
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        problems.append((name, f"{len(refused)} sound rows cannot be used: {listed}"))
    return _Source(
        name=name,
        sha256=hashlib.sha256(_read_bytes(path)).hexdigest(),
        observations=[_identify(seen) for seen in observations],
        problems=tuple(problems),
        refused=reasons,
    )


def _read_bytes(path: str | None) -> bytes:
    if path is None:
        return resources.files("precision_time.predictor").joinpath(f"data/{SHIPPED_TABLE}").read_bytes()
    if "://" in path or path.startswith("file:"):
        folder, _, name = path.rpartition("/")
        return open_store(folder).read_bytes(name)
    return Path(path).expanduser().read_bytes()


def _identify(seen: Observation) -> Observation:
    """A row without an id gets the digest of its content, by which a later gate knows it again."""
    if not _NO_ID.fullmatch(seen.measurement.cell_id):
        return seen
    content = repr(replace(seen.measurement, cell_id=""))
    return replace(
        seen, measurement=replace(seen.measurement, cell_id=hashlib.sha256(content.encode()).hexdigest()[:16])
    )


def _check_distinct(observations: Sequence[Observation]) -> None:
    """Rows of two tables: a campaign's cells have ids of their own."""
    counts = Counter(seen.measurement.cell_id for seen in observations if seen.index >= 0)
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
    names = {(name, seen.network) for seen in observations for name in (seen.measurement.model, seen.network)}
    known = {name for name, _ in names}
    for model in models:
        if model not in known:
            raise UnknownNameError("model to hold out", model, sorted(known), fix="hold out a model that was measured")
    return frozenset(network for name, network in names if name in models)


def _join_digests(digests: Sequence[str]) -> str:
    """One source keeps its own digest, so that what was trained on a dataset alone is known again."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
