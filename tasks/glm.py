"""CA-SGD as a workload: cells timed over MPI into the tables of campaigns, and a plan's samples as measurements.

What the columns of a table mean here. An iteration is one outer step: s steps of SGD and one AllReduce. ``s`` stands
under gradient_accumulation_steps, since both count micro-steps between two synchronisations; the batch stands under
per_gpu_batch_size, but all ranks share its rows (each holds columns of them), so an iteration sees s times b samples
whatever the world size. The strategy is ``columns``, followed by the policy where several share one precision. The
parts: forward is gather and Gram, backward is the AllReduce and the recurrence, optimizer the update of the weights.
"""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.comm import Communicator, MpiCommunicator, OneProcess
from precision_time.casgd.costs import Sample
from precision_time.casgd.objectives import OBJECTIVES, find_objective
from precision_time.casgd.precision import POLICIES, find_policy
from precision_time.casgd.problem import Options, Problem, Solution
from precision_time.casgd.schedules import Schedule
from precision_time.storage.errors import InputError
from precision_time.storage.schema import CellOutcome, Environment, GridCell, IterationTiming, Measurement
from precision_time.storage.timings import TimingsDataset, write_fragment
from precision_time.tasks.job import CellReceipt, MeasurementLimits, RankJob
from precision_time.tasks.ranks import fragment_path
from precision_time.tasks.record import record_cell

__all__ = ["SOURCE", "GlmCell", "glm_environment", "run_glm_cell", "run_glm_cells", "to_measurement"]

SOURCE = "casgd"
#: Policies as precisions of the tables: BF16 or FP16 features under FP32 sums are what autocast calls mixed.
PRECISION_OF = MappingProxyType(
    {
        "fp64": "fp64",
        "fp32": "fp32",
        "recipe": "amp_bf16",
        "paper": "amp_bf16",
        "bf16-gram": "amp_bf16",
        "fp16": "amp_fp16",
    }
)
_PLAIN = ("fp64", "fp32", "recipe", "fp16")
#: Outer steps that one row is the mean of: a single one lasts microseconds.
_OUTER_STEPS = 20
_MOST_ROWS = 2**16
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmCell:
    """One point of the grid: objective x columns x s x batch x policy x ranks, on synthetic standard-normal features.

    Raises ``InputError`` for an unknown objective or policy, and for more ranks than columns.
    """

    objective: str
    columns: int
    s: int
    batch_size: int
    policy: str = "fp32"
    ranks: int = 1

    def __post_init__(self) -> None:
        for name, known in (("objective", OBJECTIVES), ("policy", POLICIES)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} is not usable", got=repr(getattr(self, name)), expected=", ".join(known))
        if self.ranks > self.columns:
            raise InputError("a rank would own no column", got=f"{self.ranks} ranks", expected=f"<= {self.columns}")

    @property
    def grid_cell(self) -> GridCell:
        """The cell as the tables know it; the columns are part of the model's name, since a cell has no input shape."""
        return GridCell(
            model=_model_name(self.objective, self.columns),
            precision=PRECISION_OF[self.policy],
            world_size=self.ranks,
            per_gpu_batch_size=self.batch_size,
            gradient_accumulation_steps=self.s,
            strategy=_strategy(self.policy),
        )

    @classmethod
    def of(cls, cell: GridCell) -> "GlmCell":
        """The inverse of ``grid_cell``; raises ``InputError`` for a cell that is none of CA-SGD."""
        words = cell.model.rsplit("-", 2)
        policies = [
            name for name in POLICIES if (PRECISION_OF[name], _strategy(name)) == (cell.precision, cell.strategy)
        ]
        if len(words) != 3 or words[0] != SOURCE or not words[2][1:].isdecimal() or not policies:
            raise InputError(
                "this is no cell of CA-SGD",
                got=cell.label,
                expected=f"model {SOURCE}-OBJECTIVE-nCOLUMNS, strategy columns or columns-POLICY",
            )
        return cls(
            objective=words[1],
            columns=int(words[2][1:]),
            s=cell.gradient_accumulation_steps,
            batch_size=cell.per_gpu_batch_size,
            policy=policies[0],
            ranks=cell.world_size,
        )


def _model_name(objective: str, columns: int) -> str:
    return f"{SOURCE}-{objective}-n{columns}"


def _strategy(policy: str) -> str:
    return "columns" if policy in _PLAIN else f"columns-{policy}"


def to_measurement(sample: Sample, *, gpu: str, nodes: int = 1) -> Measurement:
    """One probe of ``casgd.plan.plan`` as a row of the common table; ``gpu`` is the hardware name of one rank's device.

    The iteration is the outer step at its usual time; its parts, taken at their fastest, are scaled to it.
    """
    if sample.policy not in PRECISION_OF:
        raise InputError("this policy has no precision in the tables", got=sample.policy, expected=", ".join(POLICIES))
    scale = sample.s * sample.usual_step_s / sample.step_s
    parts = {part: seconds * scale for part, seconds in sample.parts_s.items()}
    whole = sum(parts.values())
    forward_s, backward_s, optimizer_s = _phases(parts)
    return Measurement(
        source=SOURCE,
        model=_model_name(sample.objective, sample.features),
        task_input=f"n{sample.features}",
        gpu=gpu,
        nodes=nodes,
        world_size=sample.ranks,
        precision=PRECISION_OF[sample.policy],
        strategy=_strategy(sample.policy),
        per_gpu_batch_size=sample.batch_size,
        gradient_accumulation_steps=sample.s,
        framework=SOURCE,
        iteration_time_s=whole,
        compute_time_s=whole - parts["communicate"],
        communication_time_s=parts["communicate"],
        exposed_communication_s=parts["communicate"],
        forward_time_s=forward_s,
        backward_time_s=backward_s,
        optimizer_time_s=optimizer_s,
        iterations=sample.outer_steps,
        model_params=sample.features + 1,
        forward_flops_per_sample=2.0 * sample.features * sample.density,
    )


def _phases(parts: Mapping[str, float]) -> tuple[float, float, float]:
    """Forward, backward and optimizer seconds: see the head of this file."""
    return parts["gather"] + parts["gram"], parts["communicate"] + parts["recurrence"], parts["update"]


def glm_environment(machine: Environment) -> Environment:
    """``machine`` (of ``probe_device("cpu")``) with the software that CA-SGD runs on in place of PyTorch's."""
    return replace(machine, framework=SOURCE, framework_version=f"numpy {np.__version__}", backend="mpi")


def run_glm_cells(
    cells: Iterable[GlmCell],
    *,
    dataset: TimingsDataset,
    environment: Environment,
    scratch: str | Path,
    limits: MeasurementLimits | None = None,
) -> list[CellOutcome]:
    """Time the cells that ``dataset`` lacks, one after the other, and record each; a cell that fails is an outcome.

    ``environment`` is that of ``glm_environment``; ranks run on this machine, on CPUs. ``scratch`` is a local folder.
    """
    outcomes = []
    recorded = dataset.recorded_cells()
    for cell in cells:
        cell_id = cell.grid_cell.cell_id(environment)
        if cell_id in recorded:
            continue
        receipt = run_glm_cell(
            cell,
            environment=environment,
            scratch=Path(scratch) / cell_id,
            limits=limits or MeasurementLimits(),
            attempt=dataset.next_attempt(cell_id),
        )
        outcomes.append(record_cell(dataset, receipt))
    return outcomes


def run_glm_cell(
    cell: GlmCell, *, environment: Environment, scratch: Path, limits: MeasurementLimits, attempt: int = 1
) -> CellReceipt:
    """Start the ranks of one cell with mpiexec (one rank: without), wait, and say what came of it.

    Ranks that outlast ``limits.timeout_s`` are ended, by their own alarm at the latest.
    """
    grid = cell.grid_cell
    scratch.mkdir(parents=True, exist_ok=True)
    job = RankJob(
        cell=grid,
        cell_id=grid.cell_id(environment),
        attempt=attempt,
        environment=environment,
        limits=limits,
        scratch=str(scratch),
    )
    command = [sys.executable, "-m", "precision_time.tasks.glm", job.to_json()]
    began, started_at = time.monotonic(), time.time()
    cause, message = "", ""
    if cell.ranks > 1:
        mpiexec = _find_mpiexec()
        if mpiexec is None:
            cause, message = "exception", "mpiexec was not found; pip install 'precision-time[mpi]'"
        command = [mpiexec or "mpiexec", "-n", str(cell.ranks), *command]
    if not cause:
        cause, message = _run(command, timeout_s=limits.timeout_s)
    return CellReceipt(
        cell=grid,
        cell_id=job.cell_id,
        attempt=attempt,
        environment=environment,
        status="failed" if cause else "recorded",
        cause=cause,
        message=message,
        scratch=str(scratch),
        fragments=() if cause else tuple(str(fragment_path(scratch, rank)) for rank in range(cell.ranks)),
        started_at=started_at,
        duration_s=time.monotonic() - began,
        host=socket.gethostname(),
    )


def _find_mpiexec() -> str | None:
    """The mpiexec beside this Python first: it belongs to the library that mpi4py loads."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return shutil.which("mpiexec", path=beside)


def _run(command: Sequence[str], *, timeout_s: float) -> tuple[str, str]:
    """(cause, message) of a process and its children; empty when it ended well."""
    # One BLAS thread a rank: ranks that fight for the cores are ten times slower.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **threads},
    )
    try:
        _, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec ends its ranks
        try:
            process.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return "timed out", f"the ranks ran for more than {timeout_s:g} s"
    if process.returncode == 0:
        return "", ""
    lines = [line for line in errors.splitlines() if line.strip()]
    name = "signal" if process.returncode < 0 else "exit code"
    return f"{name} {abs(process.returncode)}", "\n".join(lines[-12:])[-2000:]


def _main(text: str) -> None:
    """What every rank of a cell runs: warm up, measure, write the rank's own fragment."""
    job = RankJob.from_json(text)
    signal.alarm(int(job.limits.timeout_s + _GRACE_S) + 1)  # no rank outlives its job, whatever became of mpiexec
    cell = GlmCell.of(job.cell)
    comm: Communicator = OneProcess() if cell.ranks == 1 else MpiCommunicator(deadline_s=job.limits.timeout_s)
    problem, options = _make_problem(cell, rank=comm.rank)
    began = time.monotonic()
    rows: list[IterationTiming] = []
    least, most = job.limits.warmup_steps + 3, job.limits.warmup_steps + job.limits.measured_steps
    while len(rows) < most:
        overdue = time.monotonic() - began > job.limits.seconds_per_cell
        if len(rows) >= least and any(comm.gather(overdue)):
            break
        comm.barrier()
        solution = run_ca_sgd(problem, options, comm=comm)
        rows.append(_row_of(solution, job=job, cell=cell, rank=comm.rank, step=len(rows), options=options))
    write_fragment(fragment_path(Path(job.scratch), comm.rank), rows)
    comm.barrier()


def _make_problem(cell: GlmCell, *, rank: int) -> tuple[Problem, Options]:
    """This rank's columns of standard-normal features, whole outer steps of them, and one epoch over them."""
    block = cell.s * cell.batch_size
    rows = block * max(1, min(_OUTER_STEPS, _MOST_ROWS // block))
    bounds = np.linspace(0, cell.columns, cell.ranks + 1).astype(int)
    kind = np.float64 if cell.policy == "fp64" else np.float32
    features = np.random.default_rng((0, rank)).standard_normal(
        (rows, int(bounds[rank + 1] - bounds[rank])), dtype=kind
    )
    signs = np.where(np.random.default_rng(1).random(rows) < 0.5, -1.0, 1.0)
    targets = {"logistic": signs, "squared": signs, "poisson": (1 + signs) / 2}[cell.objective]
    problem = Problem(features=features, targets=targets, objective=find_objective(cell.objective))
    # Steps this small cannot overflow, and a step takes as long whatever its size.
    schedule = Schedule(kind="constant", eta0=1e-6)
    options = Options(
        s=cell.s, batch_size=cell.batch_size, epochs=1, schedule=schedule, policy=find_policy(cell.policy)
    )
    return problem, options


def _row_of(
    solution: Solution, *, job: RankJob, cell: GlmCell, rank: int, step: int, options: Options
) -> IterationTiming:
    """One repeat as a row: its mean outer step."""
    outer_steps = -(-solution.steps // cell.s)
    parts = {part: seconds / outer_steps for part, seconds in solution.seconds.items()}
    whole = sum(parts.values())
    forward_s, backward_s, optimizer_s = _phases(parts)
    warm = step < job.limits.warmup_steps
    word_bytes = 8 if cell.policy == "fp64" else 4
    reduced = options.batch_size**2 * cell.s * (cell.s - 1) // 2 + cell.s * options.batch_size
    return IterationTiming(
        cell_id=job.cell_id,
        attempt=job.attempt,
        model=job.cell.model,
        task_input=f"n{cell.columns}",
        requested_precision=job.cell.precision,
        effective_precision=job.cell.precision,
        world_size=job.cell.world_size,
        nodes=job.cell.nodes,
        per_gpu_batch_size=job.cell.per_gpu_batch_size,
        gradient_accumulation_steps=job.cell.gradient_accumulation_steps,
        strategy=job.cell.strategy,
        rank=rank,
        step=step,
        is_warmup=warm,
        is_steady=True,
        iteration_time_s=whole,
        forward_time_s=forward_s,
        backward_time_s=backward_s,
        optimizer_time_s=optimizer_s,
        compute_time_s=None if warm else whole - parts["communicate"],
        communication_time_s=None if warm else parts["communicate"],
        exposed_communication_s=None if warm else parts["communicate"],
        bucket_count=1,
        bucket_bytes=word_bytes * reduced,
        loss_scale=None,
        step_skipped=False,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        model_params=cell.columns + 1,
        **asdict(job.environment),
        threads_per_rank=1,
        float32_matmul_precision="highest",
        host=socket.gethostname(),
        load_average=os.getloadavg()[0],
        recorded_at=time.time(),
    )


if __name__ == "__main__":
    _main(sys.argv[1])
