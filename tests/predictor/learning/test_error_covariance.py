"""The covariance of errors: how measured errors correct other answers, and how the covariance is fitted."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from precision_time.predictor.learning.error_covariance import (
    DIFFERENCES,
    ErrorCovariance,
    SetupComparison,
    covariances_from_dict,
    predict_errors,
)
from precision_time.predictor.learning.regimes import (
    COVARIANCES,
    SHIPPED_COVARIANCES,
    covariances_of,
    find_error_source,
)
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.measured_rows import read_measured_rows
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.fit_error_covariance import fit_covariance
from precision_time.storage.errors import InputError, IntegrityError


def shift_of(rows: list[tuple[Query, float]], query: Query, covariance: ErrorCovariance) -> float:
    return float(predict_errors(rows, [query], covariances=[covariance]).shift[0])


def ask(**changes: Any) -> Query:
    usual = {"model": "resnet50", "gpu": "A100-SXM4-80GB", "precision": "amp_fp16", "batch_size": 64}
    ((setup, _),) = read_measured_rows([usual | {"iteration_time_s": 1.0} | changes])
    return Query.of(setup)


OF_NETWORK, OF_CHIP = COVARIANCES["new model"].pairs, COVARIANCES["new gpu"].pairs
COVARIANCE = ErrorCovariance(variance=0.09, repeat=0.9, correlations={"network": 0.0, "precision": 0.5, "batch": 0.8})


def test_a_row_moves_each_query_by_its_correlation() -> None:
    queries = [ask(), ask(precision="fp32"), ask(batch_size=256), ask(model="vgg16")]
    prediction = predict_errors([(ask(), 0.2)], queries, covariances=[COVARIANCE])
    assert prediction.shift == pytest.approx([0.9 * 0.2, 0.45 * 0.2, 0.9 * 0.8**2 * 0.2, 0.0])
    assert prediction.narrowing[3] == 1.0
    assert (np.diff(prediction.narrowing[[0, 2, 1, 3]]) > 0).all()
    assert prediction.weights.shape == (4, 1)


def test_more_rows_that_agree_move_further_and_narrow_more() -> None:
    rows = [(ask(batch_size=batch), 0.2) for batch in (32, 128, 256)]
    one = predict_errors(rows[:1], [ask()], covariances=[COVARIANCE])
    three = predict_errors(rows, [ask()], covariances=[COVARIANCE])
    assert one.shift[0] < three.shift[0] < 0.2
    assert three.narrowing[0] < one.narrowing[0]


def test_an_unknown_model_moves_further_than_a_known_one() -> None:
    rows = [(ask(batch_size=32), 0.1)]
    moved = [shift_of(rows, ask(), SHIPPED_COVARIANCES[name]) for name in ("known", "new model")]
    assert 0.05 < moved[0] < moved[1] < 0.1
    farthest = [shift_of(rows, ask(gpu="H100-SXM5-80GB"), SHIPPED_COVARIANCES[name]) for name in
                ("known", "new family")]  # fmt: skip
    assert farthest[0] < 0.01 < 0.05 < farthest[1]


def test_rows_of_other_networks_move_answers_for_a_new_chip_only() -> None:
    covariance = SHIPPED_COVARIANCES["new gpu"]
    row = [(ask(model="vgg16", gpu="L4-24GB"), 0.2)]
    prediction = predict_errors(row, [ask(gpu="L4-24GB"), ask(gpu="T4-16GB")], covariances=[covariance])
    assert 0.02 < prediction.shift[0] < 0.2
    assert prediction.shift[1] == 0.0


def test_an_outlier_of_another_network_is_clipped() -> None:
    covariance = dataclasses.replace(SHIPPED_COVARIANCES["new gpu"], correlations={"network": 0.5, "chip": 0.0})
    here, there = ask(gpu="L4-24GB"), ask(model="vgg16", gpu="L4-24GB", batch_size=8)
    deviation = math.sqrt(covariance.variance)
    shifts = [shift_of([(here, error)], there, covariance) for error in (deviation, 3.0, 9.0)]
    assert shifts[0] < shifts[1] == shifts[2] < 1.6 * shifts[0]
    # of the same run it is believed as it is
    assert shift_of([(here, 3.0)], here, covariance) == pytest.approx(3.0 * covariance.repeat)


def test_large_errors_narrow_less_than_small_ones() -> None:
    small, large = (
        predict_errors([(ask(batch_size=32), error)], [ask()], covariances=[COVARIANCE]).narrowing[0]
        for error in (0.05, 1.0)
    )
    assert small < large


def test_the_same_run_measured_many_times_can_be_solved() -> None:
    prediction = predict_errors([(ask(), 0.3)] * 40, [ask()], covariances=[COVARIANCE])
    assert 0.29 < prediction.shift[0] < 0.3
    assert np.isfinite(prediction.narrowing).all()


def test_without_rows_or_without_deviation_nothing_moves() -> None:
    nothing = predict_errors([], [ask()], covariances=[COVARIANCE])
    assert nothing.shift.tolist() == [0.0]
    assert nothing.narrowing.tolist() == [1.0]
    still = predict_errors([(ask(), 0.5)], [ask()], covariances=[COVARIANCE], row_deviations=np.zeros((1, 1)))
    assert still.shift[0] == 0.0


def test_errors_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InputError, match="log error"):
        predict_errors([(ask(), math.nan)], [ask()], covariances=[COVARIANCE])


def test_differences_are_counted_by_name() -> None:
    pair = SetupComparison([ask(), ask(model="resnet101", precision="fp32", batch_size=16, gpus=8, compiled=True)])
    differences = dict(zip(DIFFERENCES, pair.compare(np.array([0]), np.array([1]))[:, 0], strict=True))
    assert differences["network"] == differences["precision"] == differences["any"] == differences["code"] == 1.0
    assert differences["chip"] == differences["family"] == differences["framework"] == differences["input"] == 0.0
    assert differences["batch"] == 2.0
    assert differences["ranks"] == 3.0


@pytest.mark.parametrize(
    "values", [{"variance": 0.0}, {"repeat": 1.0}, {"correlations": {"colour": 0.5}}, {"correlations": {"chip": 1.5}}]
)
def test_an_unusable_covariance_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ErrorCovariance(**{"variance": 0.1, "repeat": 0.9, "correlations": {}} | values)


def test_covariances_are_the_same_after_json_and_incomplete_ones_are_refused() -> None:
    described = {name: covariance.to_dict() for name, covariance in SHIPPED_COVARIANCES.items()}
    assert covariances_from_dict(described) == SHIPPED_COVARIANCES
    with pytest.raises(IntegrityError, match="covariances"):
        covariances_from_dict({"known": {"variance": 0.1}})


def test_every_regime_has_covariances_and_a_new_chip_its_own() -> None:
    assert covariances_of(find_error_source("new gpu"), {})[1] == SHIPPED_COVARIANCES["new gpu"]
    assert covariances_of(find_error_source("known"), {"known": COVARIANCE}) == (COVARIANCE, None)
    with pytest.raises(InputError, match="regime"):
        find_error_source("unheard of")


@pytest.fixture(scope="module")
def errors_of_networks(many_rows: list[Observation]) -> tuple[list[Query], Any]:
    """Errors of a shift of each network, another of each network at each precision, and noise of each row."""
    rng = np.random.default_rng(1)
    keys = {}
    errors = []
    rows = many_rows[::3]
    for observation in rows:
        network, precision = observation.network, observation.setup.precision.name
        for key, deviation in ((network, 0.2), ((network, precision), 0.4)):
            keys.setdefault(key, rng.normal(0, deviation))
        errors.append(keys[network] + keys[network, precision] + rng.normal(0, 0.05))
    return [observation.query for observation in rows], np.array(errors)


def test_a_fit_finds_which_differences_lower_the_correlation(errors_of_networks: tuple[list[Query], Any]) -> None:
    queries, errors = errors_of_networks
    covariance = fit_covariance(queries, errors, plan=OF_NETWORK)
    assert covariance is not None
    assert covariance.correlations["precision"] < 0.9
    assert covariance.correlations["gpu"] > 0.95
    assert covariance.correlations["batch"] > 0.95
    assert covariance.correlations["family"] == 0.0
    assert covariance.variance == pytest.approx(float(np.mean(errors**2)), rel=0.5)
    assert fit_covariance(queries, errors, plan=OF_NETWORK) == covariance


def test_a_fit_pairs_rows_of_one_fold_only(errors_of_networks: tuple[list[Query], Any]) -> None:
    queries, errors = errors_of_networks
    apart = np.arange(len(queries))
    assert fit_covariance(queries, errors, apart, plan=OF_NETWORK) is None


def test_a_fit_on_chips_leaves_other_chips_unrelated(errors_of_networks: tuple[list[Query], Any]) -> None:
    queries, errors = errors_of_networks
    covariance = fit_covariance(queries, errors, plan=OF_CHIP)
    assert covariance is not None
    assert covariance.correlations["chip"] == 0.0
    assert covariance.correlations["network"] < 0.5


def test_too_few_groups_give_no_covariance(errors_of_networks: tuple[list[Query], Any]) -> None:
    queries, errors = errors_of_networks
    few = [place for place, query in enumerate(queries) if query.setup.workload.name in ("vgg16", "gpt2")]
    assert fit_covariance([queries[place] for place in few], errors[few], plan=OF_NETWORK) is None
    with pytest.raises(InputError, match="match"):
        fit_covariance(queries, errors[:3], plan=OF_NETWORK)
