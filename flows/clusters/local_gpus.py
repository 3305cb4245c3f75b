"""The NVIDIA GPUs of this machine: those that its driver lists and ``CUDA_VISIBLE_DEVICES`` shows; without torch."""

import os
import re
import shutil
import subprocess

__all__ = ["count_gpus", "name_devices"]

LIST_S = 60.0


def count_gpus() -> int:
    """The number of the driver's GPUs that are visible; 0 without a driver."""
    names = _list_gpus()
    return sum(_find(entry, names) is not None for entry in _visible(len(names)))


def name_devices(device_type: str, *, count: int | None = None) -> tuple[str, ...]:
    """The devices that a cluster of this machine uses: ``cpu``, or the UUIDs of the first ``count`` visible GPUs.

    A GPU without a UUID in the list of ``nvidia-smi`` is named after its entry in ``CUDA_VISIBLE_DEVICES``.
    """
    if device_type != "cuda":
        return ("cpu",)
    names = _list_gpus()
    entries = _visible(len(names) or count or 1)[:count]
    return tuple(_find(entry, names) or (f"GPU-{entry}" if entry.isdecimal() else entry) for entry in entries)


def _list_gpus() -> list[str]:
    """The GPUs in the driver's order, each by its UUID or as ``GPU-PLACE``; none without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False, timeout=LIST_S)
    if listed.returncode:
        return []
    lines = re.findall(r"^GPU (\d+):(?:.*\(UUID: ([^)]+)\))?", listed.stdout, flags=re.MULTILINE)
    return [uuid or f"GPU-{place}" for place, uuid in lines]


def _visible(count: int) -> list[str]:
    """The entries of ``CUDA_VISIBLE_DEVICES``; the places of ``count`` GPUs where it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = map(str, range(count)) if visible is None else map(str.strip, visible.split(","))
    return [entry for entry in entries if entry not in ("", "-1")]


def _find(entry: str, names: list[str]) -> str | None:
    """The GPU of ``names`` that an entry of ``CUDA_VISIBLE_DEVICES`` stands for."""
    if entry.isdecimal():
        return names[int(entry)] if int(entry) < len(names) else None
    if entry.startswith("MIG-") and names:
        return entry
    # CUDA accepts the beginning of a UUID.
    return next((name for name in names if name.startswith(entry)), None)
