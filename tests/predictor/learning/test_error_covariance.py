"""Pooling: what errors of some rows say of others, and how their likeness is found."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from precision_time.predictor.learning.error_covariance import (
    DIFFERENCES,
    SHIPPED_EFFECTS,
    Effect,
    Traits,
    effects_from_dict,
    effects_of,
    pool,
)
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.measured_rows import read_measured_rows
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.fit_error_covariance import CHIP, NETWORK, fit_effect
from precision_time.storage.errors import InputError, IntegrityError


def ask(**changes: Any) -> Query:
    told = {"model": "resnet50", "gpu": "A100-SXM4-80GB", "precision": "amp_fp16", "batch_size": 64}
    ((setup, _),) = read_measured_rows([told | {"iteration_time_s": 1.0} | changes])
    return Query.of(setup)


EFFECT = Effect(variance=0.09, repeat=0.9, correlations={"network": 0.0, "precision": 0.5, "batch": 0.8})


def test_one_row_moves_its_like_by_the_correlation_and_what_is_unrelated_not_at_all() -> None:
    queries = [ask(), ask(precision="fp32"), ask(batch_size=256), ask(model="vgg16")]
    found = pool([(ask(), 0.2)], queries, effects=[EFFECT])
    assert found.shift == pytest.approx([0.9 * 0.2, 0.45 * 0.2, 0.9 * 0.8**2 * 0.2, 0.0])
    assert found.narrowing[3] == 1.0
    assert (np.diff(found.narrowing[[0, 2, 1, 3]]) > 0).all()
    assert found.weights.shape == (4, 1)


def test_more_rows_that_agree_move_further_and_narrow_more() -> None:
    rows = [(ask(batch_size=batch), 0.2) for batch in (32, 128, 256)]
    one = pool(rows[:1], [ask()], effects=[EFFECT])
    three = pool(rows, [ask()], effects=[EFFECT])
    assert one.shift[0] < three.shift[0] < 0.2
    assert three.narrowing[0] < one.narrowing[0]


def test_a_farther_model_shrinks_less_than_a_known_one() -> None:
    rows, asked = [(ask(batch_size=32), 0.1)], [ask()]
    moved = [pool(rows, asked, effects=[SHIPPED_EFFECTS[name]]).shift[0] for name in ("known", "new model")]
    assert 0.05 < moved[0] < moved[1] < 0.1
    farthest = [pool(rows, [ask(gpu="H100-SXM5-80GB")], effects=[SHIPPED_EFFECTS[name]]).shift[0] for name in
                ("known", "new family")]  # fmt: skip
    assert farthest[0] < 0.01 < 0.05 < farthest[1]


def test_rows_of_other_networks_calibrate_a_new_chip_and_nothing_else() -> None:
    effect = SHIPPED_EFFECTS["new gpu"]
    row = [(ask(model="vgg16", gpu="L4-24GB"), 0.2)]
    found = pool(row, [ask(gpu="L4-24GB"), ask(gpu="T4-16GB")], effects=[effect])
    assert 0.02 < found.shift[0] < 0.2
    assert found.shift[1] == 0.0


def test_an_outlier_of_another_network_counts_as_a_large_error_only() -> None:
    effect = dataclasses.replace(SHIPPED_EFFECTS["new gpu"], correlations={"network": 0.5, "chip": 0.0})
    here, there = ask(gpu="L4-24GB"), ask(model="vgg16", gpu="L4-24GB", batch_size=8)
    deviation = math.sqrt(effect.variance)
    shifts = [pool([(here, error)], [there], effects=[effect]).shift[0] for error in (deviation, 3.0, 9.0)]
    assert shifts[0] < shifts[1] == shifts[2] < 1.6 * shifts[0]
    # of the same run it is believed as it is
    assert pool([(here, 3.0)], [here], effects=[effect]).shift[0] == pytest.approx(3.0 * effect.repeat)


def test_surprising_rows_narrow_less_and_never_make_the_answer_surer_than_calm_ones() -> None:
    calm, wild = (pool([(ask(batch_size=32), error)], [ask()], effects=[EFFECT]).narrowing[0] for error in (0.05, 1.0))
    assert calm < wild


def test_the_same_run_measured_many_times_can_be_solved() -> None:
    found = pool([(ask(), 0.3)] * 40, [ask()], effects=[EFFECT])
    assert 0.29 < found.shift[0] < 0.3
    assert np.isfinite(found.narrowing).all()


def test_without_rows_or_without_deviation_nothing_moves() -> None:
    nothing = pool([], [ask()], effects=[EFFECT])
    assert nothing.shift.tolist() == [0.0]
    assert nothing.narrowing.tolist() == [1.0]
    still = pool([(ask(), 0.5)], [ask()], effects=[EFFECT], row_deviations=np.zeros((1, 1)))
    assert still.shift[0] == 0.0


def test_errors_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="log error"):
        pool([(ask(), math.nan)], [ask()], effects=[EFFECT])


def test_differences_are_counted_by_name() -> None:
    pair = Traits([ask(), ask(model="resnet101", precision="fp32", batch_size=16, gpus=8, compiled=True)])
    found = dict(zip(DIFFERENCES, pair.compare(np.array([0]), np.array([1]))[:, 0], strict=True))
    assert found["network"] == found["precision"] == found["any"] == found["code"] == 1.0
    assert found["chip"] == found["family"] == found["framework"] == found["input"] == 0.0
    assert found["batch"] == 2.0
    assert found["ranks"] == 3.0


@pytest.mark.parametrize(
    "values", [{"variance": 0.0}, {"repeat": 1.0}, {"correlations": {"colour": 0.5}}, {"correlations": {"chip": 1.5}}]
)
def test_an_effect_that_makes_no_sense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Effect(**{"variance": 0.1, "repeat": 0.9, "correlations": {}} | values)


def test_effects_survive_json_and_broken_ones_are_refused() -> None:
    described = {name: effect.to_dict() for name, effect in SHIPPED_EFFECTS.items()}
    assert effects_from_dict(described) == SHIPPED_EFFECTS
    with pytest.raises(IntegrityError, match="effects"):
        effects_from_dict({"known": {"variance": 0.1}})


def test_every_regime_has_effects_and_a_new_chip_its_own() -> None:
    assert effects_of("new gpu", {})[1] == SHIPPED_EFFECTS["new gpu"]
    assert effects_of("known", {"known": EFFECT}) == (EFFECT, None)
    with pytest.raises(InputError, match="regime"):
        effects_of("unheard of", {})


@pytest.fixture(scope="module")
def errors_of_networks(many_rows: list[Observation]) -> tuple[list[Query], Any]:
    """Errors of a shift of each network, another of each network at each precision, and noise of each row."""
    rng = np.random.default_rng(1)
    keys = {}
    errors = []
    rows = many_rows[::3]
    for seen in rows:
        network, precision = seen.network, seen.setup.precision.name
        for key, deviation in ((network, 0.2), ((network, precision), 0.4)):
            keys.setdefault(key, rng.normal(0, deviation))
        errors.append(keys[network] + keys[network, precision] + rng.normal(0, 0.05))
    return [seen.query for seen in rows], np.array(errors)


def test_a_fit_finds_which_differences_part_errors(errors_of_networks: tuple[list[Query], Any]) -> None:
    queries, errors = errors_of_networks
    effect = fit_effect(queries, errors, plan=NETWORK)
    assert effect is not None
    assert effect.correlations["precision"] < 0.9
    assert effect.correlations["gpu"] > 0.95
    assert effect.correlations["batch"] > 0.95
    assert effect.correlations["family"] == 0.0
    assert effect.variance == pytest.approx(float(np.mean(errors**2)), rel=0.5)
    assert fit_effect(queries, errors, plan=NETWORK) == effect


def test_a_fit_pairs_rows_of_one_fold_only(errors_of_networks: tuple[list[Query], Any]) -> None:
    queries, errors = errors_of_networks
    apart = np.arange(len(queries))
    assert fit_effect(queries, errors, apart, plan=NETWORK) is None


def test_a_fit_on_chips_leaves_other_chips_unrelated(errors_of_networks: tuple[list[Query], Any]) -> None:
    queries, errors = errors_of_networks
    effect = fit_effect(queries, errors, plan=CHIP)
    assert effect is not None
    assert effect.correlations["chip"] == 0.0
    assert effect.correlations["network"] < 0.5


def test_too_few_groups_teach_nothing(errors_of_networks: tuple[list[Query], Any]) -> None:
    queries, errors = errors_of_networks
    few = [place for place, query in enumerate(queries) if query.setup.workload.name in ("vgg16", "gpt2")]
    assert fit_effect([queries[place] for place in few], errors[few], plan=NETWORK) is None
    with pytest.raises(InputError, match="match"):
        fit_effect(queries, errors[:3], plan=NETWORK)
