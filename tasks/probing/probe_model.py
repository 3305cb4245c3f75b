"""Time a few real iterations of a model on this machine's device, and predict its other settings from them."""

import dataclasses
import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precision_time.predictor.answering.answers import answer_queries
from precision_time.predictor.answering.artifact import PublishedPredictor, load_artifact, standing_artifact
from precision_time.predictor.answering.calibration import Calibration, calibrate
from precision_time.predictor.answering.user_models import resolve_model
from precision_time.predictor.rows.features import Query
from precision_time.predictor.setup.hardware import HardwareSpec, find_hardware, supported_precisions
from precision_time.predictor.setup.precision import PRECISIONS, parse_precision
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.workload import WorkloadFeatures, known_workloads
from precision_time.storage.errors import (
    InputError,
    PrecisionTimeError,
    PrecisionUnsupportedError,
    StorageError,
    UnknownNameError,
)
from precision_time.storage.schema import GridCell
from precision_time.tasks.gangs.record_cell import read_fragments
from precision_time.tasks.probing.probe_device import ProbeReport, probe_device
from precision_time.tasks.processes.rank_process import profile_here
from precision_time.tasks.ranks.job import MeasurementLimits

__all__ = ["DEFAULT_BATCHES", "DEFAULT_PRECISIONS", "ModelProbe", "ProbedTime", "choose_measured", "probe_model"]

#: By default: the usual policies, as far as the device runs them and computes their products no slower than fp32 ones
#: (some CPUs take seconds for a step in fp16), and two batches.
DEFAULT_PRECISIONS = ("fp32", "amp_bf16", "amp_fp16")
DEFAULT_BATCHES = (8, 32)

#: A precision and the samples of one GPU in one micro-step, measured on one device.
Setting = tuple[str, int]
#: Seconds of iterations by setting, and the reason of each failed setting.
Timings = tuple[dict[Setting, list[float]], dict[Setting, str]]
Timer = Callable[..., Timings]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedTime:
    """One line of a probe. Times are seconds of one optimizer step; ``low_s`` and ``high_s`` bound the predicted one.

    ``measured_s`` is the median of ``steps`` real iterations, None without a measurement. A setting that was measured
    for the calibration (``is_calibrating``) is predicted here from the other settings alone, so that both can be
    compared. ``known_by`` names the measured rows by which the prediction was corrected.
    """

    precision: str
    batch_size: int
    gpus: int
    gpu: str
    measured_s: float | None
    steps: int
    is_calibrating: bool
    predicted_s: float
    low_s: float
    high_s: float
    known_by: str

    @property
    def error(self) -> float | None:
        """predicted / measured - 1, None without a measurement."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self) | {"error": self.error}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProbe:
    """The result of a probe of a model: the device, a line for each setting, and the calibration behind them.

    ``level`` is the confidence level of the intervals, ``left_out`` lists in words what could not be measured or
    predicted, and ``load_average`` (one minute, of the host) shows how busy the machine was after the last iteration.
    """

    model: str
    device: ProbeReport
    times: tuple[ProbedTime, ...]
    calibration: Calibration
    level: float
    left_out: tuple[str, ...]
    load_average: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the calibration as ``Calibration.save`` writes it."""
        return {
            "model": self.model,
            "device": self.device.to_dict(),
            "artifact_id": self.calibration.artifact_id,
            "level": self.level,
            "load_average": self.load_average,
            "times": [line.to_dict() for line in self.times],
            "left_out": list(self.left_out),
            "calibration": self.calibration.to_dict(),
        }


def choose_measured(precisions: Sequence[str], batches: Sequence[int]) -> tuple[Setting, ...]:
    """The settings measured by default: the first precision at the smallest and the largest batch, each other precision
    at the smallest.

    Two batches separate the cost of a sample from the fixed cost of an iteration. One row of a precision shows how much
    of its nominal gain this device reaches, which no data sheet does.
    """
    ends = sorted({min(batches), max(batches)})
    return (*((precisions[0], batch) for batch in ends), *((name, ends[0]) for name in precisions[1:]))


def probe_model(
    model: str,
    device: str = "auto",
    *,
    precisions: Sequence[str] = (),
    batch_sizes: Sequence[int] = DEFAULT_BATCHES,
    gpus: Sequence[int] = (1,),
    other_gpus: Sequence[str] = (),
    measure: Sequence[Setting] = (),
    steps: int = 20,
    rounds: int = 1,
    check: bool = False,
    artifact: str | PublishedPredictor | None = None,
    report: ProbeReport | None = None,
    timer: Timer | None = None,
    announce: Callable[[str], None] = lambda text: None,
) -> ModelProbe:
    """Time real training iterations of ``model`` on one device of this machine, and predict its other settings.

    ``model`` is one of the named workloads, or ``module:factory``, a function that returns a
    ``tasks.workloads.Workload``; ``device`` is as in ``probe_device``. The predictions cover all ``precisions`` (by
    default those of ``DEFAULT_PRECISIONS`` that pay on the device) at all ``batch_sizes`` (samples of one GPU) on
    ``gpus`` devices like this one and like ``other_gpus`` (names). The settings of ``measure``, or else those of
    ``choose_measured``, are measured, each in a fresh process as in a campaign: ``steps`` iterations, ``rounds`` times
    in turn, of which the median counts. ``check`` also measures the other settings that are predicted for one device of
    this machine, without using them for the calibration. ``artifact`` answers as in ``predict_time``; with ``report``
    the device is not probed; ``timer`` replaces the measuring; ``announce`` is called with the next step in words.

    Raises ``UnknownNameError`` for an unknown model, precision or GPU, ``InputError`` for numbers out of range or a
    missing device, ``PrecisionUnsupportedError`` for a precision that the device cannot run, and
    ``PrecisionTimeError`` when nothing could be measured.
    """
    if ":" not in model and model not in known_workloads():
        raise UnknownNameError(
            "model to train", model, known_workloads(), fix="or name your own workload as module:factory"
        )
    _check_counts(batch_sizes=batch_sizes, gpus=gpus, steps=(steps,), rounds=(rounds,))
    published = _find_artifact(artifact)
    measured_hardware = published.hardware if published is not None else ()
    others = [find_hardware(name, measured=measured_hardware) for name in other_gpus]
    if report is None:
        announce("measuring the device for a few seconds")
        report = probe_device(device)
    names = _choose_precisions(precisions, report)
    batches = tuple(sorted(set(batch_sizes)))
    grid = list(itertools.product(names, batches))
    wanted = [(_runnable(name, report), batch) for name, batch in measure] or list(choose_measured(names, batches))
    _check_counts(batch_sizes=[batch for _, batch in wanted])
    calibrating = list(dict.fromkeys(wanted))
    checked = [setting for setting in grid if setting not in calibrating] if check else []

    announce(f"timing {', '.join(f'{name} at batch {batch}' for name, batch in [*calibrating, *checked])}")
    timed, failed = (timer or time_settings)(
        model, [*calibrating, *checked], report=report, steps=steps, rounds=rounds
    )  # fmt: skip
    load_average = os.getloadavg()[0]
    known = [setting for setting in calibrating if setting in timed]
    if not known:
        raise PrecisionTimeError(
            f"no iteration of {model} could be measured",
            got="; ".join(f"{name} at batch {batch}: {why}" for (name, batch), why in failed.items())[:2000],
            fix="try a smaller batch, or see whether the model trains at all",
        )
    # Not earlier: the walk of a user's own model loads torch into this process.
    workload = resolve_model(model, measured=published.workloads if published is not None else ()).workload
    calibration = _calibrate(workload, {setting: timed[setting] for setting in known}, report, published)
    setups, left_out = _list_setups(
        workload, [report.hardware, *others], dict.fromkeys([*calibrating, *grid]), known=known, gpus=gpus
    )
    here = report.hardware.name
    times, level = _predict(setups, calibration, published=published, here=here, known=known, timed=timed)
    unmeasured = [f"{name} at batch {batch} was not measured: {why}" for (name, batch), why in failed.items()]
    return ModelProbe(
        model=model,
        device=report,
        times=times,
        calibration=calibration,
        level=level,
        left_out=(*unmeasured, *left_out),
        load_average=load_average,
    )


def _calibrate(
    workload: WorkloadFeatures,
    timed: Mapping[Setting, Sequence[float]],
    report: ProbeReport,
    published: PublishedPredictor | None,
) -> Calibration:
    """A calibration from one row each setting, in their order."""
    rows = [
        {
            "workload": workload,
            "gpu": report.hardware,
            "precision": name,
            "batch_size": batch,
            "framework": report.environment.framework,
            "iteration_time_s": statistics.median(seconds),
        }
        for (name, batch), seconds in timed.items()
    ]
    return calibrate(rows, artifact=published)


def _check_counts(**counts: Iterable[object]) -> None:
    for name, values in counts.items():
        numbers = list(values)
        if not numbers:
            raise InputError(f"{name} is empty", expected="integers of at least 1")
        for value in numbers:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000_000:
                raise InputError(f"{name} is not usable", got=repr(value), expected="an integer of at least 1")


def _find_artifact(artifact: str | PublishedPredictor | None) -> PublishedPredictor | None:
    if isinstance(artifact, PublishedPredictor):
        return artifact
    return standing_artifact().published if artifact is None else load_artifact(artifact)


def _runnable(name: str, report: ProbeReport) -> str:
    precision = parse_precision(name).name
    if precision in report.unsupported:
        raise PrecisionUnsupportedError(
            f"{report.hardware.name} cannot run {precision}",
            got=report.unsupported[precision],
            expected=f"one of {', '.join(supported_precisions(report.hardware))}",
        )
    return precision


def _choose_precisions(precisions: Sequence[str], report: ProbeReport) -> list[str]:
    if precisions:
        return list(dict.fromkeys(_runnable(name, report) for name in precisions))
    rates = report.hardware.peak_flops_per_s
    return [
        name
        for name in DEFAULT_PRECISIONS
        if name not in report.unsupported and rates.get(PRECISIONS[name].compute, 0.0) >= rates["fp32"]
    ]


def time_settings(model: str, settings: Sequence[Setting], *, report: ProbeReport, steps: int, rounds: int) -> Timings:
    """Seconds of the measured iterations of each of ``settings`` on one device, and the reasons of failed ones.

    Each setting is timed ``rounds`` times in turn, so that a change in the machine's load affects all of them. A failed
    setting is not tried again. Raises ``StorageError`` where the scratch folder cannot be written.
    """
    limits = MeasurementLimits(measured_steps=steps)
    timed: dict[Setting, list[float]] = {}
    failed: dict[Setting, str] = {}
    for _ in range(rounds):
        for name, batch in settings:
            if (name, batch) in failed:
                continue
            cell = GridCell(model=model, precision=name, world_size=1, per_gpu_batch_size=batch)
            with tempfile.TemporaryDirectory(prefix="precision-time-probe-") as scratch:
                try:
                    seconds = _time_cell(cell, report=report, limits=limits, scratch=Path(scratch))
                except StorageError:
                    raise
                except PrecisionTimeError as error:
                    failed[name, batch] = error.what
                    timed.pop((name, batch), None)
                else:
                    timed.setdefault((name, batch), []).extend(seconds)
    return timed, failed


def _time_cell(cell: GridCell, *, report: ProbeReport, limits: MeasurementLimits, scratch: Path) -> list[float]:
    """Seconds of the measured iterations of ``cell``; raises ``PrecisionTimeError``."""
    receipt = profile_here(cell, environment=report.environment, limits=limits, scratch=scratch)
    if receipt.cause:
        raise PrecisionTimeError(f"{receipt.cause}: {receipt.message.partition(chr(10))[0]}")
    return [row.iteration_time_s for row in read_fragments(receipt) if not row.is_warmup]


def _list_setups(
    workload: WorkloadFeatures,
    devices: Sequence[HardwareSpec],
    settings: Iterable[Setting],
    *,
    known: Sequence[Setting],
    gpus: Sequence[int],
) -> tuple[list[TrainingSetup], list[str]]:
    """The setups to predict, those on one device of this machine first, and in words what cannot be predicted."""
    settings = list(settings)
    setups, left_out = [], []
    for place, hardware in enumerate(devices):
        supported = supported_precisions(hardware)
        lacking = [name for name in dict.fromkeys(name for name, _ in settings) if name not in supported]
        left_out += [f"{hardware.name} cannot run {name}" for name in lacking]
        per_node = hardware.gpus_per_node
        counts = sorted(set(gpus) | ({1} if place == 0 else set()))
        uneven = [count for count in counts if count % math.ceil(count / per_node)]
        left_out += [f"{count} x {hardware.name} do not divide over nodes of {per_node}" for count in uneven]
        setups += [
            TrainingSetup(
                workload=workload,
                hardware=hardware,
                precision=parse_precision(name),
                world_size=count,
                nodes=math.ceil(count / per_node),
                batch_size=batch,
            )
            for count in counts
            if count not in uneven
            for name, batch in settings
            if name not in lacking and (count in gpus or (name, batch) in known)
        ]
    return setups, left_out


def _predict(
    setups: Sequence[TrainingSetup],
    calibration: Calibration,
    *,
    published: PublishedPredictor | None,
    here: str,
    known: Sequence[Setting],
    timed: Mapping[Setting, Sequence[float]],
) -> tuple[tuple[ProbedTime, ...], float]:
    """A line for each setup and the level of their intervals; ``known`` has the order of the calibration's rows."""
    queries = [Query.of(setup) for setup in setups]
    answers = answer_queries(queries, published=published)
    corrected = calibration.correct(queries, answers)
    times = []
    for place, setup in enumerate(setups):
        setting = (setup.precision.name, setup.batch_size)
        is_here = setup.hardware.name == here and setup.world_size == 1
        seconds = timed.get(setting, ()) if is_here else ()
        answer, row = corrected, place
        if is_here and setting in known:
            left_out = known.index(setting)
            rows = calibration.rows[:left_out] + calibration.rows[left_out + 1 :]
            query = queries[place : place + 1]
            answer, row = answer_queries(query, published=published), 0
            if rows:
                answer = dataclasses.replace(calibration, rows=rows).correct(query, answer)
        times.append(
            ProbedTime(
                precision=setup.precision.name,
                batch_size=setup.batch_size,
                gpus=setup.world_size,
                gpu=setup.hardware.name,
                measured_s=statistics.median(seconds) if seconds else None,
                steps=len(seconds),
                is_calibrating=is_here and setting in known,
                predicted_s=float(answer.parts.iteration_time_s[row]),
                low_s=float(answer.low_s[row]),
                high_s=float(answer.high_s[row]),
                known_by=answer.corrections[row] if answer.corrections else "nothing else was measured",
            )
        )
    return tuple(times), answers.level
