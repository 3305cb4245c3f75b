"""Pages in Prefect: pictures inside a report, texts that are not markup, and an API that does not answer."""

import base64
import json

import pytest

from precision_time.flows.ground import prefect_artifacts as artifacts
from precision_time.flows.ground.prefect_artifacts import LiveArtifact, LiveTable, ProgressArtifact, embed_pictures

PNG = b"\x89PNG..."


def test_a_report_carries_its_pictures_with_their_words() -> None:
    encoded = base64.b64encode(PNG).decode()
    assert embed_pictures("a\n\n![what is seen](plots/x.png)\n", {"x.png": PNG}) == (
        f"a\n\n![what is seen](data:image/png;base64,{encoded})\n"
    )


@pytest.mark.parametrize("pictures", [{}, {"x.png": b"0" * 60_001}])
def test_a_picture_that_is_missing_or_heavy_is_named_instead(pictures: dict[str, bytes]) -> None:
    assert embed_pictures("![seen](plots/x.png)", pictures) == "(seen: `plots/x.png` beside the stored report)"


def test_only_pictures_of_the_report_are_put_into_it() -> None:
    report = "![a](http://elsewhere/x.png) ![b](../x.png)"
    assert embed_pictures(report, {"x.png": PNG}) == report


class Api:
    """Stands for Prefect's client; keeps its calls, and fails ``failures`` times first."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.created: list[object] = []
        self.changed: list[dict[str, object]] = []

    def create_artifact(self, artifact: object) -> object:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the API is away")
        self.created.append(artifact)
        return type("Created", (), {"id": "the-id"})

    def request(self, method: str, path: str, *, json: dict[str, object], path_params: dict[str, str]) -> None:
        assert (method, path, path_params) == ("PATCH", "/artifacts/{id}", {"id": "the-id"})
        self.changed.append(json)


@pytest.fixture
def in_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts.flow_run, "id", "7f7f7f7f-0000-4000-8000-000000000000", raising=False)


@pytest.mark.usefixtures("in_run")
def test_a_page_is_created_once_and_then_changed_also_when_the_api_was_away_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = Api(failures=1)
    monkeypatch.setattr(artifacts, "get_client", lambda *, sync_client: api)
    bar = ProgressArtifact("bar", description="cells")
    for fraction in (0.1, 0.5, 2.0):
        bar.update(fraction)
    assert [artifact.data for artifact in api.created] == [50.0]  # type: ignore[attr-defined]
    assert api.changed == [{"data": 100.0, "description": "cells"}]


@pytest.mark.usefixtures("in_run")
def test_a_table_is_cut_and_its_texts_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    monkeypatch.setattr(artifacts, "get_client", lambda *, sync_client: api)
    table = LiveTable("grid", description="cells")
    rows = [{"cause": "<b> ![x](http://elsewhere)", "time": float("nan"), "GPUs": 2}]
    table.write_rows(rows * 1001)
    (created,) = api.created
    shown = json.loads(created.data)  # type: ignore[attr-defined]
    assert (len(shown), created.description) == (1000, "cells (the first 1000 of 1001 rows)")  # type: ignore[attr-defined]
    assert shown[0] == {"cause": "&lt;b> !\\[x](http://elsewhere)", "time": None, "GPUs": 2}
    table.write_rows(rows)
    assert api.changed[0]["description"] == "cells"


def test_outside_of_a_run_no_page_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "get_client", lambda **_: pytest.fail("Prefect was asked"))
    assert LiveArtifact("markdown", "page", description="").write("text") is False
