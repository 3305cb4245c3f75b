"""Whether a campaign still measures as its recorded cells were measured: one document per name in the dataset."""

from dataclasses import asdict, fields
from typing import Any

from precision_time.flows.spec import CampaignSpec
from precision_time.storage.documents import MAX_JSON_BYTES, dump_json, parse_json
from precision_time.storage.errors import InputError, IntegrityError, NotFoundError
from precision_time.storage.filesystem import open_store
from precision_time.tasks.job import MeasurementLimits

__all__ = ["check_unchanged", "limits_of", "list_changes", "note_settings"]

_FOLDER = "campaigns/v1"
#: Earlier settings that are kept: a document must not grow without end.
_KEPT = 100


def limits_of(spec: CampaignSpec) -> MeasurementLimits:
    """How long and how often the cells of ``spec`` are measured."""
    return MeasurementLimits(
        warmup_steps=spec.warmup_steps,
        measured_steps=spec.measured_steps,
        seconds_per_cell=spec.seconds_per_cell,
        timeout_s=spec.timeout_per_cell,
        memory_limit_bytes=spec.memory_limit_bytes,
    )


def list_changes(spec: CampaignSpec) -> list[str]:
    """The settings, as ``name: before -> now``, in which ``spec`` differs from the last run of its name on its data.

    Models, precisions and sizes are none of them: they only add or leave out cells. A setting that an older version
    did not know counts as its default then.
    """
    history = _read(spec)
    if not history:
        return []
    defaults = asdict(MeasurementLimits())
    before, now = defaults | history[-1], asdict(limits_of(spec))
    return [f"{name}: {before[name]} -> {value}" for name, value in now.items() if before[name] != value]


def check_unchanged(spec: CampaignSpec) -> None:
    """Raise ``InputError`` with the changes unless there are none or ``spec`` accepts them."""
    changes = [] if spec.accept_changes else list_changes(spec)
    if changes:
        raise InputError(
            f"campaign {spec.name} has recorded cells that were measured with other settings",
            got="; ".join(changes),
            expected="the settings of the cells that are recorded in this data folder",
            fix="take the settings back, give the campaign another name or data folder, or --accept-changes",
        )


def note_settings(spec: CampaignSpec) -> None:
    """Write down the settings of ``spec`` behind earlier ones, unless the last are the same."""
    history, now = _read(spec), asdict(limits_of(spec))
    if history and history[-1] == now:
        return
    open_store(spec.data).write_bytes(_path(spec), dump_json({"measured_with": [*history, now][-_KEPT:]}))


def _path(spec: CampaignSpec) -> str:
    return f"{_FOLDER}/{spec.name}.json"


def _read(spec: CampaignSpec) -> list[dict[str, Any]]:
    """Settings of earlier runs, oldest first; none where the document is missing or damaged, which stops nothing."""
    try:
        document = parse_json(open_store(spec.data).read_bytes(_path(spec), max_bytes=MAX_JSON_BYTES), name=_path(spec))
    except (NotFoundError, IntegrityError):
        return []
    history = document.get("measured_with") if isinstance(document, dict) else None
    known = {field.name for field in fields(MeasurementLimits)}
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        return []
    return [{name: value for name, value in entry.items() if name in known} for entry in history]
