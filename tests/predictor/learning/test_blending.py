"""How far the trees are trusted: all the way where what they learned carries over, hardly where it does not."""

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
    """A factor that nothing but the name tells: between a half and twice."""
    return 2.0 ** random.Random(name).uniform(-1, 1)


def weights(observations: list[Observation]) -> dict[str, float]:
    return {regime: blend.weight for regime, blend in learn_blend(observations, seed=0).items()}


def test_a_weight_of_one_is_the_trees_and_of_zero_the_corrected_closed_form() -> None:
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


def test_what_the_precision_decides_carries_over_to_every_regime(many_rows, few_rounds) -> None:
    learned = learn_blend(many_rows, seed=0)
    assert set(learned) == set(REGIMES)
    assert min(blend.weight for blend in learned.values()) > 0.9
    # half of the rows take 1.5, the other half 2.5 times the closed form
    assert learned["known"].factor == pytest.approx(1.94, abs=0.4)


def test_what_the_network_alone_decides_does_not_carry_over_to_another_network(make_world, few_rounds) -> None:
    found = weights(make_world(lambda measured: by_chance(measured.model)))
    assert found["known"] == 1.0
    assert found["new gpu"] > 0.9
    assert found["new model"] < 0.4
    assert found["new family"] < 0.4
    # new in two ways: as cautious as the more cautious of both
    assert found["new model and gpu"] == found["new family"]


def test_what_the_chip_alone_decides_does_not_carry_over_to_another_chip(make_world, few_rounds) -> None:
    found = weights(make_world(lambda measured: by_chance(measured.gpu)))
    assert found["new model"] > 0.9
    assert found["new gpu"] < 0.4
    assert found["new model and gpu"] == found["new gpu"]


def test_what_only_large_worlds_show_is_not_believed_beyond_the_largest_one(make_world, few_rounds) -> None:
    def turns(measured: Measurement) -> float:
        return 2.0 if measured.world_size == 8 else 0.5 if measured.world_size > 8 else 1.0

    assert weights(make_world(turns))["beyond scale"] == 0.0


def test_without_rows_of_many_ranks_scale_is_trusted_as_another_gpu_is(make_world, few_rounds) -> None:
    found = weights(make_world(lambda measured: by_chance(measured.gpu), world_sizes=(1, 8)))
    assert found["beyond scale"] == found["new gpu"]


def test_a_regime_that_no_rows_can_stand_for_is_left_to_the_closed_forms(make_world, few_rounds) -> None:
    found = weights(make_world(lambda measured: 1.5, gpus=("A100-SXM4-80GB", "V100-SXM2-16GB"), world_sizes=(1,)))
    assert set(found) == {"known", "new pair", "new model", "new family"}


def test_sister_parts_of_one_chip_are_left_out_together(make_world, few_rounds) -> None:
    sisters = ("A100-SXM4-80GB", "A100-SXM4-40GB", "A100-PCIe-40GB", "A100-PCIe-80GB")
    assert "new gpu" not in weights(make_world(lambda measured: 1.5, gpus=sisters, world_sizes=(1,)))


def test_the_same_rows_and_seed_give_the_same_blend(many_rows, few_rounds) -> None:
    rows = many_rows[:200]
    assert learn_blend(rows, seed=1) == learn_blend(rows, seed=1)


def test_a_fit_on_many_rows_learns_its_blend_and_answers_by_it(large_predictor: HierarchicalPredictor, many_rows):
    assert "total" in large_predictor.forests
    assert set(large_predictor.blend) == set(REGIMES)
    parts = large_predictor.predict([seen.query for seen in many_rows])
    measured = np.array([seen.measurement.iteration_time_s for seen in many_rows])
    closed = np.array([seen.closed.iteration_time_s for seen in many_rows])
    assert np.abs(parts.iteration_time_s / measured - 1).mean() < 0.05
    assert np.abs(closed / measured - 1).mean() > 0.3
