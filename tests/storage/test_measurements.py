"""One measurement per cell: the slowest rank of each step, the median over steps, and reasons for what is left out."""

import math
from collections.abc import Callable

import pytest

from precision_time.storage.measurements import derive_measurements
from precision_time.storage.parquet import table_of
from precision_time.storage.schema import IterationTiming, Measurement

Make = Callable[..., IterationTiming]


def measure(rows: list[IterationTiming], **flops: float) -> tuple[list[Measurement], list[tuple[str, str]]]:
    return derive_measurements(table_of(rows, IterationTiming), forward_flops=flops)


def test_the_slowest_rank_of_a_step_counts_with_all_its_parts(timing: Make) -> None:
    rows = [
        timing(rank=0, iteration_time_s=1.0, compute_time_s=0.9, communication_time_s=0.7, exposed_communication_s=0.1),
        timing(rank=1, iteration_time_s=1.1, compute_time_s=0.6, communication_time_s=0.5, exposed_communication_s=0.5),
    ]
    (measured,), problems = measure(rows)
    assert problems == []
    assert measured.iteration_time_s == 1.1
    assert measured.compute_time_s == 0.6
    assert measured.communication_time_s == 0.5
    assert measured.exposed_communication_s == 0.5


def test_the_median_is_over_steps_not_over_rows(timing: Make) -> None:
    slow = {0: 5.0, 1: 1.0, 2: 3.0}
    rows = [timing(step=step, rank=rank, iteration_time_s=time_s if rank else 0.1) for step, time_s in slow.items()
            for rank in range(2)]  # fmt: skip
    (measured,), _ = measure(rows)
    assert measured.iteration_time_s == 3.0
    assert measured.iterations == 3
    assert measured.relative_iqr == pytest.approx((4.0 - 2.0) / 3.0)


def test_parts_are_medians_of_their_own(timing: Make) -> None:
    rows = [
        timing(
            world_size=1,
            step=step,
            iteration_time_s=1.0 + step,
            forward_time_s=0.1 * step,
            backward_time_s=0.2 * step,
            optimizer_time_s=0.3 * step,
        )
        for step in range(3)
    ]
    (measured,), _ = measure(rows)
    assert measured.forward_time_s == pytest.approx(0.1)
    assert measured.backward_time_s == pytest.approx(0.2)
    assert measured.optimizer_time_s == pytest.approx(0.3)


def test_warm_up_and_skipped_steps_do_not_count(timing: Make) -> None:
    rows = [timing(step=0, rank=rank, is_warmup=True, iteration_time_s=9.0, compute_time_s=None) for rank in range(2)]
    rows += [timing(step=1, rank=rank, step_skipped=rank == 0, iteration_time_s=9.0) for rank in range(2)]
    rows += [timing(step=2, rank=rank, iteration_time_s=1.0) for rank in range(2)]
    (measured,), problems = measure(rows)
    assert problems == []
    assert measured.iteration_time_s == 1.0
    assert measured.iterations == 1
    assert measured.relative_iqr == 0.0


@pytest.mark.parametrize(("values", "expected"), [([-3.0, -1.0, 2.0], 0.0), ([-3.0, 1.0, 2.0], 1.0)])
def test_negative_exposed_communication_is_noise_around_zero(
    timing: Make, values: list[float], expected: float
) -> None:
    rows = [timing(world_size=1, step=step, exposed_communication_s=value) for step, value in enumerate(values)]
    (measured,), _ = measure(rows)
    assert measured.exposed_communication_s == expected


def test_a_part_that_was_never_measured_is_none(timing: Make) -> None:
    row = timing(world_size=1, compute_time_s=None, communication_time_s=None, exposed_communication_s=None)
    (measured,), _ = measure([row])
    assert measured.compute_time_s is None
    assert measured.communication_time_s is None
    assert measured.exposed_communication_s is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.1, 1e6])
def test_a_step_without_a_usable_time_is_left_out_with_its_reason(timing: Make, value: float) -> None:
    rows = [timing(step=0, rank=0, iteration_time_s=value), timing(step=0, rank=1, iteration_time_s=7.0)]
    rows += [timing(step=1, rank=rank, iteration_time_s=1.0) for rank in range(2)]
    (measured,), problems = measure(rows)
    assert measured.iteration_time_s == 1.0
    assert problems == [("00000000000000aa", "1 steps left out: no usable iteration time")]


def test_a_step_that_lacks_a_rank_is_left_out_with_its_reason(timing: Make) -> None:
    rows = [timing(step=0, rank=0, iteration_time_s=0.5), *(timing(step=1, rank=rank) for rank in range(2))]
    (measured,), problems = measure(rows)
    assert measured.iterations == 1
    assert problems == [("00000000000000aa", "1 steps left out: not all ranks")]


def test_a_cell_without_a_measured_step_is_left_out_with_its_reason(timing: Make) -> None:
    rows = [timing(cell_id="00000000000000bb", world_size=1), timing(world_size=1, is_warmup=True)]
    measurements, problems = measure(rows)
    assert [measured.cell_id for measured in measurements] == ["00000000000000bb"]
    assert problems == [("00000000000000aa", "no measured step")]


def test_a_measurement_tells_what_was_measured(timing: Make) -> None:
    rows = [timing(rank=rank, peak_memory_bytes=1_000 + rank, effective_precision="fp32", nodes=2) for rank in range(2)]
    (measured,), _ = measure(rows, mlp=123.0)
    assert measured.source == "campaign"
    assert measured.precision == "fp32"
    assert measured.cell_id == "00000000000000aa"
    assert measured.configuration == ("mlp", "64", "cpu-x-2c", 2, 2, "fp32", "ddp", 8, 1, "pytorch")
    assert measured.peak_memory_bytes == 1_001
    assert measured.model_params == 1_024
    assert measured.forward_flops_per_sample == 123.0
    assert type(measured.nodes) is int
    assert type(measured.iteration_time_s) is float


def test_cells_do_not_mix_and_come_sorted(timing: Make) -> None:
    rows = [
        timing(cell_id=f"{cell:016x}", model=f"m{cell}", world_size=1, step=step, iteration_time_s=1.0 + cell)
        for step in range(3)
        for cell in (3, 1, 2)
    ]
    measurements, _ = measure(rows)
    assert [(measured.model, measured.iteration_time_s) for measured in measurements] == [
        ("m1", 2.0),
        ("m2", 3.0),
        ("m3", 4.0),
    ]


def test_no_rows_give_no_measurements() -> None:
    assert measure([]) == ([], [])


def test_skew_is_the_longest_less_the_shortest_wait_of_a_step(timing: Make) -> None:
    waits = {0: (0.5, 0.1), 1: (0.2, 0.3), 2: (0.2, 0.4)}
    rows = [
        timing(step=step, rank=rank, communication_time_s=seconds)
        for step, pair in waits.items()
        for rank, seconds in enumerate(pair)
    ]
    (measured,), _ = measure(rows)
    assert measured.skew_s == pytest.approx(0.2)


def test_a_transfer_is_the_shortest_wait_of_a_step_and_unknown_where_a_rank_tells_none(timing: Make) -> None:
    waits = {0: (0.5, 0.1), 1: (0.2, 0.3), 2: (0.4, 0.2)}
    rows = [
        timing(step=step, rank=rank, iteration_time_s=1.0 - 0.1 * rank, communication_time_s=seconds)
        for step, pair in waits.items()
        for rank, seconds in enumerate(pair)
    ]
    (measured,), _ = measure(rows)
    assert measured.transfer_time_s == pytest.approx(0.2)
    assert measured.communication_time_s == pytest.approx(0.4)  # of the slowest rank, which waited longer
    (silent,), _ = measure([*rows[::2], *(timing(step=s, rank=1, communication_time_s=None) for s in waits)])
    assert silent.transfer_time_s is None


@pytest.mark.parametrize(("values", "expected"), [((0.2, 0.1, 0.4), 0.2), ((-0.2, -0.1, 0.4), 0.0), ((None,), None)])
def test_the_other_exposed_communication_is_a_median_and_unknown_where_nobody_measured_it(
    timing: Make, values: tuple[float | None, ...], expected: float | None
) -> None:
    rows = [timing(world_size=1, step=step, exposed_after_backward_s=value) for step, value in enumerate(values)]
    (measured,), _ = measure(rows)
    assert measured.exposed_after_backward_s == expected


def test_skipped_steps_are_counted_once_for_all_ranks(timing: Make) -> None:
    rows = [timing(step=step, rank=rank, step_skipped=step < 2) for step in range(5) for rank in range(2)]
    (measured,), _ = measure(rows)
    assert (measured.skipped_steps, measured.iterations) == (2, 3)


def test_steps_before_the_last_change_count_as_cold(timing: Make) -> None:
    rows = [
        timing(
            step=step,
            rank=rank,
            is_warmup=step < 2,
            is_cold=step < 6,
            is_settled=True,
            iteration_time_s=(1.0 if step < 6 else 1.15) + 0.01 * rank,
        )
        for step in range(12)
        for rank in range(2)
    ]
    (measured,), problems = measure(rows)
    assert problems == []
    assert measured.cold_iteration_time_s == pytest.approx(1.01)
    assert measured.iteration_time_s == pytest.approx(1.16)
    assert (measured.iterations, measured.settled) == (6, True)


def test_a_cell_without_a_change_has_no_cold_median(timing: Make) -> None:
    rows = [timing(world_size=1, step=step, is_cold=False, is_settled=False) for step in range(4)]
    (measured,), _ = measure(rows)
    assert (measured.cold_iteration_time_s, measured.settled) == (None, False)


def test_energy_is_that_of_all_gpus_and_unknown_where_one_is(timing: Make) -> None:
    joules = {0: 3.0, 1: 4.0}
    rows = [timing(step=step, rank=rank, energy_j=joules[rank]) for step in range(3) for rank in range(2)]
    assert measure(rows)[0][0].energy_j == 7.0
    rows = [timing(step=step, rank=rank, energy_j=joules[rank] if rank else None) for step in range(3)
            for rank in range(2)]  # fmt: skip
    assert measure(rows)[0][0].energy_j is None
    assert measure([timing(world_size=1)])[0][0].energy_j is None


def test_conditions_are_medians_and_marks_are_shares(timing: Make) -> None:
    rows = [
        timing(world_size=1, step=step, gpu_clock_hz=1e9 + step, temperature_c=60.0, throttled=step == 0,
               contended=step < 2, isolated_communication_s=0.5)
        for step in range(4)
    ]  # fmt: skip
    (measured,), _ = measure(rows)
    assert (measured.gpu_clock_hz, measured.temperature_c, measured.power_w) == (1e9 + 1.5, 60.0, None)
    assert (measured.throttled_share, measured.contended_share) == (0.25, 0.5)
    assert measured.isolated_communication_s == 0.5


def test_options_of_the_run_are_told(timing: Make) -> None:
    options = {"channels_last": True, "compiled": True, "checkpointing": "full", "fused_optimizer": True}
    (measured,), _ = measure([timing(world_size=1, compression="fp16", **options)])
    assert {name: getattr(measured, name) for name in options} == options
    assert measured.compression == "fp16"
