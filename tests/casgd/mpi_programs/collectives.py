"""Every call of an MpiCommunicator once; rank 0 prints the results as one JSON line."""

import json
import os
import warnings

import ml_dtypes
import numpy as np
from counted import Counted

from precision_time.casgd.mpi import MpiCommunicator, explain_staging

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # an MPI that takes GPU arrays could not take the class below


class DeviceArray:
    """The methods of an array on a GPU, without access from the host."""

    def __init__(self, values):
        self._values = values
        self.dtype, self.flags = values.dtype, values.flags

    def astype(self, kind):
        return DeviceArray(self._values.astype(kind))

    def get(self):
        return self._values.copy()

    def set(self, values):
        assert values.dtype == self.dtype
        self._values[...] = values


counted = Counted()
comm = MpiCommunicator(counted, deadline_s=30)
factor = comm.rank + 1
out = {"size": comm.size}

for kind in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
    buffer = np.array([1.5 * factor, -2.0, 0.125 * factor], dtype=kind)
    comm.sum(buffer)
    out[np.dtype(kind).name] = buffer.astype(float).tolist()

# The sums of these numbers are no bfloat16 numbers: the fp32 sum, rounded once, is the expected result.
rng = np.random.default_rng(7)
of_ranks = rng.normal(size=(comm.size, 500)).astype(ml_dtypes.bfloat16)
buffer = of_ranks[comm.rank].copy()
comm.sum(buffer)
expected = of_ranks.astype(np.float32).sum(axis=0).astype(ml_dtypes.bfloat16)
out["bfloat16_equal"] = bool((buffer == expected).all())

table = np.full((4, 6), float(factor))
comm.sum(table[:, ::2])
out["strided"] = table[:, ::2].tolist()
swapped = np.full(3, float(factor), dtype=">f4")
comm.sum(swapped)
out["swapped"] = swapped.tolist()
comm.sum(np.zeros(0))
staging = MpiCommunicator(counted, deadline_s=30)
out["reason_before"] = explain_staging(staging)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for kind in (np.float32, np.float64):
        on_device = np.full(3, float(factor), dtype=kind)
        staging.sum(DeviceArray(on_device))
        out[f"device_{np.dtype(kind).name}"] = on_device.tolist()
out["reason"], out["probe"] = explain_staging(staging), staging.gpu.reason
out["warnings"] = comm.gather([str(warning.message) for warning in caught])
on_device = np.full(3, float(factor), dtype=ml_dtypes.bfloat16)
staging.sum(DeviceArray(on_device))
out["device_bfloat16"] = on_device.astype(float).tolist()

first, second = np.full(3, float(factor)), np.full(100_000, float(factor), dtype=np.float32)
pending = [comm.start_sum(first), comm.start_sum(second)]
for item in pending:
    item.wait()
    item.wait()
out["started"] = [first.tolist(), float(second.min()), float(second.max())]
out["reductions"] = comm.reductions
out["calls"] = counted.all_reductions()

out["gathered"] = comm.gather({"rank": comm.rank, "text": "é" * (comm.rank * 1000), "pair": (1, 0.1)})
comm.barrier()
out["calls_after_gather"] = counted.all_reductions()
out["gpu"] = [comm.gpu.aware, comm.gpu.reason]
outs = comm.gather(out)
if comm.rank == 0:
    out["same_on_all"] = all({**item, "gathered": 0} == {**outs[0], "gathered": 0} for item in outs)
    out["gathered"] = [[item["rank"], len(item["text"]), item["pair"]] for item in out["gathered"]]
    print(json.dumps(out))
