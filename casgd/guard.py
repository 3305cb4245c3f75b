"""Whether a precision policy suits the data, judged on one batch, and which policy does if it does not."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from precision_time.casgd.arrays import library_of, to_host
from precision_time.casgd.batch_fit import U_RMS, BatchFit, fit_batch, margin_errors, margin_fit
from precision_time.casgd.bounds import check_accumulators
from precision_time.casgd.communicator import Communicator
from precision_time.casgd.errors import InputError
from precision_time.casgd.mpi import find_communicator
from precision_time.casgd.nccl import sum_over_ranks
from precision_time.casgd.precision import CHOICES, LARGEST, POLICIES, ROUNDOFF, PrecisionPolicy
from precision_time.casgd.problem import Options, Problem

__all__ = ["OnRisk", "Verdict", "choose_policy", "fallbacks"]

OnRisk = Literal["fallback", "warn", "raise"]

# |dL| / L of a single run against FP32, when the last step is em times half the stability limit: 0.4 em sqrt(relative
# excess). Worst of 6 seeds on synthetic linear data (n = 32, s = b = 16, 3 epochs, R^2 0.946 to 0.9996, policies recipe
# and paper): 0.14 to 0.36 at a constant em = 1, 0.03 to 0.05 at 0.2, 0.005 to 0.02 at a 1/t step that ends at 0.08.
_STEP_NOISE = 0.4
# Column scales further apart than this, or means this many deviations away from zero, are called unscaled.
_SCALE_RATIO, _OFFSET_RATIO = 1e3, 10.0
# The loss at the optimum shows once there are two rows a column; four are better, and more than 768 take too long to
# fit (a Newton step is a solve of that size). With more columns no batch shows it: a small batch then serves the other
# checks as well.
_POWER_STEPS = 30
_ROWS_PER_COLUMN, _NEEDED_ROWS_PER_COLUMN, _FEWEST_ROWS, _MOST_ROWS = 4, 2, 256, 768


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement and the choice of the guard; the same on every rank.

    policy: the policy to train with.
    requested: the policy that was asked for.
    warnings: why ``requested`` is a risk, then advice on the data and the step; empty if there is none.
    step_warning: the warning, if any, that the first step is above the stability limit.
    unjudged_warning: the warning, if any, that the excess cannot be judged before training.
    predicted_excess: loss that ``policy`` adds, as a share of the loss, both on the rounded features; zero for a policy
        without formats below fp32, NaN if it cannot be judged.
    requested_excess: the same for ``requested``.
    step_deviation: by how much the loss of a single run with ``policy`` may differ from FP32, up or down, because the
        last step is not small, as a share of the loss; NaN if it cannot be judged.
    loss: at the given weights, or estimated at the optimum, above that of the saturated model; NaN likewise.
    first_step, last_step: as shares of the stability limit (`choose_policy`).
    rows: rows of the sample; zero if nothing had to be estimated.
    """

    policy: PrecisionPolicy
    requested: PrecisionPolicy
    warnings: tuple[str, ...] = ()
    step_warning: str = ""
    unjudged_warning: str = ""
    predicted_excess: float = 0.0
    requested_excess: float = 0.0
    step_deviation: float = 0.0
    loss: float = math.nan
    first_step: float = math.nan
    last_step: float = math.nan
    rows: int = 0

    @property
    def changed(self) -> bool:
        """Whether the guard fell back."""
        return self.policy != self.requested


def _raise_to(policy: PrecisionPolicy, fmt: str) -> PrecisionPolicy:
    """``policy`` without formats coarser than ``fmt``: the policy named ``fmt``, unless that would lower a choice."""
    named = POLICIES[fmt]
    if all(ROUNDOFF[getattr(named, choice)] <= ROUNDOFF[getattr(policy, choice)] for choice in CHOICES):
        return named
    coarse = {choice: fmt for choice, current in policy.formats.items() if ROUNDOFF[current] > ROUNDOFF[fmt]}
    return policy.replace(name=f"{policy.name}, {fmt} at least", **coarse)


def fallbacks(policy: PrecisionPolicy) -> list[PrecisionPolicy]:
    """``policy``, and the policies to fall back to: bf16 -> fp16 -> fp32."""
    finer = ["fp16", "fp32"] if "bf16" in policy.formats.values() else ["fp32"]
    return [policy, *(_raise_to(policy, fmt) for fmt in finer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """The columns of all ranks: ``largest`` is the largest value of all rows, the others are of the sampled rows."""

    largest: float
    largest_rms: float
    smallest_rms: float
    largest_offset: float


def _describe_columns(features: Any, block: Any) -> np.ndarray:
    values = features.data if library_of(features) == "scipy" else features
    largest = max(abs(float(values.max())), abs(float(values.min()))) if math.prod(values.shape) else 0.0
    offsets = np.zeros(0)
    if isinstance(block, np.ndarray):
        rms = np.sqrt(np.mean(np.square(block), axis=0))
        deviation = block.std(axis=0)
        varying = deviation > 1e-6 * rms  # a constant column is an intercept, not an offset
        offsets = np.abs(block.mean(axis=0)[varying]) / deviation[varying]
    else:
        # A sparse column is not to be centred.
        rms = np.sqrt(np.asarray(block.multiply(block).mean(axis=0))).ravel()
    rms = rms[rms > 0]
    finite = math.isfinite(largest)
    return np.array([
        float(not finite), largest if finite else 0.0,
        rms.max(initial=0.0) if finite else 0.0, rms.min(initial=math.inf) if finite and rms.size else 0.0,
        offsets.max(initial=0.0) if finite else 0.0,
    ])  # fmt: skip


def _join_columns(of_ranks: np.ndarray) -> _Columns:
    if of_ranks[:, 0].any():
        raise InputError("features hold NaN or infinity", got=f"on rank(s) {np.flatnonzero(of_ranks[:, 0]).tolist()}")
    small = of_ranks[:, 3][of_ranks[:, 3] > 0]
    most = of_ranks.max(axis=0)
    return _Columns(
        largest=float(most[1]),
        largest_rms=float(most[2]),
        smallest_rms=float(small.min()) if small.size else float(most[2]),
        largest_offset=float(most[4]),
    )


def _sum_in_one_message(comm: Communicator, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The sums over the ranks of several float64 arrays."""
    buffer = np.concatenate([np.asarray(part, dtype=np.float64).ravel() for part in parts])
    sum_over_ranks(buffer, comm=comm)
    pieces = np.split(buffer, np.cumsum([part.size for part in parts])[:-1])
    return [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """The results of the sample, the same on every rank after two sums: enough to judge any policy."""

    columns: _Columns
    fit: BatchFit
    can_judge: bool
    errors: Mapping[str, np.ndarray]
    largest_square: float
    first_step: float
    last_step: float

    def excess(self, policy: PrecisionPolicy) -> float:
        """1/2 mean phi'' (features + margin rounding), as a share of the loss; NaN where the loss is not known."""
        moved = np.zeros_like(self.fit.margins)
        # Formats as fine as fp32 add no excess over fp32, however small the loss.
        if ROUNDOFF[policy.x_storage] > ROUNDOFF["fp32"]:
            moved += self.errors[policy.x_storage]
        if ROUNDOFF[policy.margin_storage] > ROUNDOFF["fp32"]:
            moved += np.square(U_RMS[policy.margin_storage] * self.fit.margins)
        added = float(np.mean(self.fit.curvature * moved)) / 2
        if added == 0:
            return 0.0
        if not self.can_judge:
            return math.nan
        return added / self.fit.loss if self.fit.loss > 0 else math.inf

    def deviation(self, policy: PrecisionPolicy) -> float:
        return _STEP_NOISE * 2 * self.last_step * math.sqrt(self.excess(policy))

    def risks(self, policy: PrecisionPolicy, *, largest_excess: float) -> list[str]:
        risks = []
        sizes = {
            "x_storage": ("a feature", self.columns.largest),
            "margin_storage": ("a margin", float(np.max(np.abs(self.fit.margins)))),
            "gram_storage": ("a squared row norm", self.largest_square),
        }
        for choice, (number, size) in sizes.items():
            fmt = getattr(policy, choice)
            if size > LARGEST[fmt]:
                risks.append(f"{number} of {size:.6g} is beyond {fmt}, which ends at {LARGEST[fmt]:g}")
        excess, deviation = self.excess(policy), self.deviation(policy)
        if excess > largest_excess:
            risks.append(
                f"near interpolation: rounding to {policy.name} is predicted to add {excess:.2%} to the loss on the "
                f"rounded features (limit {largest_excess:.2%}; on the original features it adds less)"
            )
        elif deviation > largest_excess:
            risks.append(
                f"hot last step ({self.last_step:.2g} of the stability limit): with {policy.name} the loss of a run "
                f"may be off by {deviation:.2%} (limit {largest_excess:.2%}); let the step fall as 1/t"
            )
        if ROUNDOFF[policy.weights] > ROUNDOFF["fp32"]:
            risks.append(f"weights in {policy.weights} stop moving once a step is below u |w|")
        return risks

    def advice(self) -> list[str]:
        advice, columns = [], self.columns
        if columns.smallest_rms and columns.largest_rms / columns.smallest_rms > _SCALE_RATIO:
            advice.append(
                f"unscaled features: columns differ in scale by {columns.largest_rms / columns.smallest_rms:.0e}; "
                "standardise before rounding"
            )
        if columns.largest_offset > _OFFSET_RATIO:
            advice.append(
                f"uncentred features: a mean is {columns.largest_offset:.0f} deviations away from 0; "
                "standardise before rounding"
            )
        return advice

    def step_warning(self) -> str:
        if self.first_step <= 1 or math.isnan(self.first_step):
            return ""
        return f"the first step is {self.first_step:.2g} of the stability limit: the run may diverge"


def _sharpness(gram: np.ndarray, curvature: np.ndarray, batch_size: int) -> float:
    """lambda + (R^2 - lambda)/b of rows sqrt(phi'') x: steps below 2 over it are stable in the mean square.

    lambda is the largest eigenvalue of their second moment, R^2 = mean ||x||^4 / mean ||x||^2; from X X^T (q, q).
    """
    scale = np.sqrt(curvature)
    gram = gram * scale[:, None] * scale[None, :]
    squares = np.diag(gram)
    if not squares.any():
        return 0.0
    vector = np.sqrt(squares)
    for _ in range(_POWER_STEPS):
        vector = gram @ (vector / np.linalg.norm(vector))
    largest = float(np.linalg.norm(vector)) / len(gram)
    radius = float(np.mean(np.square(squares)) / np.mean(squares))
    return largest + max(radius - largest, 0.0) / batch_size


def _examine(
    problem: Problem,
    options: Options,
    comm: Communicator,
    *,
    columns_of_all: int,
    formats: set[str],
    rows: int,
    start: Any,
) -> _Findings:
    """Sample ``rows`` rows, fit them or use the weights of ``start``, and estimate the errors of rounding them."""
    # The same rows on every rank, spread over all rows because files may be sorted.
    sample = np.sort(np.random.default_rng(options.seed).choice(problem.rows, rows, replace=False))
    block = to_host(problem.features[sample]).astype(np.float64)
    targets = np.asarray(problem.targets, dtype=np.float64)[sample]
    sample_weight = None if problem.sample_weight is None else np.asarray(problem.sample_weight, np.float64)[sample]
    slots = np.zeros((comm.size, 5))
    slots[comm.rank] = _describe_columns(problem.features, block)
    # A rank with a NaN must still take part in the sums, or the others would wait for it.
    with np.errstate(all="ignore"):
        product = block @ block.T
        gram = product if isinstance(product, np.ndarray) else product.toarray()
        weights = None if start is None else np.asarray(start[0], dtype=np.float64)
        margins = np.zeros(rows) if weights is None else np.asarray(block @ weights)
        gram, margins, of_ranks = _sum_in_one_message(comm, [gram, margins, slots])
    columns = _join_columns(of_ranks)
    if weights is None:
        fit = fit_batch(
            gram, targets, objective=problem.objective, l2=problem.l2, sample_weight=sample_weight,
            fit_intercept=problem.fit_intercept,
        )  # fmt: skip
        weights = np.asarray(block.T @ fit.coefficients)
    else:
        margins = margins + float(start[1])
        fit = margin_fit(margins, targets, objective=problem.objective, sample_weight=sample_weight)
    names = sorted(formats)
    errors = _sum_in_one_message(comm, [margin_errors(block, weights, fmt) for fmt in names])
    smoothness = problem.objective.smoothness
    curvature = fit.second if smoothness is None else np.full(rows, smoothness)
    sharpest = _sharpness(gram + float(problem.fit_intercept), curvature, options.batch_size) + problem.l2
    steps = max(1, options.epochs * -(-problem.rows // options.batch_size))
    first_rate, last_rate = (float(options.schedule.rates(t, 1)[0]) for t in (1, steps))
    return _Findings(
        columns=columns,
        fit=fit,
        errors=dict(zip(names, errors, strict=True)),
        can_judge=start is not None or rows >= _NEEDED_ROWS_PER_COLUMN * columns_of_all,
        largest_square=float(np.max(np.diag(gram))),
        first_step=first_rate * sharpest / 2,
        last_step=last_rate * sharpest / 2,
    )


def _rows_wanted(columns: int) -> int:
    if 2 * columns > _MOST_ROWS:
        return _FEWEST_ROWS
    return min(max(_FEWEST_ROWS, _ROWS_PER_COLUMN * columns), _MOST_ROWS)


def choose_policy(
    problem: Problem,
    options: Options,
    *,
    comm: Any = None,
    on_risk: OnRisk = "fallback",
    largest_excess: float = 0.005,
    weights: np.ndarray | None = None,
    intercept: float = 0.0,
    sample_rows: int | None = None,
) -> Verdict:
    """Whether ``options.policy`` suits the data; every rank calls, and every rank gets the same verdict.

    A risk is: rounding that is predicted to add more than ``largest_excess`` of the loss (near interpolation); a last
    step so large that the loss of a single run may be off by as much; a number beyond the range of its format; weights
    below fp32. On a risk, ``fallback`` uses the first of bf16 -> fp16 -> fp32 without a risk, ``warn`` keeps the
    policy, ``raise`` refuses it. Advice (unscaled or uncentred features, a first step above the stability limit) is
    among the warnings but changes nothing. This function warns of nothing itself: the caller has
    ``Verdict.warnings``.

    The stability limit of a step is 2 / (lambda + (R^2 - lambda)/b), lambda and R^2 (the size of a row) of the batch
    with its rows scaled by sqrt(L), L the largest phi''; for Poisson by sqrt(phi'') at the fit. At b = 1 it is
    2 / (L R^2).

    The estimates are made at ``weights`` (n_local,) and ``intercept``. Without weights they are made at the optimum of
    one batch of ``sample_rows`` rows (four a column, 256 to 768, drawn at random), computed in float64 from its Gram
    matrix. A batch with fewer than two rows a column (above 384 columns, unless ``sample_rows`` is larger) cannot show
    that the data nearly interpolate: the verdict then says so, and its excess is NaN. Call again with the weights of a
    few epochs, as `guarded_training` does. Costs two sums and one or two gatherings over the ranks, and nothing for a
    policy without formats below fp32, which is never a risk.

    Raises:
        InputError: a risk with ``raise``; an accumulator below fp32 whose bound is too large (whatever ``on_risk``);
            NaN or infinity in the features, naming the ranks.
    """
    if on_risk not in ("fallback", "warn", "raise"):
        raise InputError("on_risk", got=repr(on_risk), expected="fallback, warn, raise")
    policy = options.policy
    if all(ROUNDOFF[fmt] <= ROUNDOFF["fp32"] for fmt in policy.formats.values()):
        return Verdict(policy=policy, requested=policy)
    ranks = find_communicator(comm)
    columns = ranks.gather(problem.columns)
    check_accumulators(policy, columns=max(columns), block_rows=options.s * options.batch_size)
    rows = min(problem.rows, sample_rows or _rows_wanted(sum(columns)))
    candidates = fallbacks(policy)
    findings = _examine(
        problem, options, ranks, columns_of_all=sum(columns), rows=rows,
        formats={candidate.x_storage for candidate in candidates},
        start=None if weights is None else (weights, intercept),
    )  # fmt: skip
    risks = [findings.risks(candidate, largest_excess=largest_excess) for candidate in candidates]
    level = next((i for i, texts in enumerate(risks) if not texts), len(candidates) - 1)
    # Ranks on different processors may differ in the last bit of a number that sits on a limit.
    level = max(ranks.gather(level))
    if level and on_risk == "raise":
        raise InputError(
            f"policy {policy.name!r} does not suit the data", got="; ".join(risks[0]) or "another rank found a risk",
            expected=f"at most {largest_excess:.2%} of the loss", fix="let the guard fall back, or choose fp32",
        )  # fmt: skip
    level = level if on_risk == "fallback" else 0
    candidate = candidates[level]
    step_warning, unjudged_warning = findings.step_warning(), ""
    if math.isnan(findings.excess(policy)):
        unjudged_warning = (
            f"the loss that rounding to {policy.name} adds cannot be judged before training: a sample of {rows} rows "
            f"for {sum(columns)} columns, and it takes {_NEEDED_ROWS_PER_COLUMN} rows a column"
        )
    return Verdict(
        policy=candidate,
        requested=policy,
        warnings=(
            *risks[0],
            *(risks[level] if level else ()),
            *([unjudged_warning] if unjudged_warning else []),
            *findings.advice(),
            *([step_warning] if step_warning else []),
        ),
        step_warning=step_warning,
        unjudged_warning=unjudged_warning,
        predicted_excess=findings.excess(candidate),
        requested_excess=findings.excess(policy),
        step_deviation=findings.deviation(candidate),
        loss=findings.fit.loss if findings.can_judge else math.nan,
        first_step=findings.first_step,
        last_step=findings.last_step,
        rows=rows,
    )
