import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

_PROGRAMS = Path(__file__).parent / "mpi_programs"
_MPIEXEC = Path(sys.executable).parent / "mpiexec"


def _run_ranks(program, *arguments, ranks=2, timeout_s=60, options=(), wrapper=()):
    """What ``ranks`` ranks of the program print, and how they end; MPI comes from the environment of this Python.

    Silent ranks sleep for longer than ``timeout_s``, so a job that waits for them fails the test.
    """
    assert _MPIEXEC.exists(), "pip install 'precision-time[mpi]'"
    # Threads of BLAS in every rank would fight for the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [str(_MPIEXEC), *options, "-n", str(ranks), *wrapper, sys.executable, str(_PROGRAMS / program), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _orphans(program, *, wait_s=10.0):
    """Ranks of the program that still run ``wait_s`` seconds after mpiexec, which does not wait for those it ends."""
    until_s = time.monotonic() + wait_s
    while running := [path for path in Path("/proc").glob("[0-9]*/cmdline") if _runs(path, program)]:
        if time.monotonic() > until_s:
            break
        time.sleep(0.02)
    return running


def _runs(cmdline, program):
    try:
        return str(_PROGRAMS / program).encode() in cmdline.read_bytes()
    except OSError:
        return False


@pytest.fixture(scope="module")
def collectives():
    done = _run_ranks("collectives.py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
def test_two_ranks_get_the_sum_in_every_type(collectives, kind):
    assert collectives[kind] == [4.5, -4.0, 0.375]


def test_bfloat16_is_summed_in_float32_and_rounded_once(collectives):
    assert collectives["bfloat16_equal"]


def test_a_strided_buffer_is_summed_in_place(collectives):
    assert collectives["strided"] == [[3.0] * 3] * 4


def test_a_buffer_in_the_other_byte_order_is_summed_in_place(collectives):
    assert collectives["swapped"] == [3.0] * 3


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_an_array_on_a_gpu_goes_through_the_host_where_mpi_does_not_take_it(collectives, kind):
    assert collectives[f"device_{kind}"] == [3.0] * 3


def test_the_reason_for_staging_through_the_host_is_stored_and_warned_of_once(collectives):
    assert collectives["reason_before"] is None
    assert collectives["reason"] == collectives["probe"]
    assert "no GPU" in collectives["reason"]
    first, second = collectives["warnings"]
    assert first == [f"GPU arrays are summed through host memory: {collectives['reason']}"]
    assert second == []


def test_two_sums_may_be_under_way_at_once(collectives):
    assert collectives["started"] == [[3.0] * 3, 3.0, 3.0]


def test_every_sum_is_one_call_of_mpi_and_a_gathering_is_none(collectives):
    assert collectives["reductions"] + 3 == collectives["calls"] == 13
    assert collectives["calls_after_gather"] == 13


def test_values_of_different_lengths_are_gathered_in_the_order_of_the_ranks(collectives):
    assert collectives["gathered"] == [[0, 0, [1, 0.1]], [1, 1000, [1, 0.1]]]
    assert collectives["same_on_all"]


def test_the_probe_of_a_rank_answers_without_disturbing_the_job(collectives):
    aware, reason = collectives["gpu"]
    assert isinstance(aware, bool)
    assert reason
    assert aware or "GPU" in reason or "cupy" in reason


@pytest.fixture(scope="module")
def solved():
    done = _run_ranks("solve.py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_rank_equals_two_ranks(solved):
    # fp64 and fp32 differ in the order of summing only. Margins and Gram blocks that are rounded to 16 bits before or
    # after the sum over ranks differ by single roundings.
    allowed = {"fp64": 1e-14, "fp32": 1e-6, "recipe": 1e-6, "paper": 1e-3, "fp16": 1e-5, "bf16-gram": 1e-3}
    assert len(solved) == 23
    for case in solved:
        bound = allowed[case["case"][-1]]
        assert case["difference"] <= bound, case
        assert case["intercept_difference"] <= bound, case
        assert case["intercepts_equal"], case


def test_there_is_exactly_one_reduction_per_outer_step(solved):
    for case in solved:
        assert case["calls"] == case["reductions"] == case["outer_steps"], case


def test_ranks_that_differ_are_named_to_every_rank():
    done = _run_ranks("disagree.py", json.dumps({"s": 4, "rows": 999}))
    assert done.returncode == 0, done.stderr
    messages = done.stdout.strip().splitlines()
    assert len(messages) == 2
    assert messages[0] == messages[1]
    assert "rank 1 has rows=999 where the others have 1000" in messages[0]
    assert "rank 1 has s=4 where the others have 8" in messages[0]


def test_the_solver_names_the_differences_of_ranks_before_it_sends_anything():
    differences = ["s", "batch_size", "seed", "policy", "rows", "targets"]
    done = _run_ranks("solve_apart.py", *differences)
    assert done.returncode == 0, done.stderr
    for value, line in zip(differences, done.stdout.strip().splitlines(), strict=True):
        assert line.startswith(f"{value}: the ranks do not agree; got: rank 1 has "), line
        assert value in line.partition("got:")[2]


@pytest.mark.faults
@pytest.mark.parametrize("call", ["sum", "gather", "barrier"])
def test_a_silent_rank_ends_the_job_at_the_deadline_with_the_error_that_says_so(call):
    done = _run_ranks("lose_a_rank.py", "silent", call, "1.0")
    assert done.returncode == 3
    assert "not reached" not in done.stdout
    assert "CommunicationError: rank 0 of 2 waited in vain in a " in done.stderr
    assert re.search(r"no answer for \d+\.\d s \(deadline 1 s\)", done.stderr)
    assert _orphans("lose_a_rank.py") == []


@pytest.mark.faults
@pytest.mark.parametrize("options", [(), ("-disable-auto-cleanup",)])
def test_a_killed_rank_ends_the_job_with_a_failure(options):
    done = _run_ranks("lose_a_rank.py", "killed", "sum", "1.0", options=options)
    assert done.returncode != 0
    assert "not reached" not in done.stdout
    assert _orphans("lose_a_rank.py") == []


@pytest.mark.faults
def test_a_rank_killed_in_a_run_ends_the_other_at_the_deadline_with_an_error_that_names_who_waited():
    # Under a shell, as batch scripts start ranks, Hydra sees no signal and does not end the other ranks.
    under_a_shell = {"options": ("-disable-auto-cleanup",), "wrapper": ("sh", "-c", '"$@"; exit $?', "sh")}
    done = _run_ranks("lose_a_rank_in_a_run.py", "1.0", **under_a_shell)
    assert done.returncode == 3
    assert "CommunicationError: rank 0 of 2 waited in vain in a sum over the ranks" in done.stderr
    assert "pass_over" in done.stderr  # in the middle of an epoch, not at its start or end
    assert _orphans("lose_a_rank_in_a_run.py") == []


@pytest.mark.faults
def test_a_silent_rank_on_a_gpu_ends_the_job_at_the_deadline(tmp_path):
    done = _run_ranks("lose_a_gpu_rank.py", "1.0", str(tmp_path))
    assert done.returncode == 3
    assert "not reached" not in done.stdout
    assert "CommunicationError: rank 0 of 2 waited in vain in a sum over the GPUs" in done.stderr
    assert "rank 0: the job ends because a rank was lost" in done.stderr
    assert "GPU 1 of 2, by MPI_LOCALRANKID=1" in done.stderr  # both start on GPU 0, which NCCL refuses
    assert _orphans("lose_a_gpu_rank.py") == []
