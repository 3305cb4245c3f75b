import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from precision_time.casgd import arrays
from precision_time.casgd.arrays import choose_gpu, move_to_gpu
from precision_time.casgd.communicator import Communicator, DelayedCommunicator, OneProcess, check_agreement
from precision_time.casgd.errors import CommunicationError, InputError
from precision_time.casgd.mpi import MpiCommunicator, find_communicator, probe_gpu_awareness
from precision_time.casgd.nccl import NcclCommunicator, drain

_spec = importlib.util.spec_from_file_location("stand_in_cupy", Path(__file__).with_name("stand_in_cupy.py"))
stand_in = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_in)


class _Ranks(OneProcess):
    """One process that gathers the values that the test gives to its ranks."""

    def __init__(self, values):
        super().__init__()
        self.size, self._told = len(values), values

    def gather(self, value):
        assert value == self._told[0]
        return self._told


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_a_sum_over_one_process_changes_nothing_and_is_counted(kind):
    comm = OneProcess()
    buffer = np.array([1.5, -2.0], dtype=kind)
    comm.sum(buffer)
    comm.start_sum(buffer).wait()
    assert buffer.astype(float).tolist() == [1.5, -2.0]
    assert (comm.rank, comm.size, comm.reductions) == (0, 1, 2)


@pytest.mark.parametrize("buffer", [np.arange(3), np.ones(2, dtype=complex), np.array(["a"]), [1.0, 2.0]])
def test_a_type_that_cannot_be_summed_is_named_beside_those_that_can(buffer):
    comm = OneProcess()
    name = getattr(getattr(buffer, "dtype", None), "name", "list")
    with pytest.raises(InputError, match=rf"got: {name}; expected: .*float32, float64, bfloat16, float16"):
        comm.sum(buffer)
    assert comm.reductions == 0


def test_a_read_only_buffer_is_refused():
    buffer = np.ones(3)
    buffer.flags.writeable = False
    with pytest.raises(InputError, match="read-only"):
        OneProcess().sum(buffer)


def test_values_are_gathered_as_json_even_in_one_process():
    gathered = OneProcess().gather({"pair": (1, 2.5), "count": np.int64(7), "loss": np.float32(0.5)})
    assert gathered == [{"pair": [1, 2.5], "count": 7, "loss": 0.5}]
    with pytest.raises(InputError, match="ndarray"):
        OneProcess().gather({"array": np.zeros(2)})


def test_abort_ends_one_process_with_status_3_and_says_why(capsys):
    with pytest.raises(SystemExit) as ended:
        OneProcess().abort("all is lost")
    assert ended.value.code == 3
    assert capsys.readouterr().err == "all is lost\n"


def test_a_delay_is_added_to_every_sum_and_hidden_by_work_done_meanwhile(monkeypatch):
    now = [0.0]

    def tick():
        now[0] += 0.25
        return now[0]

    monkeypatch.setattr(time, "perf_counter", tick)
    comm = DelayedCommunicator(OneProcess(), 10.0)
    comm.sum(np.ones(1))
    assert 10.0 <= now[0] <= 11.0
    started = now[0]
    pending = comm.start_sum(np.ones(1))
    assert now[0] - started < 1.0
    now[0] += 20.0  # work
    pending.wait()
    assert now[0] - started < 21.0
    assert (comm.rank, comm.size, comm.reductions) == (0, 1, 2)
    assert comm.gather(1) == [1]


def test_a_negative_delay_is_refused():
    with pytest.raises(InputError, match="negative"):
        DelayedCommunicator(OneProcess(), -1e-6)


def test_a_communicator_is_found_from_nothing_and_from_itself():
    assert isinstance(find_communicator(None), OneProcess)
    delayed = DelayedCommunicator(OneProcess(), 0.0)
    assert find_communicator(delayed) is delayed
    assert isinstance(delayed, Communicator)
    for wrong in ("gloo", 3, object()):
        with pytest.raises(InputError, match="communicator"):
            find_communicator(wrong)


def test_without_an_mpi_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CommunicationError, match=r"precision-time\[mpi\]"):
        find_communicator("mpi")
    with pytest.raises(CommunicationError, match=r"precision-time\[mpi\]"):
        MpiCommunicator()


def test_without_cupy_nccl_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InputError, match="CuPy"):
        NcclCommunicator(OneProcess())


@pytest.fixture
def cupy(monkeypatch, tmp_path):
    """The stand-in for CuPy, with four GPUs and without a launcher."""
    for name, module in stand_in.make_modules(tmp_path).items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, value in {"stuck": False, "count": 4, "sums": [], "aborted": 0}.items():
        monkeypatch.setattr(stand_in.DEVICE, name, value)
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    stand_in.Device(0).use()
    arrays._say_once.cache_clear()
    return sys.modules["cupy"]


class _FirstOfTwo(OneProcess):
    """Rank 0 of 2; ``places`` are the GPUs that the other rank names in its next answers."""

    def __init__(self, *places):
        super().__init__()
        self.size, self._places = 2, list(places)

    def gather(self, value):
        place = isinstance(value, list) and len(value) == 2
        return [value, [value[0], self._places.pop(0)] if place else value]


def test_nccl_is_found_though_cupy_hides_it_until_it_is_imported(cupy):
    with pytest.raises(AttributeError):
        cupy.cuda.nccl  # noqa: B018
    comm = NcclCommunicator(OneProcess())
    buffer = stand_in.Array(np.array([1.5, -2.0]))
    comm.sum(buffer)
    comm.start_sum(buffer).wait()
    drain(comm)
    assert buffer.get().tolist() == [1.5, -2.0]
    assert (comm.rank, comm.size, comm.reductions) == (0, 1, 2)


@pytest.mark.parametrize(("runtime", "package"), [(12090, "nvidia-nccl-cu12"), (13020, "nvidia-nccl-cu13")])
def test_the_package_of_nccl_that_fits_the_cuda_of_cupy_is_named(cupy, monkeypatch, runtime, package):
    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", False)
    monkeypatch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda: runtime)
    with pytest.raises(CommunicationError, match=f"pip install {package}$"):
        NcclCommunicator(OneProcess())


def test_a_rank_that_does_not_come_to_the_start_of_nccl_is_waited_for_until_the_deadline(cupy):
    with pytest.raises(CommunicationError, match=r"rank 0 of 2 waited in vain in the start of NCCL; got: .* 0.2 s"):
        NcclCommunicator(_FirstOfTwo("0000:01:00.0"), deadline_s=0.2)


def test_a_sum_that_does_not_end_is_given_up_at_the_deadline(cupy, monkeypatch):
    monkeypatch.setattr(stand_in.DEVICE, "stuck", True)
    comm = NcclCommunicator(_FirstOfTwo("0000:01:00.0"), deadline_s=0.2)
    buffer = stand_in.Array(np.ones(3))
    for _ in range(8):
        comm.sum(buffer)
    with pytest.raises(CommunicationError, match=r"in vain in a sum over the GPUs; got: no answer for \d+\.\d s"):
        comm.sum(buffer)
    assert stand_in.DEVICE.aborted == 1
    with pytest.raises(CommunicationError, match="already lost"):
        drain(DelayedCommunicator(comm, 0.0))


def test_an_error_that_nccl_reports_ends_the_wait_before_the_deadline(cupy, monkeypatch):
    def report(self):
        raise RuntimeError("NCCL_ERROR_REMOTE_ERROR: remote process exited")

    monkeypatch.setattr(stand_in.DEVICE, "stuck", True)
    monkeypatch.setattr(stand_in.NcclCommunicator, "check_async_error", report)
    comm = NcclCommunicator(_FirstOfTwo("0000:01:00.0"), deadline_s=60)
    comm.sum(stand_in.Array(np.ones(3)))
    with pytest.raises(CommunicationError, match="NCCL reports: NCCL_ERROR_REMOTE_ERROR"):
        drain(comm)


def test_ranks_that_find_themselves_on_one_gpu_move_to_that_of_their_local_rank(cupy, monkeypatch):
    monkeypatch.setattr(stand_in.DEVICE, "stuck", True)  # the other rank will not come to the start of NCCL
    monkeypatch.setenv("MPI_LOCALRANKID", "3")
    NcclCommunicator(_FirstOfTwo("0000:00:00.0", "0000:01:00.0"))
    assert cupy.cuda.Device().id == 3


def test_two_ranks_that_stay_on_one_gpu_are_refused(cupy):
    with pytest.raises(InputError, match=r"ranks \[0, 1\] on GPU 0000:00:00.0"):
        NcclCommunicator(_FirstOfTwo("0000:00:00.0", "0000:00:00.0"))


@pytest.mark.parametrize(
    ("environment", "current", "chosen", "why"),
    [
        ({}, 0, 0, "GPU 0 of 4, the current one"),
        ({"MPI_LOCALRANKID": "3"}, 0, 3, "GPU 3 of 4, by MPI_LOCALRANKID=3"),
        ({"MPI_LOCALRANKID": "6"}, 0, 2, "GPU 2 of 4, by MPI_LOCALRANKID=6"),
        (
            {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "SLURM_LOCALID": "0"},
            0,
            1,
            "GPU 1 of 4, by OMPI_COMM_WORLD_LOCAL_RANK=1",
        ),
        ({"SLURM_LOCALID": "2"}, 0, 2, "GPU 2 of 4, by SLURM_LOCALID=2"),
        ({"SLURM_LOCALID": "2"}, 1, 1, "GPU 1 of 4, the current one"),
        ({"SLURM_LOCALID": "none"}, 0, 0, "GPU 0 of 4, the current one"),
    ],
)
def test_each_local_rank_has_its_gpu(cupy, monkeypatch, environment, current, chosen, why):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stand_in.Device(current).use()
    assert choose_gpu() == why
    assert cupy.cuda.Device().id == chosen


def test_features_go_to_the_gpu_of_the_local_rank_which_is_printed_once(cupy, monkeypatch, capsys):
    moved = move_to_gpu(np.ones((2, 2)))
    assert moved.device.id == 0
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    for _ in range(2):
        assert move_to_gpu(np.ones((2, 2))).device.id == 1
    assert capsys.readouterr().err == "GPU 1 of 4, by MPI_LOCALRANKID=1\n"


def test_without_a_gpu_nothing_is_moved_and_nothing_joined(cupy, monkeypatch):
    monkeypatch.setattr(stand_in.DEVICE, "count", 0)
    with pytest.raises(InputError, match="finds no GPU"):
        move_to_gpu(np.ones((2, 2)))
    with pytest.raises(InputError, match="NCCL joins GPUs, and CuPy finds none"):
        NcclCommunicator(OneProcess())


def test_ranks_that_agree_pass():
    held = {"s": 8, "shape": [3, 4], "tol": None}
    check_agreement(_Ranks([held, dict(held), dict(held)]), held)
    check_agreement(OneProcess(), held)


def test_the_rank_that_differs_is_named_with_its_value_and_that_of_the_others():
    held = {"s": 8, "seed": 0, "dtype": "float32"}
    ranks = [held, held, {**held, "s": 4}, {**held, "dtype": "float64"}]
    with pytest.raises(InputError) as raised:
        check_agreement(_Ranks(ranks), held)
    assert "rank 2 has s=4 where the others have 8" in str(raised.value)
    assert 'rank 3 has dtype="float64" where the others have "float32"' in str(raised.value)
    assert "seed" not in str(raised.value)


def test_rank_0_is_the_odd_one_where_most_hold_another_value():
    with pytest.raises(InputError, match="rank 0 has s=1 where the others have 8"):
        check_agreement(_Ranks([{"s": 1}, {"s": 8}, {"s": 8}]), {"s": 1})


def test_a_value_that_one_rank_does_not_hold_is_a_difference():
    with pytest.raises(InputError, match="rank 1 has tol=nothing where the others have 0"):
        check_agreement(_Ranks([{"tol": 0}, {}]), {"tol": 0})


def test_many_ranks_that_differ_are_counted_not_listed():
    ranks = [{"seed": 0}] * 60 + [{"seed": rank} for rank in range(60, 100)]
    with pytest.raises(InputError, match="rank 63 has seed=63, 36 more ranks differ where the others have 0"):
        check_agreement(_Ranks(ranks), {"seed": 0})


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("raise SystemExit('no such symbol')", "status 1: no such symbol"),
        ("print('hello')", "nothing readable"),
        ("pass", "nothing readable"),
        ("import time; time.sleep(60)", "within 0.5 s"),
    ],
)
def test_a_probe_that_crashes_fails_or_hangs_means_not_gpu_aware(program, reason):
    awareness = probe_gpu_awareness(program, timeout_s=0.5 if "sleep" in program else 30)
    assert awareness.aware is False
    assert reason in awareness.reason


def test_the_answer_of_a_probe_is_used():
    awareness = probe_gpu_awareness('print(\'noise\'); print(\'{"aware": true, "reason": "it works"}\')')
    assert (awareness.aware, awareness.reason) == (True, "it works")


def test_a_probe_does_not_take_itself_for_a_rank_of_the_running_job(monkeypatch):
    for name in ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "1")
    program = """
import json, os
seen = [name for name in os.environ if name.startswith(("PMI", "OMPI_COMM"))]
print(json.dumps({"aware": True, "reason": str(seen)}))
"""
    assert probe_gpu_awareness(program).reason == "[]"


def test_importing_the_module_loads_neither_mpi4py_nor_cupy():
    program = (
        "import sys, precision_time.casgd.nccl; print([name for name in ('mpi4py', 'cupy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
