import pytest

from precision_time.predictor.workloads.walk import OP_FAMILIES, READY_POINTS, RIDGES, OpCount, Walk
from precision_time.storage.errors import InputError


def make_walk(**changes):
    options = {
        "counts": {
            ("forward", "dense", "narrow"): OpCount(flops=100.0, bytes=10.0, bytes_fixed=4.0, fused=10.0, ops=2.0),
            ("forward", "softmax", "wide"): OpCount(bytes=6.0, ops=1.0),
            ("backward", "attention", "narrow"): OpCount(flops=40.0, bytes=8.0, fused=8.0, ops=1.0),
        },
        "roof_forward": (32.0, 16.0, 8.0, 8.0, 8.0),
        "roof_backward": (10.0, 10.0, 10.0, 10.0, 10.0),
        "saved": 3.0,
        "saved_fixed": 1.0,
        "peak": 5.0,
        "peak_fixed": 2.0,
        "peak_small": 1.0,
        "peak_small_fixed": 20.0,
        "scores": 16.0,
        "narrow_flops_share": 0.25,
        "aligned_flops_share": 0.5,
        "serial_steps": 7.0,
        "gradient_bytes": 400.0,
        "gradient_tensors": 2.0,
        "ready": tuple(point / READY_POINTS for point in range(1, READY_POINTS + 1)),
    }
    return Walk(**(options | changes))


def test_totals_are_over_the_chosen_counts():
    walk = make_walk()
    assert walk.total("bytes") == 24.0
    assert walk.total("bytes", phase="forward") == 16.0
    assert walk.total("flops", families=["attention", "softmax"]) == 40.0
    assert walk.total("bytes", number_format="wide", phase="forward") == 6.0
    assert walk.total("bytes_fixed") == 4.0


def test_a_roof_goes_through_its_ridges_and_on_beyond_them():
    walk = make_walk()
    assert [walk.roof_at(ridge, phase="forward") for ridge in RIDGES] == pytest.approx(list(walk.roof_forward))
    # Halfway in logs between 4 and 16.
    assert walk.roof_at(8.0, phase="forward") == pytest.approx((32.0 * 16.0) ** 0.5)
    assert walk.roof_at(2.0, phase="forward") == pytest.approx(64.0)
    assert walk.roof_at(5000.0, phase="forward") == 8.0
    assert walk.roof_at(30.0, phase="backward") == pytest.approx(10.0)
    assert make_walk(roof_forward=(0.0,) * len(RIDGES)).roof_at(8.0, phase="forward") == 0.0


def test_gradients_become_ready_between_the_points_too():
    walk = make_walk(ready=(0.5, *[1.0] * (READY_POINTS - 1)))
    assert walk.ready_at(0.0) == 0.0
    assert walk.ready_at(1 / 32) == pytest.approx(0.25)
    assert walk.ready_at(1 / 16) == pytest.approx(0.5)
    assert walk.ready_at(1.5) == 1.0


def test_a_larger_input_takes_more_of_everything_and_most_of_attention():
    walk = make_walk()
    grown = walk.resize(2.0, attention_factor=4.0)
    assert grown.counts["forward", "dense", "narrow"] == OpCount(
        flops=200.0, bytes=20.0, bytes_fixed=4.0, fused=20.0, ops=2.0
    )
    assert grown.counts["backward", "attention", "narrow"].flops == 160.0
    assert grown.counts["backward", "attention", "narrow"].bytes == 16.0
    assert (grown.saved, grown.saved_fixed, grown.scores, grown.serial_steps) == (6.0, 1.0, 64.0, 14.0)
    assert (grown.peak, grown.peak_small, grown.peak_small_fixed) == (10.0, 2.0, 20.0)
    assert grown.gradient_bytes == 400.0
    assert walk.resize(1.0, attention_factor=1.0) == walk


def test_keeping_a_share_of_the_weights_changes_only_the_fixed_parts():
    counts = {("forward", "gather", "wide"): OpCount(flops_fixed=8.0, bytes=6.0, bytes_fixed=40.0, fused_fixed=20.0,
                                                     fused=6.0, flops=2.0, ops=1.0)}  # fmt: skip
    quarter = make_walk(counts=counts).keep_weights(0.25)
    assert quarter.counts == {
        ("forward", "gather", "wide"): OpCount(flops_fixed=2.0, bytes=6.0, bytes_fixed=10.0, fused_fixed=5.0,
                                               fused=6.0, flops=2.0, ops=1.0)
    }  # fmt: skip
    assert quarter.gradient_bytes == 100.0
    assert (quarter.saved, quarter.saved_fixed) == (3.0, 0.25)
    assert (quarter.peak, quarter.peak_fixed, quarter.peak_small, quarter.peak_small_fixed) == (5.0, 0.5, 1.0, 5.0)
    walk = make_walk()
    assert walk.keep_weights(1.0) == walk


def test_columns_hold_the_whole_walk_and_leave_zeros_out():
    walk = make_walk()
    columns = walk.to_columns()
    assert columns["forward_dense_narrow_flops"] == 100.0
    assert "forward_softmax_wide_flops" not in columns
    assert columns["roof_forward_16"] == 16.0
    assert columns["ready_16"] == 1.0
    assert Walk.from_columns(columns) == walk


@pytest.mark.parametrize(
    "change", [lambda columns: columns.pop("saved"), lambda columns: columns.update(unknown=1.0),
               lambda columns: columns.update(saved="much")]
)  # fmt: skip
def test_columns_that_are_not_a_walk_are_bad_input(change):
    columns = make_walk().to_columns()
    change(columns)
    with pytest.raises(InputError, match="are not a walk"):
        Walk.from_columns(columns)


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": {("forward", "magic", "wide"): OpCount()}},
        {"counts": {("sideways", OP_FAMILIES[0], "wide"): OpCount()}},
        {"roof_forward": (1.0,)},
        {"ready": (1.0,)},
    ],
)
def test_a_walk_of_unknown_parts_is_bad_input(changes):
    with pytest.raises(InputError, match="not usable"):
        make_walk(**changes)
