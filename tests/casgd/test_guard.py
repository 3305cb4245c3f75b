"""The guard: the predicted loss of rounding, and the policy that follows from it."""

import math

import numpy as np
import pytest
from scipy.sparse import csr_array, csr_matrix, random_array

from precision_time.casgd.batch_fit import U_RMS, fit_batch, margin_errors
from precision_time.casgd.bounds import check_accumulators
from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.errors import InputError
from precision_time.casgd.guard import Verdict, choose_policy
from precision_time.casgd.objectives import LOGISTIC, OBJECTIVES, POISSON, SQUARED
from precision_time.casgd.precision import CHOICES, LARGEST, POLICIES, ROUNDOFF, round_to
from precision_time.casgd.problem import Options, Problem, Schedule


def interpolating(noise, *, m=4096, n=64, seed=0):
    """Linear data of signal power about 25."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((m, n))
    return x, x @ (random.standard_normal(n) * math.sqrt(25 / n)) + noise * random.standard_normal(m)


def predicted_excess(x, w, *, fmt, curvature=1.0):
    """The loss that rounding the features adds: half the mean square error of the margins, times phi''."""
    return float(np.mean(margin_errors(x.astype(np.float64), w, fmt) * curvature)) / 2


def least_squares(x, y):
    w = np.linalg.lstsq(x, y, rcond=None)[0]
    return w, float(np.mean(np.square(x @ w - y))) / 2


def judge(x, y, objective=SQUARED, *, policy="recipe", kind="optimal", of_limit=0.01, l2=0.0, given=None, **more):
    """The verdict on data, at a step of ``of_limit`` of the stability limit."""
    rows = np.c_[x, np.ones(len(x))]
    largest = np.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]
    sizes = np.square(rows).sum(axis=1)
    sharp = largest + (np.mean(sizes**2) / np.mean(sizes) - largest) / Options().batch_size
    eta = of_limit * 2 / ((objective.smoothness or 1.0) * sharp)
    schedule = Schedule(kind=kind, eta0=eta, alpha=1 / (eta * 1000), t0=1000.0)
    problem = Problem(features=x if given is None else given, targets=y, objective=objective, l2=l2)
    return choose_policy(problem, Options(policy=POLICIES[policy], schedule=schedule), **more)


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32", "fp32"])
def test_mean_rounding_error_is_that_of_normal_numbers(fmt):
    x = np.random.default_rng(0).standard_normal(200_000)
    relative = (round_to(x, fmt).astype(np.float64) - x) / x
    assert math.sqrt(np.mean(np.square(relative))) == pytest.approx(U_RMS[fmt], rel=0.02)


def test_largest_numbers_are_those_of_the_formats():
    for fmt, largest in LARGEST.items():
        assert float(round_to(np.array([largest]), fmt)[0]) == largest
        if fmt != "fp64":
            with np.errstate(over="ignore"):
                assert np.isinf(round_to(np.array([largest * (1 + ROUNDOFF[fmt])]), fmt)[0])


@pytest.mark.parametrize(
    ("noise", "fmt"), [(0.1, "bf16"), (0.03, "bf16"), (0.01, "bf16"), (0.01, "fp16"), (0.001, "fp16")]
)
def test_prediction_is_the_measured_excess_of_exact_least_squares(noise, fmt):
    x, y = interpolating(noise, m=8192)
    w, loss = least_squares(x, y)
    measured = least_squares(round_to(x, fmt).astype(np.float64), y)[1] - loss
    predicted = predicted_excess(x, w, fmt=fmt)
    assert measured / 1.5 < predicted < measured * 1.5


@pytest.mark.parametrize("noise", [0.1, 0.03, 0.01, 0.001])
def test_one_batch_predicts_the_excess_of_exact_least_squares_on_all_rows(noise):
    x, y = interpolating(noise, m=8192)
    _, loss = least_squares(x, y)
    measured = least_squares(round_to(x, "bf16").astype(np.float64), y)[1] / loss - 1
    verdict = judge(x, y)
    assert verdict.rows == 256
    assert measured / 1.5 < verdict.requested_excess < measured * 1.5
    assert verdict.loss == pytest.approx(loss, rel=0.3)


@pytest.mark.parametrize("policy", ["recipe", "paper"])
@pytest.mark.parametrize(("noise", "expected"), [(0.1, 0.0075), (0.03, 0.083), (0.01, 0.74)])
def test_one_batch_predicts_the_loss_of_the_solver(noise, expected, policy):
    """The loss of CA-SGD with the policy over that of FP32 SGD, on the rounded features and on the original ones."""
    x, y = interpolating(noise, m=8192, n=32)
    problem = Problem(features=x, targets=y, objective=SQUARED)
    steps = 8192 // 32
    schedule = Schedule("optimal", 0.25, alpha=1 / (0.25 * steps), t0=float(steps))

    def solve(name, s):
        return run_ca_sgd(problem, Options(s=s, batch_size=32, epochs=10, schedule=schedule, policy=name))

    def loss(solution, x_format="fp64", margin_format="fp64"):
        z = round_to(x, x_format).astype(np.float64) @ solution.weights.astype(np.float64) + solution.intercept
        return float(np.mean(np.square(round_to(z, margin_format).astype(np.float64) - y))) / 2

    exact = loss(solve("fp32", 1))
    solution = solve(policy, 8)
    formats = POLICIES[policy]
    measured = loss(solution, formats.x_storage, formats.margin_storage) / exact - 1
    verdict = choose_policy(
        problem, Options(batch_size=32, epochs=10, schedule=schedule, policy=policy), on_risk="warn"
    )
    assert measured / 1.5 < verdict.predicted_excess < measured * 1.5
    assert verdict.predicted_excess == pytest.approx(expected * (2 if policy == "paper" else 1), rel=0.1)
    assert abs(loss(solution) / exact - 1) < measured / 10
    assert "on the rounded features" in verdict.warnings[0]


@pytest.mark.parametrize("objective", [LOGISTIC, POISSON])
def test_prediction_holds_for_curved_losses(objective):
    random = np.random.default_rng(0)
    x, w = random.standard_normal((4000, 30)), random.standard_normal(30) / 5
    z = x @ w
    y = np.where(random.random(4000) < 0.5, 1.0, -1.0) if objective is LOGISTIC else random.poisson(np.exp(z)) * 1.0
    error = round_to(x, "bf16") - x
    # With both signs of the rounding error the first-order part cancels, as it does on average over roundings.
    both = (objective.loss((x + error) @ w, y) + objective.loss((x - error) @ w, y)) / 2 - objective.loss(z, y)
    predicted = predicted_excess(x, w, fmt="bf16", curvature=objective.second(z, y))
    assert predicted == pytest.approx(np.mean(both), rel=0.1)


def test_prediction_is_the_same_for_sparse_features():
    x = random_array((200, 40), density=0.1, rng=np.random.default_rng(0), format="csr")
    w = np.random.default_rng(1).standard_normal(40)
    dense = predicted_excess(x.toarray(), w, fmt="bf16")
    assert dense > 0
    for kind in (csr_array, csr_matrix):
        assert predicted_excess(kind(x), w, fmt="bf16") == pytest.approx(dense, rel=1e-12)


def test_values_that_a_format_holds_exactly_add_no_loss():
    whole = np.random.default_rng(0).integers(-16, 17, (100, 8)).astype(np.float32)
    assert predicted_excess(whole, np.ones(8), fmt="bf16") == 0
    assert predicted_excess(whole / 3, np.ones(8), fmt="bf16") > 0


def test_small_numbers_lose_more_in_fp16_than_their_size_says():
    x = 1e-6 * np.random.default_rng(0).standard_normal((4000, 4))
    w = np.full(4, 1e6)
    measured = np.mean(np.square((round_to(x, "fp16") - x) @ w)) / 2
    assert predicted_excess(x, w, fmt="fp16") == pytest.approx(measured, rel=0.1)
    assert predicted_excess(x, w, fmt="fp16") > 100 * predicted_excess(1e6 * x, 1e-6 * w, fmt="fp16")


@pytest.mark.parametrize(("noise", "name"), [(1.0, "recipe"), (0.1, "fp16"), (0.03, "fp16"), (0.001, "fp32")])
def test_falls_back_as_far_as_the_data_ask(noise, name):
    verdict = judge(*interpolating(noise))
    assert (verdict.policy, verdict.requested) == (POLICIES[name], POLICIES["recipe"])
    assert verdict.changed == (name != "recipe")
    assert verdict.predicted_excess < 0.005
    if verdict.changed:
        assert "near interpolation" in verdict.warnings[0]
        assert verdict.requested_excess > 0.005
    else:
        assert verdict.warnings == ()


@pytest.mark.parametrize("policy", ["paper", "bf16-gram"])
def test_every_bf16_policy_falls_back_to_fp16(policy):
    assert judge(*interpolating(0.1), policy=policy).policy == POLICIES["fp16"]


def test_falling_back_lowers_no_other_choice():
    x, y = interpolating(0.1)
    careful = POLICIES["fp64"].replace(name="careful", x_storage="bf16")
    problem, schedule = Problem(features=x, targets=y, objective=SQUARED), Schedule(kind="optimal", eta0=1e-6)
    policy = choose_policy(problem, Options(policy=careful, schedule=schedule)).policy
    assert policy.formats == careful.formats | {"x_storage": "fp16"}
    assert "careful" in policy.name


def test_on_risk_warns_or_raises():
    x, y = interpolating(0.03)
    warned = judge(x, y, on_risk="warn")
    assert warned.policy == POLICIES["recipe"]
    assert "near interpolation" in warned.warnings[0]
    assert warned.predicted_excess == warned.requested_excess > 0.005
    with pytest.raises(InputError, match=r"near interpolation: .* recipe .* \d+\.\d\d%"):
        judge(x, y, on_risk="raise")
    assert judge(*interpolating(1.0), on_risk="raise").policy == POLICIES["recipe"]
    assert judge(x, y, largest_excess=0.5).policy == POLICIES["recipe"]
    with pytest.raises(InputError, match="on_risk"):
        judge(x, y, on_risk="shout")


def test_hot_constant_step_asks_for_fp16_where_a_falling_one_does_not():
    x, y = interpolating(0.4)
    hot, falling = (judge(x, y, kind=kind, of_limit=0.5) for kind in ("constant", "optimal"))
    assert hot.policy == POLICIES["fp16"]
    assert "hot last step" in hot.warnings[0]
    assert hot.last_step == pytest.approx(0.5, rel=0.3)  # 256 rows of 64 columns show a larger eigenvalue
    assert falling.last_step < hot.last_step / 2
    assert falling.policy == POLICIES["recipe"]
    assert falling.step_deviation < 0.005
    assert judge(x, y, kind="constant", of_limit=0.05).policy == POLICIES["recipe"]


def test_a_first_step_above_the_stability_limit_is_warned_of():
    verdict = judge(*interpolating(3.0), of_limit=3.0)
    assert any("stability limit" in text for text in verdict.warnings)


def test_unscaled_and_uncentred_features_are_warned_of_and_change_nothing():
    x, y = interpolating(2.0)
    clean = judge(x, y)
    assert clean.warnings == ()
    scaled = judge(x * np.geomspace(1, 1e4, 64), y)
    assert scaled.policy == POLICIES["recipe"]
    assert ["unscaled" in text for text in scaled.warnings] == [True]
    shifted = judge(x + 20 * (np.arange(64) == 3), y, objective=SQUARED, largest_excess=1.0)
    assert ["uncentred" in text for text in shifted.warnings] == [True]


def test_constant_and_zero_columns_are_no_offset():
    x, y = interpolating(2.0)
    x[:, 0], x[:, 1] = 7.0, 0.0
    assert judge(x, y).warnings == ()


def test_a_number_beyond_fp16_skips_fp16_in_any_row():
    x, y = interpolating(0.1)
    assert judge(x, y, policy="fp16").policy == POLICIES["fp16"]
    for row in (0, 4095):
        large = x.copy()
        large[row, 5] = 70_000.0
        assert judge(large, y).policy == POLICIES["fp32"]
        verdict = judge(large, y, policy="fp16")
        assert verdict.policy == POLICIES["fp32"]
        assert "a feature of 70000 is beyond fp16, which ends at 65504" in verdict.warnings[0]


def test_margins_and_gram_beyond_fp16_are_found():
    x, y = interpolating(1e5)
    for choice, words in (("margin_storage", "a margin"), ("gram_storage", "a squared row norm")):
        policy = POLICIES["fp32"].replace(name="narrow", **{choice: "fp16"})
        problem = Problem(features=1e2 * x, targets=1e5 * y, objective=SQUARED)
        verdict = choose_policy(problem, Options(policy=policy, schedule=Schedule(kind="optimal", eta0=1e-9)))
        assert verdict.policy == POLICIES["fp32"]
        assert words in verdict.warnings[0]


def test_weights_below_fp32_are_a_risk():
    policy = POLICIES["recipe"].replace(name="small weights", weights="bf16")
    x, y = interpolating(3.0)
    problem = Problem(features=x, targets=y, objective=SQUARED)
    verdict = choose_policy(problem, Options(policy=policy, schedule=Schedule(kind="optimal", eta0=1e-6)))
    assert verdict.policy.weights == "fp32"
    assert "weights in bf16" in verdict.warnings[0]


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_full_precision_is_never_looked_at(name):
    problem = Problem(features=np.full((3, 2), np.nan), targets=np.ones(3), objective=SQUARED)
    verdict = choose_policy(problem, Options(policy=POLICIES[name]), comm=object())
    assert verdict == Verdict(policy=POLICIES[name], requested=POLICIES[name])


def test_given_weights_are_judged_as_they_are():
    x, y = interpolating(0.1, m=600)
    w, loss = least_squares(x, y)
    problem, options = (
        Problem(features=x, targets=y + 5, objective=SQUARED),
        Options(policy=POLICIES["recipe"], schedule=Schedule(eta0=1e-6)),
    )
    verdict = choose_policy(problem, options, weights=w, intercept=5.0, sample_rows=600)
    assert verdict.rows == 600
    assert verdict.loss == pytest.approx(loss)
    assert verdict.requested_excess == pytest.approx(predicted_excess(x, w, fmt="bf16") / loss, rel=1e-6)
    far = choose_policy(problem, options, weights=w, intercept=0.0, sample_rows=600)
    assert far.policy == POLICIES["recipe"]


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_ordinary_data_keep_the_recipe(objective):
    random = np.random.default_rng(0)
    x = random.standard_normal((2000, 20))
    z = x @ random.standard_normal(20) / 5
    y = {
        "logistic": np.where(random.random(2000) < 1 / (1 + np.exp(-z)), 1.0, -1.0),
        "squared": z + 100 + 0.5 * random.standard_normal(2000),
        "poisson": random.poisson(np.exp(z)).astype(float),
    }[objective.name]
    for weights in (None, random.random(2000)):
        problem = Problem(features=x, targets=y, objective=objective, l2=1e-4, sample_weight=weights)
        schedule = Schedule(kind="optimal", eta0=1e-3, alpha=1.0)
        verdict = choose_policy(problem, Options(policy=POLICIES["recipe"], schedule=schedule))
        assert verdict.policy == POLICIES["recipe"]
        assert verdict.warnings == ()
        assert verdict.predicted_excess < 1e-4


@pytest.mark.parametrize(("m", "n"), [(2000, 500), (300, 160), (700, 385)])
def test_too_few_rows_a_column_are_no_verdict(m, n):
    x, y = interpolating(0.01, m=m, n=n)
    verdict = judge(x, y)
    assert verdict.policy == POLICIES["recipe"]
    for figure in (verdict.predicted_excess, verdict.requested_excess, verdict.step_deviation, verdict.loss):
        assert math.isnan(figure)
    assert verdict.warnings == (verdict.unjudged_warning,)
    assert f"cannot be judged before training: a sample of {verdict.rows} rows for {n} columns" in verdict.warnings[0]
    assert judge(x, y, on_risk="raise").policy == POLICIES["recipe"]
    # With weights the loss is known for any number of columns.
    w, _ = least_squares(x, y)
    problem = Problem(features=x, targets=y, objective=SQUARED)
    judged = choose_policy(problem, Options(policy=POLICIES["recipe"], schedule=Schedule(eta0=1e-6)), weights=w)
    assert judged.unjudged_warning == ""
    assert judged.policy != POLICIES["recipe"]
    assert "near interpolation" in judged.warnings[0]


def test_wide_features_that_bf16_holds_exactly_need_no_judgement():
    x, y = interpolating(0.01, m=600, n=400)
    verdict = judge(np.sign(x), y)
    assert (verdict.predicted_excess, verdict.unjudged_warning) == (0.0, "")


def test_fp32_has_no_excess_over_itself_where_the_loss_is_zero():
    problem = Problem(features=np.ones((4, 2)), targets=np.full(4, 2.0), objective=SQUARED)
    options = Options(policy=POLICIES["recipe"], schedule=Schedule(eta0=1e-6))
    assert choose_policy(problem, options, weights=np.ones(2)).policy == POLICIES["recipe"]
    problem = Problem(features=np.full((4, 2), 1 / 3), targets=np.full(4, 2 / 3), objective=SQUARED)
    verdict = choose_policy(problem, options, weights=np.ones(2))
    assert (verdict.policy, verdict.predicted_excess) == (POLICIES["fp32"], 0.0)
    assert verdict.requested_excess == math.inf


def test_separable_wide_and_constant_data_are_no_false_alarm():
    random = np.random.default_rng(0)
    x = random.standard_normal((600, 20))
    separable = np.where(x[:, 0] > 0, 1.0, -1.0)
    wide = random.standard_normal((600, 450))
    noisy = wide @ random.standard_normal(450) / 10 + random.standard_normal(600)
    for features, y, objective in (
        (x, separable, LOGISTIC),
        (wide, np.where(noisy > 0, 1.0, -1.0), LOGISTIC),
        (wide, noisy, SQUARED),
        (x, np.ones(600), LOGISTIC),
        (x, np.zeros(600), SQUARED),
        (x, np.zeros(600), POISSON),
        (np.zeros((600, 3)), noisy, SQUARED),
    ):
        assert judge(features, y, objective).policy == POLICIES["recipe"]


def test_one_row_has_a_verdict():
    assert judge(np.ones((1, 2)), np.ones(1)).rows == 1


def test_one_hot_columns_never_ask_for_more_than_bf16():
    random = np.random.default_rng(0)
    x = np.eye(30)[random.integers(0, 30, 3000)]
    y = x @ random.standard_normal(30) + 1e-4 * random.standard_normal(3000)
    assert judge(x, y, given=csr_matrix(x)).policy == POLICIES["recipe"]
    assert judge(x / 3, y, given=csr_array(x / 3)).policy != POLICIES["recipe"]


@pytest.mark.parametrize("noise", [1.0, 0.1, 0.001])
def test_ranks_that_own_columns_agree_with_one_process(noise, ranks):
    x, y = interpolating(noise, m=1000, n=30)
    alone = judge(x, y)

    def ask(comm):
        columns = x[:, :20] if comm.rank == 0 else x[:, 20:]
        verdict = judge(x, y, given=columns, comm=comm)
        return verdict, comm.reductions

    (first, sums), (second, _) = ranks(ask, 2)
    assert first == second
    assert sums == 2
    assert first.policy == alone.policy
    assert first.requested_excess == pytest.approx(alone.requested_excess, rel=1e-6)
    assert first.warnings == alone.warnings


def test_overflow_on_one_rank_is_known_to_all(ranks):
    x, y = interpolating(1.0, m=300, n=10)
    x[7, 9] = 1e5

    def ask(comm):
        return judge(x, y, given=x[:, 5 * comm.rank : 5 * comm.rank + 5], policy="fp16", comm=comm)

    for verdict in ranks(ask, 2):
        assert verdict.policy == POLICIES["fp32"]
        assert "100000 is beyond fp16" in verdict.warnings[0]


def test_rank_with_nan_is_named_on_all(ranks):
    x, y = interpolating(0.1, m=300, n=10)
    broken = x.copy()
    broken[299, 7] = np.nan

    def ask(comm):
        with pytest.raises(InputError, match=r"on rank\(s\) \[1\]"):
            judge(x, y, given=broken[:, 5 * comm.rank : 5 * comm.rank + 5], comm=comm)

    ranks(ask, 2)


def test_low_accumulator_is_refused_above_its_size_with_the_bound():
    low = POLICIES["recipe"].replace(name="low", gram_accumulate="fp16")
    check_accumulators(low, columns=20, block_rows=4096)
    with pytest.raises(
        InputError, match=r"4096 terms \(gram_accumulate\) in fp16; got: relative error bound 2;.* 20 terms"
    ):
        check_accumulators(low, columns=4096, block_rows=1)
    with pytest.raises(InputError, match=r"512 terms \(increment\) in bf16; got: relative error bound 2;"):
        check_accumulators(low.replace(name="lower", increment="bf16"), columns=2, block_rows=512)
    check_accumulators(low.replace(name="tensor core", gram_accumulate="tf32"), columns=4096, block_rows=4096)
    for policy in POLICIES.values():
        check_accumulators(policy, columns=10**7, block_rows=10**7)


def test_a_low_accumulator_is_refused_for_every_on_risk():
    x, y = interpolating(1.0)
    low = POLICIES["fp32"].replace(name="low", margin_accumulate="bf16")
    problem = Problem(features=x, targets=y, objective=SQUARED)
    for on_risk in ("fallback", "warn", "raise"):
        with pytest.raises(InputError, match="margin_accumulate"):
            choose_policy(problem, Options(policy=low), on_risk=on_risk)


def test_policies_without_low_formats_are_recognised_choice_by_choice():
    x, y = interpolating(0.001)
    for choice in set(CHOICES) - {"margin_accumulate", "gram_accumulate", "increment"}:
        policy = POLICIES["fp32"].replace(name="one", **{choice: "bf16"})
        problem = Problem(features=x, targets=y, objective=SQUARED)
        assert choose_policy(problem, Options(policy=policy, schedule=Schedule(eta0=1e-6))).rows == 256


def test_fit_of_a_batch_is_least_squares_and_its_loss_unbiased():
    x, y = interpolating(1.0, m=200, n=30)
    w, loss = least_squares(np.c_[x, np.ones(200)], y + 3)
    fit = fit_batch(x @ x.T, y + 3, objective=SQUARED)
    np.testing.assert_allclose(x.T @ fit.coefficients, w[:-1], atol=1e-4)
    assert fit.loss == pytest.approx(loss / (1 - 31 / 200), rel=1e-3)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_fit_of_a_batch_has_no_gradient_left(objective):
    random = np.random.default_rng(0)
    x, a = random.standard_normal((150, 12)), random.random(150)
    z = x @ random.standard_normal(12) / 3
    y = np.where(random.random(150) < 0.4, 1.0, -1.0) if objective is LOGISTIC else random.poisson(np.exp(z)) * 1.0
    fit = fit_batch(x @ x.T, y, objective=objective, l2=0.1, sample_weight=a, fit_intercept=False)
    w = x.T @ fit.coefficients
    gradient = x.T @ (a / a.mean() * objective.derivative(x @ w, y)) / 150 + 0.1 * w
    assert np.linalg.norm(gradient) < 1e-3 * np.linalg.norm(w)
    np.testing.assert_allclose(fit.margins, x @ w, atol=1e-9)
