"""The weight of the trees: near 1 where an effect that they learned carries over, near 0 where it does not."""

import random

import numpy as np
import pytest

from precision_time.predictor.learning.blending import CLOSED_FORM_ONLY, Blend, apply_blend, learn_blend
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.learning.regimes import REGIMES
from precision_time.predictor.rows.observations import Observation
from precision_time.storage.schema import Measurement

TREES_S, CLOSED_S = np.array([2.0, 3.0]), np.array([8.0, 5.0])


def by_chance(name: str) -> float:
    """A factor between a half and two that depends on nothing but the name."""
    return 2.0 ** random.Random(name).uniform(-1, 1)


def weights(observations: list[Observation]) -> dict[str, float]:
    return {regime: blend.weight for regime, blend in learn_blend(observations, seed=0).items()}


def test_weight_1_is_the_trees_and_weight_0_the_corrected_closed_form() -> None:
    blend = {"known": Blend(1.0, 3.0), "new gpu": Blend(0.0, 3.0)}
    np.testing.assert_allclose(
        apply_blend([blend["known"], blend["new gpu"]], trees_s=TREES_S, closed_s=CLOSED_S), [2.0, 15.0]
    )


def test_a_weight_between_is_the_geometric_mean() -> None:
    blended = apply_blend([Blend(0.5, 1.0)] * 2, trees_s=TREES_S, closed_s=CLOSED_S)
    np.testing.assert_allclose(blended, [4.0, np.sqrt(15.0)])
    leaning = apply_blend([Blend(0.25, 2.0)], trees_s=TREES_S[:1], closed_s=CLOSED_S[:1])
    np.testing.assert_allclose(leaning, 2.0**0.25 * 16.0**0.75)


def test_in_a_regime_without_a_blend_the_closed_form_answers_as_it_is() -> None:
    blended = apply_blend([CLOSED_FORM_ONLY, Blend(1.0, 9.0)], trees_s=TREES_S, closed_s=CLOSED_S)
    np.testing.assert_allclose(blended, [8.0, 3.0])
    assert CLOSED_FORM_ONLY == (0.0, 1.0)


def test_an_effect_of_the_precision_carries_over_to_every_regime(many_rows, few_rounds) -> None:
    learned = learn_blend(many_rows, seed=0)
    assert set(learned) == set(REGIMES)
    assert min(blend.weight for blend in learned.values()) > 0.9
    # half of the rows take 1.5, the other half 2.5 times the closed form
    assert learned["known"].factor == pytest.approx(1.94, abs=0.4)


def test_an_effect_of_the_network_does_not_carry_over_to_another_network(make_world, few_rounds) -> None:
    learned_weights = weights(make_world(lambda measured: by_chance(measured.model)))
    assert learned_weights["known"] == 1.0
    assert learned_weights["new gpu"] > 0.9
    assert learned_weights["new model"] < 0.4
    assert learned_weights["new family"] < 0.4
    # new in two ways: the smaller weight of the two
    assert learned_weights["new model and gpu"] == learned_weights["new family"]


def test_an_effect_of_the_chip_does_not_carry_over_to_another_chip(make_world, few_rounds) -> None:
    learned_weights = weights(make_world(lambda measured: by_chance(measured.gpu)))
    assert learned_weights["new model"] > 0.9
    assert learned_weights["new gpu"] < 0.4
    assert learned_weights["new model and gpu"] == learned_weights["new gpu"]


def test_an_effect_of_large_worlds_does_not_carry_over_to_larger_ones(make_world, few_rounds) -> None:
    def turns(measured: Measurement) -> float:
        return 2.0 if measured.world_size == 8 else 0.5 if measured.world_size > 8 else 1.0

    assert weights(make_world(turns))["beyond scale"] == 0.0


def test_without_large_worlds_scale_has_the_weight_of_a_new_gpu(make_world, few_rounds) -> None:
    learned_weights = weights(make_world(lambda measured: by_chance(measured.gpu), world_sizes=(1, 8)))
    assert learned_weights["beyond scale"] == learned_weights["new gpu"]


def test_a_regime_with_too_few_rows_has_no_blend(make_world, few_rounds) -> None:
    learned_weights = weights(
        make_world(lambda measured: 1.5, gpus=("A100-SXM4-80GB", "V100-SXM2-16GB"), world_sizes=(1,))
    )
    assert set(learned_weights) == {"known", "new pair", "new model", "new family"}


def test_sister_parts_of_one_chip_are_left_out_together(make_world, few_rounds) -> None:
    sisters = ("A100-SXM4-80GB", "A100-SXM4-40GB", "A100-PCIe-40GB", "A100-PCIe-80GB")
    assert "new gpu" not in weights(make_world(lambda measured: 1.5, gpus=sisters, world_sizes=(1,)))


def test_the_same_rows_and_seed_give_the_same_blend(many_rows, few_rounds) -> None:
    rows = many_rows[:200]
    assert learn_blend(rows, seed=1) == learn_blend(rows, seed=1)


def test_a_fit_on_many_rows_learns_its_blend_and_answers_by_it(large_predictor: HierarchicalPredictor, many_rows):
    assert "total" in large_predictor.forests
    assert set(large_predictor.blend) == set(REGIMES)
    parts = large_predictor.predict([observation.query for observation in many_rows])
    measured = np.array([observation.measurement.iteration_time_s for observation in many_rows])
    closed = np.array([observation.closed.iteration_time_s for observation in many_rows])
    assert np.abs(parts.iteration_time_s / measured - 1).mean() < 0.05
    assert np.abs(closed / measured - 1).mean() > 0.3
