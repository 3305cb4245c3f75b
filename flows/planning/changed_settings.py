"""Whether a campaign still measures as its recorded cells were measured: marks in the dataset, and cards of code."""

import contextlib
import hashlib
from collections.abc import Set
from dataclasses import asdict, fields
from typing import Any

from precision_time.flows.planning.spec import CampaignSpec
from precision_time.storage.documents import MAX_JSON_BYTES, dump_json, parse_json
from precision_time.storage.errors import InputError, IntegrityError, NotFoundError, VersionExistsError
from precision_time.storage.filesystem import open_store
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.ranks.code_versions import digest_code
from precision_time.tasks.ranks.job import MeasurementLimits

__all__ = ["check_unchanged", "limits_of", "list_changes", "note_measured", "note_settings"]

#: ``DIGEST.json`` holds settings, and ``DIGEST/CELL.json`` says that a cell was measured with them: names tell which
#: cells those are, and of campaigns that run at once none can overwrite what another wrote.
_FOLDER = "settings/v1"


def limits_of(spec: CampaignSpec) -> MeasurementLimits:
    """How long and how often the cells of ``spec`` are measured."""
    return MeasurementLimits(
        warmup_steps=spec.warmup_steps,
        measured_steps=spec.measured_steps,
        seconds_per_cell=spec.seconds_per_cell,
        timeout_s=spec.timeout_per_cell,
        memory_limit_bytes=spec.memory_limit_bytes,
    )


def list_changes(spec: CampaignSpec, *, cells: Set[str]) -> list[str]:
    """Settings, as ``name: before -> now``, with which some of the recorded ``cells`` were measured otherwise than now.

    Whichever campaign measured them. Models, precisions and sizes are no settings: they only add or leave out cells. A
    setting that an older version did not know counts as its default then, and a cell of which nothing is noted as
    measured like this. Models of the user's own follow, whose source file is not that of their last recorded cell.
    """
    own = _digest(spec)
    measured: dict[str, set[str]] = {}
    for path in open_store(spec.data).list_files(_FOLDER):
        digest, _, cell = path.removeprefix(f"{_FOLDER}/").removesuffix(".json").partition("/")
        if cell in cells:
            measured.setdefault(digest, set()).add(cell)
    like_this = measured.pop(own, set())
    now = asdict(limits_of(spec))
    changes: dict[str, set[str]] = {}
    for digest, otherwise in sorted(measured.items()):
        before = _read(spec.data, digest)
        for name, value in now.items():
            if before is not None and before[name] != value and otherwise - like_this:
                changes.setdefault(f"{name}: {before[name]} -> {value}", set()).update(otherwise - like_this)
    said = [f"{change} (cells: {len(changed)})" for change, changed in changes.items()]
    said += [f"source file of {model}: {before[:8]} -> {now[:8]}" for model, before, now in _changed_code(spec)]
    return said


def _changed_code(spec: CampaignSpec) -> list[tuple[str, str, str]]:
    """(model, digest then, digest now) of the user's own models of ``spec`` that are known to have changed."""
    now = {model: digest for model in dict.fromkeys(spec.models) if (digest := digest_code(model)) is not None}
    if not now:
        return []
    cards = TimingsDataset(spec.data).read_cards("code")
    before = {card.get("name"): card.get("code_sha256") for card in cards}
    return [
        (model, recorded, digest)
        for model, digest in now.items()
        if isinstance(recorded := before.get(model), str) and recorded != digest
    ]


def check_unchanged(spec: CampaignSpec, *, cells: Set[str]) -> None:
    """Raise ``InputError`` with what ``list_changes`` finds, unless that is nothing or ``spec`` accepts changes."""
    changes = [] if spec.accept_changes else list_changes(spec, cells=cells)
    if changes:
        raise InputError(
            f"campaign {spec.name} has recorded cells that were measured with other settings or code",
            got="; ".join(changes),
            expected="the settings and code of the cells that are recorded in this data folder",
            fix="take the changes back, give the campaign another data folder, or --accept-changes (Accept changes in "
            "the form)",
        )


def note_settings(spec: CampaignSpec) -> None:
    """Write down the settings of ``spec``; whoever else does so writes the same bytes, and mends a damaged file.

    Where ``spec`` accepts changes, the changed source of a model is let go: the next cell recorded tells the new one.
    """
    open_store(spec.data).write_bytes(f"{_FOLDER}/{_digest(spec)}.json", dump_json(asdict(limits_of(spec))))
    if spec.accept_changes:
        for model, _, _ in _changed_code(spec):
            TimingsDataset(spec.data).write_card("code", model, {"name": model, "code_sha256": None})


def note_measured(spec: CampaignSpec, cell_id: str) -> None:
    """Write down that the recorded cell ``cell_id`` was measured with the settings of ``spec``."""
    with contextlib.suppress(VersionExistsError):
        path = f"{_FOLDER}/{_digest(spec)}/{cell_id}.json"
        open_store(spec.data).create_bytes(path, dump_json({"campaign": spec.name}))


def _digest(spec: CampaignSpec) -> str:
    return hashlib.sha256(dump_json(asdict(limits_of(spec)))).hexdigest()[:16]


def _read(data: str, digest: str) -> dict[str, Any] | None:
    """The settings of a digest; None where they are missing or damaged, which stops nothing."""
    path = f"{_FOLDER}/{digest}.json"
    try:
        values = parse_json(open_store(data).read_bytes(path, max_bytes=MAX_JSON_BYTES), name=path)
    except (NotFoundError, IntegrityError):
        return None
    if not isinstance(values, dict):
        return None
    known = {field.name for field in fields(MeasurementLimits)}
    return asdict(MeasurementLimits()) | {name: value for name, value in values.items() if name in known}
