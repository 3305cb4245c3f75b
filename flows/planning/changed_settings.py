"""Whether a campaign's settings and code are still those of its recorded cells, by notes and cards in the dataset."""

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

#: ``DIGEST.json`` holds settings, and ``DIGEST/CELL.json`` says that a cell was measured with them. With
#: a file per cell, campaigns that run at once cannot overwrite each other's notes.
_FOLDER = "settings/v1"


def limits_of(spec: CampaignSpec) -> MeasurementLimits:
    """The part of ``spec`` that says how long and how often each cell is measured."""
    return MeasurementLimits(
        warmup_steps=spec.warmup_steps,
        measured_steps=spec.measured_steps,
        seconds_per_cell=spec.seconds_per_cell,
        timeout_s=spec.timeout_per_cell,
        memory_limit_bytes=spec.memory_limit_bytes,
    )


def list_changes(spec: CampaignSpec, *, cells: Set[str]) -> list[str]:
    """Settings that some of the recorded ``cells`` were measured with and that differ now, as ``name: before -> now``.

    Any campaign may have measured the cells. Models, precisions and sizes are no settings: they only add or leave out
    cells. A setting that an older version did not have counts as its default, and a cell without a note as unchanged.
    Then follow the user's own models whose source file has changed since their last recorded cell.
    """
    cells_by_digest: dict[str, set[str]] = {}
    for path in open_store(spec.data).list_files(_FOLDER):
        digest, _, cell = path.removeprefix(f"{_FOLDER}/").removesuffix(".json").partition("/")
        if cell in cells:
            cells_by_digest.setdefault(digest, set()).add(cell)
    unchanged = cells_by_digest.pop(_digest(spec), set())
    now = asdict(limits_of(spec))
    cells_by_change: dict[str, set[str]] = {}
    for digest, with_digest in sorted(cells_by_digest.items()):
        before = _read(spec.data, digest)
        for name, value in now.items():
            if before is not None and before[name] != value and with_digest - unchanged:
                change = f"{name}: {before[name]} -> {value}"
                cells_by_change.setdefault(change, set()).update(with_digest - unchanged)
    return [
        *(f"{change} (cells: {len(changed)})" for change, changed in cells_by_change.items()),
        *(f"source file of {model}: {before[:8]} -> {now[:8]}" for model, before, now in _changed_code(spec)),
    ]


def _changed_code(spec: CampaignSpec) -> list[tuple[str, str, str]]:
    """(model, digest before, digest now) of the user's own models of ``spec`` that are known to have changed."""
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
    """Raise ``InputError`` with the changes that ``list_changes`` finds, unless ``spec`` accepts changes."""
    changes = [] if spec.accept_changes else list_changes(spec, cells=cells)
    if changes:
        raise InputError(
            f"campaign {spec.name} has recorded cells that were measured with other settings or code",
            got="; ".join(changes),
            expected="the settings and code of the cells that are recorded in this data folder",
            fix="undo the changes, use another data folder, or accept them: --accept-changes (Accept changes in the "
            "form)",
        )


def note_settings(spec: CampaignSpec) -> None:
    """Write down the settings of ``spec``; other campaigns write the same bytes, which also repairs a damaged file.

    Where ``spec`` accepts changes, the digest of a changed model is cleared; the next recorded cell sets the new one.
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
    """The settings of a digest; None where they are missing or damaged, which is ignored."""
    path = f"{_FOLDER}/{digest}.json"
    try:
        values = parse_json(open_store(data).read_bytes(path, max_bytes=MAX_JSON_BYTES), name=path)
    except (NotFoundError, IntegrityError):
        return None
    if not isinstance(values, dict):
        return None
    known = {field.name for field in fields(MeasurementLimits)}
    return asdict(MeasurementLimits()) | {name: value for name, value in values.items() if name in known}
