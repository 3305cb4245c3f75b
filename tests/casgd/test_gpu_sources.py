"""The GPU back end without a GPU: its CUDA source runs as C++ on the CPU, under a stand-in for CuPy.

The threads of a CTA are fibres, resumed in random order at every barrier and shuffle, so a barrier that is missing
shows as a wrong number. Speed, cuBLAS and NCCL need a GPU (tests/gpu/casgd_check.sh).
"""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.errors import CommunicationError, InputError
from precision_time.casgd.nccl import NcclCommunicator
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.precision import POLICIES, round_to
from precision_time.casgd.problem import Options, Problem, Schedule

pytestmark = pytest.mark.compiler


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = load(Path(__file__).with_name("stand_in_cupy.py"))
Array, DEVICE = stand_in.Array, stand_in.DEVICE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module casgd.gpu on the stand-in."""
    from precision_time.casgd import gpu, kernels

    for name, module in stand_in.make_modules(folder).items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, value in {"stuck": False, "count": 1, "sums": [], "aborted": 0}.items():
        monkeypatch.setattr(DEVICE, name, value)
    kernels.load_kernels.cache_clear()
    yield gpu
    kernels.load_kernels.cache_clear()


def make_problem(objective: str, *, m: int = 53, n: int = 11, weighted: bool = False, l2: float = 0.0) -> Problem:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((m, n)) / np.sqrt(n)
    z = x @ rng.standard_normal(n)
    y = {"logistic": np.where(z > 0, 1.0, -1.0), "squared": z + 0.1, "poisson": rng.poisson(np.exp(z))}[objective]
    return Problem(
        features=x,
        targets=y,
        objective=find_objective(objective),
        l2=l2,
        sample_weight=rng.uniform(0.5, 2.0, m) if weighted else None,
    )


def on_device(problem: Problem) -> Problem:
    return replace(problem, features=Array(problem.features))


def make_options(policy: str, **changed: Any) -> Options:
    settings = {"s": 4, "batch_size": 4, "epochs": 2, "schedule": Schedule(kind="invscaling", eta0=0.3), **changed}
    return Options(policy=POLICIES[policy], **settings)


@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
@pytest.mark.parametrize(("policy", "tolerance"), [("fp64", 1e-12), ("recipe", 2e-6)])
def test_kernels_give_the_iterates_of_the_numpy_back_end(gpu, objective, policy, tolerance):
    problem, options = make_problem(objective, l2=1e-2, weighted=True), make_options(policy)
    expected = run_ca_sgd(problem, options)
    solution = run_ca_sgd(on_device(problem), options)
    atol = tolerance * np.abs(expected.weights).max()
    np.testing.assert_allclose(solution.weights, expected.weights, rtol=0, atol=atol)
    assert solution.intercept == pytest.approx(expected.intercept, rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(solution.loss_curve, expected.loss_curve, rtol=tolerance)
    assert (solution.steps, solution.reductions) == (expected.steps, expected.reductions)


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("fp32", 2e-6), ("fp16", 2e-6), ("paper", 2e-3), ("bf16-gram", 1e-4)]
)
@pytest.mark.parametrize(("s", "batch_size"), [(1, 8), (3, 7), (16, 4)])
def test_every_policy_and_shape_of_block(gpu, policy, tolerance, s, batch_size):
    """53 rows leave a shorter last batch and a shorter last block; a margin on a rounding tie may fall either way."""
    problem, options = make_problem("logistic"), make_options(policy, s=s, batch_size=batch_size, order="cyclic")
    expected = run_ca_sgd(problem, options)
    solution = run_ca_sgd(on_device(problem), options)
    atol = tolerance * np.abs(expected.weights).max()
    np.testing.assert_allclose(solution.weights, expected.weights, rtol=0, atol=atol)


def test_plain_sgd_is_one_block_and_gathers_nothing(gpu):
    problem, options = make_problem("squared"), make_options("fp64", s=9)
    run = gpu.DeviceRun(on_device(problem), replace(options, s=1))
    run.pass_over(next(run.epochs()))
    assert run.launched == ["margins", "recurrence", "increment"]
    np.testing.assert_allclose(
        run_ca_sgd(on_device(problem), replace(options, s=1)).weights, run_ca_sgd(problem, options).weights, rtol=1e-11
    )


class ThreadRanks:
    """Ranks in threads of this process; a sum adds their buffers, and the buffer of a sum under way is NaN.

    ``told`` lists the events of each rank in order: sums with their words, and waits.
    """

    def __init__(self, size: int) -> None:
        self.size, self.barrier_, self.brought = size, threading.Barrier(size), [None] * size
        self.told: list[list[Any]] = [[] for _ in range(size)]

    def rank(self, rank: int) -> Any:
        shared = self

        class Rank:
            size, reductions = shared.size, 0

            def exchange(self, value: Any) -> list:
                shared.brought[rank] = value
                shared.barrier_.wait(timeout=20)
                values = list(shared.brought)
                shared.barrier_.wait(timeout=20)
                return values

            def sum(self, buffer: Any) -> None:
                self.start_sum(buffer).wait()

            def start_sum(self, buffer: Any) -> Any:
                self.reductions += 1
                shared.told[rank].append(buffer.size)
                values = buffer.get()
                buffer[:] = np.nan

                def wait() -> None:
                    shared.told[rank].append("wait")
                    buffer[:] = np.sum(self.exchange(values), axis=0)

                return types.SimpleNamespace(wait=wait)

            gather = exchange

            def barrier(self) -> None:
                self.exchange(None)

            def abort(self, message: str) -> None:
                raise RuntimeError(message)

        Rank.rank = rank
        return Rank()


def run_in_threads(work: Any, ranks: int = 2) -> list[Any]:
    """The results of ``work(rank)`` in all threads, or its exceptions."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


def own_columns(problem: Problem, rank: int) -> Problem:
    columns = (slice(0, 5), slice(5, 11))[rank]
    return replace(problem, features=Array(np.ascontiguousarray(problem.features[:, columns])))


def test_two_ranks_hold_one_solution_after_one_sum_an_outer_step(gpu):
    problem, options = make_problem("logistic", weighted=True), make_options("fp64")
    ranks = ThreadRanks(2)

    def work(rank: int) -> Any:
        run = gpu.DeviceRun(own_columns(problem, rank), options, comm=ranks.rank(rank))
        for epoch in run.epochs():
            run.pass_over(epoch)
        return run.finish(), run.launched

    (first, launched), (second, _) = run_in_threads(work)
    whole = run_ca_sgd(problem, options)
    np.testing.assert_allclose(np.concatenate([first.weights, second.weights]), whole.weights, rtol=1e-10)
    assert first.intercept == second.intercept
    assert first.reductions == 2 * -(-53 // 16)
    assert tuple(launched) == gpu.LAUNCHES
    assert len(gpu.LAUNCHES) <= 6


@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
@pytest.mark.parametrize(("s", "batch_size"), [(4, 4), (3, 7), (2, 26), (60, 1), (9, 60)])
def test_prefetch_changes_no_bit(gpu, objective, s, batch_size):
    """53 rows: also a last block of one batch, a single block, and a single batch."""
    problem = make_problem(objective, l2=1e-2, weighted=True)
    options = make_options("recipe", s=s, batch_size=batch_size)
    plain = run_ca_sgd(on_device(problem), options)
    ahead = run_ca_sgd(on_device(problem), replace(options, prefetch=True))
    assert (ahead.weights == plain.weights).all()
    assert ahead.loss_curve == plain.loss_curve
    assert ahead.intercept == plain.intercept


def test_with_prefetch_the_gram_of_the_next_step_is_summed_during_the_recurrence_of_this_one(gpu, monkeypatch):
    problem, options = make_problem("logistic"), make_options("fp64", prefetch=True, epochs=1)
    ranks = ThreadRanks(2)
    launch = gpu.DeviceRun._launch

    def tell(run: Any, name: str, *arguments: Any, **more: Any) -> None:
        ranks.told[run.comm.rank].append(name)
        launch(run, name, *arguments, **more)

    monkeypatch.setattr(gpu.DeviceRun, "_launch", tell)

    def work(rank: int) -> Any:
        return run_ca_sgd(own_columns(problem, rank), options, comm=ranks.rank(rank))

    solutions = run_in_threads(work)
    whole = run_ca_sgd(problem, options)
    np.testing.assert_allclose(np.concatenate([solution.weights for solution in solutions]), whole.weights, rtol=1e-10)
    # Blocks of 16, 16, 16 and 5 rows in batches of 4: 96 and 16 / 4 words of Gram.
    form, solve = ["gather_rows", "margins"], ["recurrence", "increment"]
    expected = [*form, 96]
    for rows, words in ((16, 96), (16, 96), (16, 4)):
        expected += ["margins", rows, *form, "wait", "wait", words, *solve]
    assert ranks.told[0] == ranks.told[1] == [*expected, "margins", 5, "wait", "wait", *solve]
    assert solutions[0].reductions == run_ca_sgd(problem, options).reductions == 8


@pytest.mark.parametrize("prefetch", [False, True])
def test_two_gpus_joined_by_nccl_hold_one_solution(gpu, monkeypatch, prefetch):
    monkeypatch.setattr(DEVICE, "count", 2)
    problem, options = make_problem("squared", weighted=True), make_options("fp64", prefetch=prefetch)
    ranks = ThreadRanks(2)

    def work(rank: int) -> Any:
        stand_in.Device(rank).use()
        comm = NcclCommunicator(ranks.rank(rank))
        return run_ca_sgd(own_columns(problem, rank), options, comm=comm)

    solutions = run_in_threads(work)
    whole = run_ca_sgd(problem, options)
    np.testing.assert_allclose(np.concatenate([solution.weights for solution in solutions]), whole.weights, rtol=1e-10)
    assert solutions[0].intercept == solutions[1].intercept
    assert solutions[0].reductions == (16 if prefetch else 8)
    assert [event for event in ranks.told[0] if event != "wait"] == []  # all sums by NCCL, none by the control


class FirstOfTwo:
    """A control whose other rank repeats the values of this one, except its GPU; ``lost`` are its errors."""

    rank, size, reductions = 0, 2, 0

    def __init__(self) -> None:
        self.lost: list[CommunicationError] = []

    def gather(self, value: Any) -> list[Any]:
        is_place = isinstance(value, list) and len(value) == 2
        return [value, [value[0], "another GPU"] if is_place else value]

    def lose(self, error: CommunicationError) -> CommunicationError:
        self.lost.append(error)
        return error

    def sum(self, buffer: Any) -> None:
        raise NotImplementedError

    start_sum = barrier = abort = sum


def test_a_silent_gpu_rank_ends_an_epoch_at_the_deadline_before_anything_is_read(gpu, monkeypatch):
    monkeypatch.setattr(DEVICE, "stuck", True)
    control = FirstOfTwo()
    comm = NcclCommunicator(control, deadline_s=0.2)
    run = gpu.DeviceRun(on_device(make_problem("squared")), make_options("fp64"), comm=comm)
    with pytest.raises(CommunicationError, match="rank 0 of 2 waited in vain in a sum over the GPUs") as raised:
        run.pass_over(next(run.epochs()))
    assert len(DEVICE.sums) == 4  # fewer than may be under way, so only the end of the epoch waits
    assert DEVICE.aborted == 1
    assert control.lost == [raised.value]
    monkeypatch.setattr(DEVICE, "stuck", False)
    with pytest.raises(CommunicationError, match="already lost a rank"):
        comm.sum(Array(np.ones(3)))


@pytest.mark.parametrize("wrong", ["NaN", "sparse", "another GPU", "do not fit"])
def test_the_failure_of_one_gpu_rank_is_raised_on_the_others(gpu, wrong):
    problem, options, ranks = make_problem("squared"), make_options("fp64"), ThreadRanks(2)

    class TooLarge(Array):
        def __getitem__(self, key: Any) -> Array:
            raise MemoryError("out of device memory")

    TooLarge.__module__ = "cupy"

    def work(rank: int) -> Any:
        part = own_columns(problem, rank)
        if rank and wrong == "NaN":
            part.features[7, 3] = np.nan
        if rank and wrong == "sparse":
            part.features.nnz = 1
        if rank and wrong == "another GPU":
            part.features.device = stand_in.Device(1)
        if rank and wrong == "do not fit":
            part = replace(part, features=TooLarge(part.features.held))
        return run_ca_sgd(part, options, comm=ranks.rank(rank))

    errors = run_in_threads(work)
    assert [type(error) for error in errors] == [InputError, InputError], errors
    assert f"rank 1 cannot go on; got: {errors[1]}" in str(errors[0])
    assert wrong in str(errors[1]) or wrong == "sparse"


def test_float64_features_are_rounded_once(gpu):
    # Just above a tie of BF16 in float64, and on the tie in float32: two roundings would end at the even number below.
    tie = 1 + 2.0**-8 + 2.0**-30
    problem = replace(make_problem("squared"), features=np.full((53, 1), tie))
    run = gpu.DeviceRun(on_device(problem), make_options("recipe"))
    bits = run.device_features.get()
    assert bits.shape == (53, 8)
    assert (bits[:, 1:] == 0).all()
    expected = round_to(np.array([tie]), "bf16").view(np.uint32)[0] >> 16
    assert (bits[:, 0] == expected).all()


@pytest.mark.parametrize(("value", "policy"), [(np.nan, "fp32"), (np.inf, "recipe"), (65520.0, "fp16")])
def test_features_that_the_format_cannot_hold_are_named(gpu, value, policy):
    problem = make_problem("squared")
    problem.features[7, 3] = value
    with pytest.raises(InputError, match="features hold"):
        run_ca_sgd(on_device(problem), make_options(policy))


def test_a_block_beyond_shared_memory_is_refused(gpu):
    problem = replace(make_problem("squared", m=53), features=np.ones((13000, 1)), targets=np.ones(13000))
    with pytest.raises(InputError, match="at most 12256"):
        run_ca_sgd(on_device(problem), make_options("fp32", s=3250))


def test_policies_become_macros():
    from precision_time.casgd.gpu import compile_options

    assert compile_options(POLICIES["recipe"]) == (
        "-DREAL=float",
        "-DSTORED=0",
        "-DROUND_FEATURES=0",
        "-DROUND_GRAM=0",
        "-DROUND_MARGIN=0",
    )
    assert compile_options(POLICIES["paper"])[4] == "-DROUND_MARGIN=1"
    mixed = POLICIES["fp64"].replace(name="mixed", x_storage="tf32", gram_storage="fp32")
    assert compile_options(mixed)[:4] == ("-DREAL=double", "-DSTORED=3", "-DROUND_FEATURES=3", "-DROUND_GRAM=4")
    with pytest.raises(InputError, match="weights below fp32"):
        compile_options(POLICIES["fp32"].replace(name="low", weights="bf16"))


def test_importing_the_solver_does_not_import_cupy():
    code = (
        "import sys; import precision_time.casgd.ca_sgd, precision_time.casgd.gpu, precision_time.casgd.plan;"
        "print([name for name in sys.modules if name.partition('.')[0] in ('cupy', 'cupy_backends', 'mpi4py')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.fixture
def check(gpu, folder, monkeypatch, tmp_path) -> Any:
    """The script of the GPU check, at sizes for a CPU."""
    script = load(Path(__file__).parents[1] / "gpu" / "casgd_check.py")
    small = {
        "SHAPES": {"higgs": (64, 28)},
        "PRODUCTS": ((16,), (18,)),
        "RECURRENCES": ((2, 4),),
        "END_TO_END": ((4,), (1, 4), 4),
        "DELAYS_US": (20,),
        "PLANNED": (8, (4,), (1, 2)),
        "STORED": (16, 20),
        "SUMMED": (16, 16, 2, 4),
        "REPEAT": 1,
        "RANK_ROWS": 128,
    }
    for name, value in small.items():
        monkeypatch.setattr(script, name, value)
    # The ranks of the check are new processes, which find the stand-in by its name.
    (tmp_path / "cupy.py").write_text(
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import stand_in_cupy\n"
        f"stand_in_cupy.install(pathlib.Path({str(folder)!r}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    return script


@pytest.mark.mpi
def test_every_part_of_the_gpu_check_runs_and_keeps_its_limits(check, monkeypatch, tmp_path, capfd):
    # Times on a CPU that stands in for a GPU mean nothing.
    monkeypatch.setattr(check, "LARGEST_ABOVE_BEST", np.inf)
    assert check.main([str(tmp_path / "out"), "--seconds", "280"]) == 0, capfd.readouterr().err
    results = json.loads((tmp_path / "out" / "casgd.json").read_text())
    assert results["failed"] == results["not_run"] == []
    assert set(check.PARTS) < set(results)
    assert {product["policy"] for product in results["products"]} == {"recipe", "fp32", "tf32"}
    assert results["two_ranks"]["outer_steps"] == 2
    assert results["nccl"]["prefetch_equal_bits"] is True


WRONG = {
    "versions": {"bf16_round_trip": False},
    "products": {"error": 1e-3},
    "recurrence": {"launched": ["gather_rows"]},
    "memory": {"recipe": 1},
    "two_ranks": {"equal_replicated_bits": False},
    "nccl": {"prefetch_equal_bits": False},
    "planner": {"above_best": 0.5},
    "end_to_end": {"loss_gap": 0.01},
}
GOOD = {
    "versions": {"bf16_round_trip": True},
    "products": {
        "policy": "recipe",
        "rows": 64,
        "columns": 18,
        "error": 1e-7,
        "error_of_squares": 1e-6,
        "equal_bits": True,
    },
    "recurrence": {"objective": "squared", "s": 8, "b": 16, "error": 1e-6},
    "memory": {"recipe": 4, "fp16": 4, "fp32": 8},
    "two_ranks": {
        "equal_replicated_bits": True,
        "prefetch_equal_bits": True,
        "difference_to_one_rank": 1e-6,
        "reductions": 64,
        "outer_steps": 64,
    },
    "nccl": {"unchanged": True, "in_turn_equal_bits": True, "prefetch_equal_bits": True},
    "planner": {"delay_us": 20, "b": 16, "s": 8, "best_s": 16, "above_best": 0.1},
    "end_to_end": {"shape": "susy", "policy": "recipe", "s": 4, "b": 16, "loss_gap": 1e-3},
}


@pytest.mark.parametrize("part", GOOD)
def test_a_part_of_the_gpu_check_beyond_its_limits_is_named_and_ends_it_with_1(
    check, monkeypatch, tmp_path, capsys, part
):
    launches = (
        {"launched": [name for name in check.gpu.LAUNCHES if name != "all_reduce"]} if part == "recurrence" else {}
    )
    in_a_list = part in ("products", "recurrence", "planner", "end_to_end")
    for more, status in ({}, 0), (WRONG[part], 1):
        result = GOOD[part] | launches | more
        monkeypatch.setattr(check, "PARTS", {part: lambda result=result: [result] if in_a_list else result})
        assert check.main([str(tmp_path)]) == status
        assert (f"FAILED: {part}: " in capsys.readouterr().err) == bool(status)
        assert bool(json.loads((tmp_path / "casgd.json").read_text())["failed"]) == bool(status)


def test_a_part_of_the_gpu_check_that_raises_ends_it_with_1_and_one_without_mpi_does_not(
    check, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(check.shutil, "which", lambda *arguments, **more: None)
    monkeypatch.setattr(check, "PARTS", {"two_ranks": check.check_two_ranks})
    assert check.main([str(tmp_path)]) == 0
    assert "not run: two_ranks: no mpiexec: pip install mpi4py mpich" in capsys.readouterr().out
    monkeypatch.setattr(check, "PARTS", {"memory": lambda: 1 // 0})
    assert check.main([str(tmp_path)]) == 1
    assert "FAILED: memory: ZeroDivisionError" in capsys.readouterr().err
