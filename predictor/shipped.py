"""Read the files of predictor/data, which come with the package."""

import csv
from pathlib import Path

__all__ = ["shipped_bytes", "shipped_path", "shipped_rows", "shipped_text"]


def shipped_path(name: str) -> Path:
    """The path of the file or folder ``name`` in predictor/data."""
    return Path(__file__).with_name("data") / name


def shipped_bytes(name: str) -> bytes:
    """The content of ``name`` in predictor/data."""
    return shipped_path(name).read_bytes()


def shipped_text(name: str) -> str:
    """The text of ``name`` in predictor/data, in UTF-8."""
    return shipped_path(name).read_text(encoding="utf-8")


def shipped_rows(name: str) -> list[dict[str, str]]:
    """The rows of the CSV file ``name`` in predictor/data, by column."""
    return list(csv.DictReader(shipped_text(name).splitlines()))
