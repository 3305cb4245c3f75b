"""NVIDIA's GPUs of this machine, as its driver lists them and ``CUDA_VISIBLE_DEVICES`` shows them; no torch needed."""

import os
import re
import shutil
import subprocess

__all__ = ["count_gpus", "name_devices"]

LIST_S = 60.0


def count_gpus() -> int:
    """GPUs of the driver that are visible; 0 without a driver."""
    known = _list_gpus()
    return sum(_find(entry, known) is not None for entry in _visible(len(known)))


def name_devices(device_type: str, *, count: int | None = None) -> tuple[str, ...]:
    """The devices that a cluster of this machine uses: ``cpu``, or the first ``count`` GPUs that are visible, by UUID.

    A GPU of which NVIDIA's tool tells no UUID goes by its entry in ``CUDA_VISIBLE_DEVICES``.
    """
    if device_type != "cuda":
        return ("cpu",)
    known = _list_gpus()
    entries = _visible(len(known) or count or 1)[:count]
    return tuple(_find(entry, known) or (f"GPU-{entry}" if entry.isdecimal() else entry) for entry in entries)


def _list_gpus() -> list[str]:
    """Each GPU in the driver's order, by its UUID or as ``GPU-PLACE``; none without a driver."""
    found = shutil.which("nvidia-smi")
    if found is None:
        return []
    listed = subprocess.run([found, "-L"], capture_output=True, text=True, check=False, timeout=LIST_S)
    if listed.returncode:
        return []
    lines = re.findall(r"^GPU (\d+):(?:.*\(UUID: ([^)]+)\))?", listed.stdout, flags=re.MULTILINE)
    return [uuid or f"GPU-{place}" for place, uuid in lines]


def _visible(count: int) -> list[str]:
    """The entries of ``CUDA_VISIBLE_DEVICES``; the places of ``count`` GPUs where it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = map(str, range(count)) if visible is None else map(str.strip, visible.split(","))
    return [entry for entry in entries if entry not in ("", "-1")]


def _find(entry: str, known: list[str]) -> str | None:
    if entry.isdecimal():
        return known[int(entry)] if int(entry) < len(known) else None
    if entry.startswith("MIG-") and known:
        return entry
    # CUDA takes the beginning of a UUID for the whole.
    return next((name for name in known if name.startswith(entry)), None)
