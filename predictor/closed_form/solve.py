"""The closed form of one setup: the roofline of compute, the collectives, and the timelines of both."""

import dataclasses
from dataclasses import dataclass

from precision_time.predictor.closed_form.communication import estimate_communication
from precision_time.predictor.closed_form.roofline import divide_work, estimate_compute, time_host_copy
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.storage.errors import InputError

__all__ = ["ClosedForm", "solve_closed_form"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """Times of one optimizer step on one rank, in seconds.

    ``compute_time_s`` is the sum of forward, backward and recomputation over all micro-steps, the optimizer, the
    pipeline's bubble and the copy from the host. ``communication_time_s`` is the time in flight between the ranks of
    one replica (``tensor_communication_s``: tensor, context, expert and pipeline) and between replicas
    (``data_communication_s``). ``iteration_time_s`` is compute plus exposed communication.
    """

    compute_time_s: float
    optimizer_time_s: float
    communication_time_s: float
    exposed_communication_s: float
    launch_bound: bool
    bucket_count: int
    forward_time_s: float = 0.0
    backward_time_s: float = 0.0
    recompute_time_s: float = 0.0
    pipeline_bubble_s: float = 0.0
    host_copy_s: float = 0.0
    tensor_communication_s: float = 0.0
    data_communication_s: float = 0.0

    @property
    def iteration_time_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.compute_time_s + self.exposed_communication_s


def _describe_rank(setup: TrainingSetup) -> HardwareSpec:
    """The hardware of one rank: a whole GPU, or a share of the host's cores and memory bandwidth."""
    ranks = setup.ranks_per_node
    if setup.hardware.kind != "cpu" or ranks == 1:
        return setup.hardware
    return dataclasses.replace(
        setup.hardware,
        peak_flops_per_s={unit: peak / ranks for unit, peak in setup.hardware.peak_flops_per_s.items()},
        memory_bytes_per_s=setup.hardware.memory_bytes_per_s / ranks,
    )


def solve_closed_form(setup: TrainingSetup) -> ClosedForm:
    """Times of one optimizer step: a rank's compute by roofline, its collectives, and what of them compute hides.

    ``batch_size`` counts the samples of one data-parallel replica in one of ``gradient_accumulation_steps``
    micro-steps. Without ``parallelism`` every rank is a replica: it communicates once a step, during the last
    backward pass.

    Raises ``InputError`` when the degrees of ``parallelism`` do not give the world size.
    """
    layout = setup.layout
    if layout.world_size != setup.world_size:
        raise InputError("the degrees of parallelism do not give the world size", got=layout.world_size,
                         expected=str(setup.world_size))  # fmt: skip
    hardware = _describe_rank(setup)
    compute = estimate_compute(
        setup.workload,
        hardware,
        setup.precision,
        batch_size=setup.batch_size,
        share=divide_work(setup.workload, layout),
        implementation=setup.implementation,
    )
    micro_steps = setup.gradient_accumulation_steps
    communication = estimate_communication(
        setup.workload,
        hardware,
        setup.precision,
        compute=compute,
        parallelism=layout,
        implementation=setup.implementation,
        batch_size=setup.batch_size,
        micro_steps=micro_steps,
        nodes=setup.nodes,
    )
    host_copy_s = 0.0
    if setup.implementation.host_copy:
        # One process feeds all devices of nn.DataParallel.
        samples = setup.batch_size * (setup.world_size if layout.single_process else 1)
        host_copy_s = micro_steps * time_host_copy(setup.workload, samples=samples)
    passes_s = micro_steps * (compute.forward_s + compute.recompute_s + compute.backward_s)
    return ClosedForm(
        compute_time_s=passes_s + compute.optimizer_s + communication.bubble_s + host_copy_s,
        optimizer_time_s=compute.optimizer_s,
        communication_time_s=communication.model_s + communication.data_s,
        exposed_communication_s=communication.exposed_s,
        launch_bound=compute.launch_bound,
        bucket_count=communication.bucket_count,
        forward_time_s=micro_steps * compute.forward_s,
        backward_time_s=micro_steps * compute.backward_s,
        recompute_time_s=micro_steps * compute.recompute_s,
        pipeline_bubble_s=communication.bubble_s,
        host_copy_s=host_copy_s,
        tensor_communication_s=communication.model_s,
        data_communication_s=communication.data_s,
    )
