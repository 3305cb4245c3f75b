"""Observation: a measurement with its setup, closed form and feature row, for fitting and scoring."""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.closed_form.solve import ClosedForm
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.public_table import row_implementation, row_parallelism
from precision_time.predictor.setup.hardware import HardwareSpec, find_hardware
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import parse_parallelism
from precision_time.predictor.setup.precision import Precision, parse_precision
from precision_time.predictor.setup.training_setup import TrainingSetup, fill_pipeline
from precision_time.predictor.workloads.cards import Card, find_card
from precision_time.predictor.workloads.workload import WorkloadFeatures, describe_card, describe_entry, find_workload
from precision_time.predictor.workloads.zoo import find_entry
from precision_time.storage.errors import PrecisionTimeError
from precision_time.storage.run_options import RUN_OPTIONS
from precision_time.storage.schema import Measurement

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Observation", "observe", "observe_table", "weigh_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A measurement and the query that it answers; ``index`` is its row in the table that it came from (-1: none)."""

    measurement: Measurement
    query: Query
    index: int = -1

    @property
    def setup(self) -> TrainingSetup:
        """The setup that was measured."""
        return self.query.setup

    @property
    def closed(self) -> ClosedForm:
        """The times of the setup by the closed forms."""
        return self.query.closed

    @property
    def compute_time_s(self) -> float | None:
        """Measured seconds of compute; on one rank those of the whole iteration."""
        if self.setup.world_size == 1:
            return self.measurement.iteration_time_s
        return self.measurement.compute_time_s

    @property
    def network(self) -> str:
        """The one name for all names of an architecture."""
        return self.setup.network

    @property
    def chip(self) -> str:
        """The chip, which several products share; a CPU is a chip of its own."""
        return self.setup.chip

    @property
    def is_contest(self) -> bool:
        """Whether the row comes from a tuned benchmark submission (MLPerf)."""
        return self.setup.implementation.tuned


def weigh_rows(observations: Sequence[Observation]) -> npt.NDArray[np.float64]:
    """A weight for each row: 1 over the root of the number of rows of its network in its source, scaled to a mean of 1.

    So no table dominates: 400 repeats of one configuration weigh as much as 20 single rows.
    """
    keys = [(observation.measurement.source, observation.network) for observation in observations]
    counts = Counter(keys)
    weights = np.array([counts[key] ** -0.5 for key in keys])
    scaled: npt.NDArray[np.float64] = weights / weights.mean()
    return scaled


def observe(
    measurements: Iterable[Measurement],
    *,
    workloads: Sequence[WorkloadFeatures] = (),
    hardware: Sequence[HardwareSpec] = (),
) -> list[Observation]:
    """Join measurements with the cards of their models and the specifications of their hardware.

    ``workloads`` and ``hardware`` take precedence over the shipped ones. Raises ``UnknownNameError`` for a model or GPU
    in neither.
    """
    find_card_of_model = functools.cache(functools.partial(find_workload, measured=tuple(workloads)))
    find_device = functools.cache(functools.partial(find_hardware, measured=tuple(hardware)))
    observations = []
    for measured in measurements:
        precision, implementation = _setup_facts(measured)
        setup = TrainingSetup(
            workload=find_card_of_model(measured.model),
            hardware=find_device(measured.gpu),
            precision=precision,
            world_size=measured.world_size,
            nodes=measured.nodes,
            batch_size=measured.per_gpu_batch_size,
            gradient_accumulation_steps=measured.gradient_accumulation_steps,
            parallelism=parse_parallelism(measured.strategy, world_size=measured.world_size),
            implementation=implementation,
        )
        observations.append(Observation(measurement=measured, query=Query.of(setup)))
    return observations


def _setup_facts(measured: Measurement) -> tuple[Precision, Implementation]:
    """The policy and the code, as the run options change them; an option at its default leaves its fact open."""
    facts: dict[str, dict[str, Any]] = {"precision": {}, "implementation": {}}
    for option in RUN_OPTIONS:
        record, _, field = option.setup_field.partition(".")
        if (value := getattr(measured, option.name)) != option.default:
            facts[record][field] = value
    precision = replace(parse_precision(measured.precision), **facts["precision"])
    return precision, Implementation(**facts["implementation"])


#: A card describes a row when their parameters differ by less than this share; else the facts of the row do.
_SAME_PARAMETERS = 0.10
#: Models whose rows count only a part of the network on the card: rows of hifigan leave out the discriminators.
_CARD_FIRST = frozenset({"hifigan"})


def describe_row(
    model: str, task_input: str, params: float | None, forward_flops: float | None
) -> WorkloadFeatures | None:
    """The workload of a row of the public table; None where neither the row nor a card has parameters and FLOPs.

    The zoo describes the row, else a card, where its parameters are those of the row within 10 %, since its numbers fit
    each other; else the row describes itself. ``params`` and ``forward_flops`` are None where the row does not state
    them.
    """

    def is_same_network(known_params: int) -> bool:
        return params is None or model in _CARD_FIRST or abs(known_params / params - 1) < _SAME_PARAMETERS

    entry = find_entry(model, task_input)
    if entry is not None and is_same_network(entry.params):
        return describe_entry(entry, name=model)
    card = find_card(model, task_input)
    if card is not None and card.params is not None:
        card_flops = card.forward_flops_per_sample
        if is_same_network(card.params):
            flops = card_flops if card_flops is not None else forward_flops
            return None if flops is None else _describe_known(model, card, card.params, flops, task_input)
        if params is not None and forward_flops is None and card_flops is not None:
            # another size of the same network: its work grows about as its parameters do
            return describe_card(
                model,
                params=round(params),
                forward_flops_per_sample=card_flops * params / card.params,
                task_input=task_input,
            )
    if params is None or forward_flops is None:
        return None
    return describe_card(model, params=round(params), forward_flops_per_sample=forward_flops, task_input=task_input)


def _describe_known(model: str, card: Card, params: int, flops: float, task_input: str) -> WorkloadFeatures:
    return describe_card(
        model,
        params=params,
        forward_flops_per_sample=flops,
        card=card,
        # a row without an input has the usual one, as a question does
        task_input=task_input or card.task_input,
        sequence_length=card.sequence_length,
    )


def observe_table(frame: "pd.DataFrame") -> tuple[list[Observation], dict[int, str]]:
    """Rows of a ``PublicTable`` as observations, and the reason why each other row cannot be one, by its position.

    Reasons: ``model unknown`` (neither the row nor a card has parameters and FLOPs), and the messages of errors.
    """
    describe = functools.cache(describe_row)
    observations: list[Observation] = []
    refused: dict[int, str] = {}
    for index, row in enumerate(frame.to_dict("records")):
        task_input = row["task_input"] if isinstance(row["task_input"], str) else ""
        try:
            sizes = [float(row[name]) if row[name] > 0 else None for name in ("model_params", "fwd_flops_per_sample")]
            workload = describe(row["model"], task_input, *sizes)
            if workload is None:
                refused[index] = "model unknown"
                continue
            observations.append(_observe_row(row, workload, task_input=task_input, index=index))
        except PrecisionTimeError as error:
            refused[index] = str(error).splitlines()[0]
    return observations, refused


#: Ports and their rate: ``8x ConnectX-7 IB NDR 400Gb/s``, ``RoCE 1600Gbps/node``, ``InfiniBand 100Gb EDR``.
_PORT_RATE = re.compile(r"(\d+)\s*(?:Gb/|Gb\b|Gb\s*/|Gbps|Gbit/s|GB/Sec|Gbe\b)(GPU)?", re.IGNORECASE)
_PORT_COUNT = re.compile(r"(\d+)\s*x", re.IGNORECASE)
#: Slower networks are for management: rows that state only 1 Gb Ethernet have times that it does not allow.
_SLOWEST_NETWORK = 10e9 / 8
#: Devices of a node where a row states the network of each device.
_GPUS_PER_NODE = 8


def read_network(interconnect: str) -> float | None:
    """Bytes per second, one way, of the network of a node, as a row states it; None where it does not.

    Text before ``inter:`` is about links inside the node. The fastest of several networks counts, and none below 10
    Gbit/s.
    """
    _, mark, between = interconnect.partition("inter:")
    rates = []
    for part in re.split(r"[;,+]", between if mark else interconnect):
        if "NVLINK" in part.upper() or "PCIE" in part.upper():
            continue
        end = 0
        for rate in _PORT_RATE.finditer(part):
            count = _PORT_COUNT.search(part[end : rate.start()])
            ports = _GPUS_PER_NODE if rate[2] else int(count[1]) if count else 1
            rates.append(ports * int(rate[1]) * 1e9 / 8)
            end = rate.end()
    return max((rate for rate in rates if rate >= _SLOWEST_NETWORK), default=None)


def _observe_row(row: Mapping[Any, Any], workload: WorkloadFeatures, *, task_input: str, index: int) -> Observation:
    world_size, nodes = int(row["world_size"]), int(row["nodes"])
    batch_size, accumulation = max(1, round(row["per_gpu_batch_size"])), int(row["accumulation"])
    batch_size, accumulation = fill_pipeline(
        stages=int(row["pipeline"]), batch_size=batch_size, micro_steps=accumulation
    )
    strategy = row["parallelism"] if isinstance(row["parallelism"], str) and row["parallelism"] else "ddp"
    measurement = Measurement(
        source=row["source"],
        model=row["model"],
        task_input=task_input,
        gpu=row["hardware"],
        nodes=nodes,
        world_size=world_size,
        precision=row["policy"],
        strategy=strategy,
        per_gpu_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        framework=row["framework_name"],
        iteration_time_s=float(row["iteration_time_s"]),
        cell_id=str(row["row_id"]),
    )
    hardware = find_hardware(row["hardware"])
    network = read_network(row["interconnect"]) if nodes > 1 else None
    if network is not None:
        hardware = replace(hardware, network_bytes_per_s=network)
    setup = TrainingSetup(
        workload=workload,
        hardware=hardware,
        precision=parse_precision(row["policy"]),
        world_size=world_size,
        nodes=nodes,
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        parallelism=row_parallelism(row),
        implementation=row_implementation(row),
    )
    return Observation(measurement=measurement, query=Query.of(setup), index=index)
