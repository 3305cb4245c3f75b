"""The champion is the version that its alias points to now; a bundle holds the files that answer questions."""

import dataclasses
from pathlib import Path

import pytest

from precision_time.predictor.answering.artifact import zoo_digest
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.observations import observe
from precision_time.predictor.workloads.zoo import ZooTable
from precision_time.storage.errors import InputError, IntegrityError, NotFoundError
from precision_time.storage.manifests import ArtifactManifest
from precision_time.storage.registry import Registry
from precision_time.tasks.publishing import publish
from precision_time.tasks.publishing.champion import find_champion, trained_cells
from precision_time.tasks.publishing.publish import export_bundle, publish_predictor
from precision_time.tests.tasks.publishing.made_up import NOT_VALIDATED, make_snapshot


def test_the_champion_is_the_version_the_alias_points_to_now(tmp_path: Path, measure, publish_made_up) -> None:
    url = str(tmp_path)
    assert find_champion(url, "default@champion") is None
    publish_made_up(url, measure(models=("mlp",)))
    first = find_champion(url, "default@champion")
    publish_made_up(url, measure(models=("mlp", "vit_tiny")))
    second = find_champion(url, "default@champion")
    assert first is not None
    assert second is not None
    assert (first.manifest.version, second.manifest.version) == (1, 2)
    Registry(url).roll_back("default")
    assert find_champion(url, "default@champion") == first


def test_the_champion_knows_the_cells_it_was_trained_on(tmp_path: Path, measure, publish_made_up) -> None:
    measured = measure(models=("mlp",))
    publish_made_up(str(tmp_path), measured)
    champion = find_champion(str(tmp_path), "default@champion")
    assert champion is not None
    assert trained_cells(str(tmp_path), champion) == {row.cell_id for row in measured}


def test_an_artifact_without_its_list_of_cells_is_refused(
    tmp_path: Path, measure, publish_made_up, monkeypatch
) -> None:
    publish_made_up(str(tmp_path), measure(models=("mlp",)))
    champion = find_champion(str(tmp_path), "default@champion")
    assert champion is not None
    load = Registry.load
    without = lambda self, name: (load(self, name)[0], {"training.json": b"[]"})  # noqa: E731
    monkeypatch.setattr(Registry, "load", without)
    with pytest.raises(IntegrityError, match=r"training\.json"):
        trained_cells(str(tmp_path), champion)


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def url(tmp_path: Path, measure, publish_made_up) -> str:
    """A registry with one version of ``default``."""
    publish_made_up(str(tmp_path / "registry"), measure(models=("mlp",)))
    return str(tmp_path / "registry")


def test_a_bundle_holds_what_answers_under_a_manifest_of_its_own(tmp_path: Path, url: str) -> None:
    bundle = export_bundle(url, "default@champion", into=tmp_path / "bundled")
    source, files = Registry(url).load("default@1")
    assert bundle.artifact_id == "bundled@1"
    serving = {"predictor.json", "trees.npz", "workloads.json"}
    assert {file.path for file in bundle.files} == serving
    assert set(files) > serving
    manifest, exported = Registry(tmp_path).load("bundled@1")
    assert manifest == bundle
    assert exported == {name: files[name] for name in serving}
    changed = {"name", "files", "manifest_sha256"}
    assert manifest.model_dump(exclude=changed) == source.model_dump(exclude=changed)
    assert set(files_below(tmp_path / "bundled")) == {f"1/{name}" for name in {*serving, "manifest.json"}}


def test_a_bundle_of_the_same_content_is_kept_and_of_other_content_replaced(
    tmp_path: Path, url: str, measure, publish_made_up
) -> None:
    export_bundle(url, "default", into=tmp_path / "bundled")
    before = files_below(tmp_path / "bundled")
    publish_made_up(url, measure(models=("mlp",)))
    assert export_bundle(url, "default@2", into=tmp_path / "bundled").artifact_id == "bundled@1"
    assert files_below(tmp_path / "bundled") == before
    publish_made_up(url, measure(models=("mlp", "vit_tiny")))
    assert export_bundle(url, "default@3", into=tmp_path / "bundled").artifact_id == "bundled@2"
    assert {path.partition("/")[0] for path in files_below(tmp_path / "bundled")} == {"2"}


def test_a_damaged_bundle_is_replaced(tmp_path: Path, url: str) -> None:
    export_bundle(url, "default", into=tmp_path / "bundled")
    (tmp_path / "bundled" / "1" / "trees.npz").write_bytes(b"none")
    assert export_bundle(url, "default", into=tmp_path / "bundled").artifact_id == "bundled@2"
    Registry(tmp_path).verify("bundled@2")


def test_a_bundle_above_its_limit_and_one_in_a_registry_are_refused(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="a registry keeps versions in this folder"):
        export_bundle(url, "default", into=Path(url) / "default")
    assert Registry(url).versions("default") == [1]
    with pytest.raises(NotFoundError):
        export_bundle(url, "other", into=tmp_path / "bundled")
    monkeypatch.setattr(publish, "MAX_BUNDLE_BYTES", 1000)
    with pytest.raises(InputError, match="at most 1000 bytes"):
        export_bundle(url, "default", into=tmp_path / "bundled")
    assert not (tmp_path / "bundled").exists()


@pytest.mark.parametrize(
    ("campaign", "others", "assumed"),
    [
        (["H100-SXM5-80GB"], ["A100-SXM4-80GB"], "H100-SXM5-80GB"),
        ([], ["H100-SXM5-80GB", "A100-SXM4-80GB"], "A100-SXM4-80GB"),
        ([], ["H100-SXM5-80GB"], "H100-SXM5-80GB"),
    ],
    ids=["a campaign's", "the usual one of tables", "the most measured of tables"],
)
def test_the_device_that_is_assumed_is_that_of_campaigns_first(
    campaign: list[str], others: list[str], assumed: str, tmp_path: Path, measure
) -> None:
    rows = [row for gpu in campaign for row in observe(measure(models=("mlp",), gpu=gpu))]
    for gpu in others:
        rows += [
            dataclasses.replace(row, index=number)
            for number, row in enumerate(observe(measure(models=("mlp",), batches=(8, 16, 32, 64), gpu=gpu)))
        ]
    manifest = publish_predictor(
        HierarchicalPredictor.fit(rows),
        make_snapshot(rows),
        NOT_VALIDATED,
        report="card",
        registry=str(tmp_path),
        name="default",
        holdout_models=(),
        seed=0,
    )
    assert manifest.default_gpu == assumed


def test_an_artifact_carries_its_limits_its_plots_and_both_forms_of_its_trees(tmp_path: Path, measure) -> None:
    rows = observe(measure())
    plots = {"error.png": b"\x89PNG\r\n\x1a\n...", "speed.svg": b"<svg/>"}

    def publish_with(plots: dict[str, bytes]) -> ArtifactManifest:
        return publish_predictor(
            HierarchicalPredictor.fit(rows).with_intervals({"known": 0.1, "new model": 0.4}, level=0.9),
            make_snapshot(rows, sha256="5" * 64),
            NOT_VALIDATED,
            report="# Card\n\n![Speed](plots/speed.svg)\n\n![Error](plots/error.png)\n\nThe rest.\n",
            registry=str(tmp_path),
            name="default",
            holdout_models=("vit_b16",),
            seed=0,
            plots=plots,
        )

    manifest, files = Registry(tmp_path).load(publish_with(plots).artifact_id)
    assert files["plots/error.png"] == plots["error.png"]
    assert files["plots/speed.svg"] == plots["speed.svg"]
    assert {"trees.npz", "xgboost-compute.json", "training.json"} <= set(files)
    walks = ZooTable(files["walks.parquet"], name="walks")
    assert {row.measurement.model for row in rows} <= set(walks.rows)
    assert len(files["walks.parquet"]) < 60_000
    bundle = export_bundle(str(tmp_path), manifest.artifact_id, into=tmp_path / "beside" / "bundled")
    assert {file.path for file in bundle.files} == {"predictor.json", "report.md", "trees.npz"}
    card = files[publish.ACCURACY_CARD].decode()
    assert card.startswith("# Card\n\n![Speed](plots/speed.svg)\n")
    beside = Registry(tmp_path / "beside").load(bundle.artifact_id)[1][publish.ACCURACY_CARD].decode()
    assert beside.startswith("# Card\n\nThe rest.\n\n## Known limits\n")
    assert card.endswith(beside.removeprefix("# Card\n\n"))
    assert all(limit in card for limit in (*manifest.known_limits, manifest.training_data_sha256, zoo_digest()))
    limits = "; ".join(manifest.known_limits)
    for limit in (
        "which get the widest one: new pair, new gpu, new family,",
        "held out, so never trained on: vit_b16",
        "trained on 3 networks",
        "no CPU was measured",
        "never trained on these precisions: tf32, amp_fp16,",
        "at most 2 ranks and 1 micro-steps",
    ):
        assert limit in limits
    assert "no GPU" not in limits
    for name, data in (("a.png", b"<svg/>"), ("a.html", b"<svg/>"), ("../a.svg", b"<svg/>")):
        with pytest.raises(InputError):
            publish_with({name: data})
    assert Registry(tmp_path).versions("default") == [1]
