"""Each regime is one record: exactly one holds, and the names in it exist."""

import dataclasses
import itertools

import pytest

from precision_time.predictor.learning.intervals import radii_by_regime
from precision_time.predictor.learning.regimes import (
    COVARIANCES,
    REGIMES,
    Distance,
    LeaveLargeWorldsOut,
    Regime,
    SmallestOf,
)
from precision_time.predictor.learning.splits import SPLITS


def distances() -> list[Distance]:
    """Every distance that is possible: a pair needs its network and its GPU."""
    every = (Distance(*parts) for parts in itertools.product((True, False), repeat=5))
    return [distance for distance in every if not distance.has_pair or (distance.has_network and distance.has_gpu)]


@pytest.mark.parametrize("distance", distances(), ids=str)
def test_exactly_one_regime_holds(distance: Distance) -> None:
    assert sum(regime.holds(distance) for regime in REGIMES.values()) == 1


@pytest.mark.parametrize("regime", REGIMES.values(), ids=lambda regime: regime.name)
def test_the_names_in_a_regime_exist(regime: Regime) -> None:
    assert set(regime.interval_splits) <= set(SPLITS)
    assert set(regime.covariances) <= set(COVARIANCES)
    if regime.plan is not None:
        assert regime.plan.split in SPLITS
    match regime.blend:
        case SmallestOf(others):
            assert set(others) < set(REGIMES)
        case LeaveLargeWorldsOut(otherwise):
            assert otherwise in REGIMES


def test_only_known_has_no_gap() -> None:
    assert [name for name, regime in REGIMES.items() if not regime.gaps] == ["known"]


def test_a_new_record_is_all_that_a_new_regime_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    record = dataclasses.replace(REGIMES["known"], name="known twice", holds=lambda distance: False)
    monkeypatch.setitem(REGIMES, record.name, record)
    errors = [0.1] * 60 + [0.2] * 60
    radii = radii_by_regime(errors, ["known"] * 60 + [record.name] * 60, level=0.9)
    assert radii[record.name] == pytest.approx(0.2)
