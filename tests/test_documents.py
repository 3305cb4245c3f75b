"""The documents are short, and every file that they name exists."""

import re
from pathlib import Path

import pytest

import precision_time

ROOT = Path(precision_time.__file__).parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "tests/README.md", "tests/benchmarks/RESULTS.md",
             *(f"{folder}/README.md" for folder in ("predictor", "flows", "casgd", "deploy")))  # fmt: skip
MOST_LINES = {"README.md": 150, "CONTRIBUTING.md": 120}
FOLDERS = ("flows", "tasks", "predictor", "casgd", "storage", "tests", "deploy")
#: A path in backticks: of the checkout, or of the document's own folder.
PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|toml|csv|parquet|yaml|sh|cu))?)`")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.mark.parametrize("document", MOST_LINES)
def test_a_document_is_short_enough_to_be_read(document: str) -> None:
    assert len((ROOT / document).read_text(encoding="utf-8").splitlines()) <= MOST_LINES[document]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_exists(document: str) -> None:
    folder, text = (ROOT / document).parent, (ROOT / document).read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not (folder / link).exists()]
    named = [path for path in PATH.findall(text) if path.partition("/")[0] in FOLDERS]
    missing += [path for path in named if not (ROOT / path).exists() and not (folder / path).exists()]
    assert missing == []
