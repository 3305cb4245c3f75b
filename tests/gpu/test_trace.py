"""Reading a profiler's trace, on one made by hand: it needs no GPU."""

import pytest

PHASES = ("forward", "backward", "optimizer")


def make_step(begin_us: float) -> list[dict]:
    """Work of 100, 200 and 50 us with 10 us of waiting before each phase, and host events that must not count."""
    events, now = [], begin_us
    for name, length in zip(PHASES, (100.0, 200.0, 50.0), strict=True):
        now += 10.0
        events.append({"cat": "gpu_user_annotation", "name": name, "ts": now, "dur": length})
        events += [
            {"cat": "kernel", "name": "k", "ts": now, "dur": length / 2},
            {"cat": "gpu_memcpy", "name": "m", "ts": now + length / 2, "dur": length / 2},
            {"cat": "user_annotation", "name": name, "ts": now - 50, "dur": 5.0},
            {"cat": "cpu_op", "name": "aten::mm", "ts": now + 1000, "dur": 5000.0},
        ]
        now += length
    return events


def test_a_phase_lasts_to_the_end_of_its_own_work(read_phases) -> None:
    events = [event for number in range(3) for event in make_step(number * 380.0)]
    assert read_phases(events, phases=PHASES) == pytest.approx(
        {"forward": 110e-6, "backward": 210e-6, "optimizer": 60e-6}
    )


def test_phases_out_of_order_are_an_error(read_phases) -> None:
    events = make_step(0.0)
    events[0]["name"] = "optimizer"
    with pytest.raises(ValueError, match="out of order"):
        read_phases(events, phases=PHASES)
