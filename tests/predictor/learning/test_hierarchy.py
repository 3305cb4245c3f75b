"""The stages learn the error of the closed forms, are trained out of fold, and load from files as they were saved."""

import dataclasses
import json

import numpy as np
import pytest
import xgboost

from precision_time.predictor.learning.hierarchy import STAGE_FEATURES, HierarchicalPredictor, closed_parts
from precision_time.predictor.rows.features import feature_matrix
from precision_time.predictor.rows.observations import Observation, observe
from precision_time.storage.errors import InputError, IntegrityError, UnknownNameError


@pytest.fixture(scope="module")
def rows(measure) -> list[Observation]:
    return observe(measure())


@pytest.fixture(scope="module")
def predictor(rows) -> HierarchicalPredictor:
    return HierarchicalPredictor.fit(rows)


def predict(predictor: HierarchicalPredictor, rows: list[Observation]):
    return predictor.predict([observation.query for observation in rows])


def test_it_learns_the_factors_between_measured_and_closed_form(predictor, rows) -> None:
    parts = predict(predictor, rows)
    measured = np.array([observation.measurement.iteration_time_s for observation in rows])
    closed = np.array([observation.closed.iteration_time_s for observation in rows])
    assert np.abs(parts.iteration_time_s / measured - 1).mean() < 0.03
    assert np.abs(closed / measured - 1).mean() > 0.3


def test_the_parts_add_up_and_one_rank_communicates_nothing(predictor, rows) -> None:
    parts = predict(predictor, rows)
    np.testing.assert_allclose(parts.iteration_time_s, parts.compute_time_s + parts.exposed_communication_s)
    single = np.array([observation.setup.world_size == 1 for observation in rows])
    assert (parts.communication_time_s[single] == 0).all()
    assert (parts.exposed_communication_s[single] == 0).all()
    assert (parts.communication_time_s[~single] > 0).all()


def test_the_communication_stage_learns_its_own_factor(predictor, rows) -> None:
    parallel_rows = [observation for observation in rows if observation.setup.world_size > 1]
    parts = predict(predictor, parallel_rows)
    measured = np.array([observation.measurement.communication_time_s for observation in parallel_rows])
    assert np.abs(parts.communication_time_s / measured - 1).mean() < 0.03


def test_single_rank_rows_alone_leave_communication_to_the_closed_form(measure) -> None:
    rows = observe(measure(world_sizes=(1,)))
    predictor = HierarchicalPredictor.fit(rows)
    assert set(predictor.forests) == {"compute"}
    wide = observe(measure(world_sizes=(2,)))
    parts = predict(predictor, wide)
    closed = closed_parts([observation.query for observation in wide])
    np.testing.assert_allclose(parts.communication_time_s, closed.communication_time_s)
    np.testing.assert_allclose(parts.exposed_communication_s, closed.exposed_communication_s)


def test_the_same_rows_and_seed_give_the_same_trees(rows, predictor) -> None:
    assert HierarchicalPredictor.fit(rows, seed=0).to_files() == predictor.to_files()


def test_a_predictor_loads_from_files_without_xgboost_models(predictor, rows) -> None:
    files = predictor.with_intervals({"known": 0.2}, level=0.9).to_files()
    loaded = HierarchicalPredictor.from_files({name: files[name] for name in ("predictor.json", "trees.npz")})
    np.testing.assert_array_equal(predict(loaded, rows).iteration_time_s, predict(predictor, rows).iteration_time_s)
    assert loaded.domain == predictor.domain
    assert loaded.radii == {"known": 0.2}


def test_the_published_trees_equal_the_published_xgboost_model(predictor, rows) -> None:
    files = predictor.to_files()
    booster = xgboost.Booster()
    booster.load_model(bytearray(files["xgboost-compute.json"]))
    matrix = feature_matrix([observation.query.row for observation in rows], STAGE_FEATURES["compute"])
    np.testing.assert_array_equal(
        predictor.forests["compute"].predict(matrix), booster.predict(xgboost.DMatrix(matrix))
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", '{"stages": {}}', "[" * 5000, '{"stages": 3, "domain": {}, "radii": {}, "level": "x"}'],
)
def test_an_unusable_description_is_refused(predictor, text: str) -> None:
    files = predictor.to_files() | {"predictor.json": text.encode()}
    with pytest.raises(IntegrityError, match=r"predictor\.json"):
        HierarchicalPredictor.from_files(files)


@pytest.mark.parametrize("change", ["renamed", "reordered", "shorter", "longer", "unknown stage"])
def test_features_of_another_version_are_refused_by_name(predictor, change: str) -> None:
    files = predictor.to_files()
    described = json.loads(files["predictor.json"])
    names = described["stages"]["compute"]
    described["stages"]["compute"] = {
        "renamed": ["other", *names[1:]],
        "reordered": names[::-1],
        "shorter": names[:-1],
        "longer": [*names, "other"],
        "unknown stage": names,
    }[change]
    if change == "unknown stage":
        described["stages"]["magic"] = names
    files["predictor.json"] = json.dumps(described).encode()
    with pytest.raises(IntegrityError, match="features of stage"):
        HierarchicalPredictor.from_files(files)


def test_three_rows_are_too_few_to_train_on(rows) -> None:
    with pytest.raises(InputError, match="too few measurements"):
        HierarchicalPredictor.fit(rows[:3])


def test_a_measurement_of_an_unknown_model_is_named(rows) -> None:
    with pytest.raises(UnknownNameError, match="resnet50"):
        observe([dataclasses.replace(rows[0].measurement, model="resnet5O")])
