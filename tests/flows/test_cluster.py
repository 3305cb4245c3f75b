"""The local cluster: one process a rank, out of reach of other machines and of Ctrl-C."""

import os
import signal
import sys
from pathlib import Path

import pytest

from precision_time.flows.cluster import open_cluster
from precision_time.storage.errors import InputError


def test_each_rank_gets_a_process_that_ctrl_c_does_not_reach() -> None:
    own_status = Path("/proc/self/status")  # read on the worker, it is the worker's
    with open_cluster("cpu", 2) as client:
        addresses = list(client.scheduler_info(n_workers=-1)["workers"])
        answers = [
            client.submit(Path.read_text, own_status, workers=[address], pure=False).result(timeout=60)
            for address in addresses
        ]
        assert all(address.startswith("tcp://127.0.0.1:") for address in [*addresses, client.scheduler.address])
    statuses = [dict(line.split(":\t", 1) for line in text.splitlines()) for text in answers]
    assert len({status["Pid"] for status in statuses} - {str(os.getpid())}) == 2
    assert all(int(status["SigBlk"], 16) >> (signal.SIGINT - 1) & 1 for status in statuses)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_gpu_workers_without_dask_cuda_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask_cuda", None)
    with pytest.raises(InputError, match="gpu-cu12"), open_cluster("cuda", 1):
        pass
