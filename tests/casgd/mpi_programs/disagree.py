"""Rank 1 differs from rank 0 in the values of the command line; every rank prints its error."""

import json
import sys

from precision_time.casgd.communicator import check_agreement
from precision_time.casgd.errors import InputError
from precision_time.casgd.mpi import MpiCommunicator

comm = MpiCommunicator(deadline_s=30)
values = {"s": 8, "batch_size": 32, "seed": 0, "dtype": "float32", "rows": 1000, "shape": [1000, 18]}
check_agreement(comm, values)
if comm.rank == 1:
    values |= json.loads(sys.argv[1])
try:
    check_agreement(comm, values)
except InputError as error:
    message = str(error)
else:
    message = "no error"
comm.barrier()
texts = comm.gather(message)
if comm.rank == 0:
    print("\n".join(texts))
