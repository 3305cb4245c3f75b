"""Communication-avoiding SGD: s steps of mini-batch SGD for one sum over the ranks, with the same iterates."""

from typing import Any

from precision_time.casgd.arrays import library_of
from precision_time.casgd.cpu import HostRun
from precision_time.casgd.gpu import DeviceRun
from precision_time.casgd.problem import Options, Problem, Solution, Start

__all__ = ["run_ca_sgd"]


def run_ca_sgd(problem: Problem, options: Options, *, comm: Any = None, start: Start | None = None) -> Solution:
    """SGD whose iterates do not depend on s, with one sum over the ranks every s steps.

    SGD, which s = 1 runs as it stands, takes in step t a batch I of b rows. Its one sum carries b words:

        z = sum over ranks of X[I, J] w, plus w0;  r = a phi'(z, y_I) / b
        w <- (1 - eta_t l2) w - eta_t X[I, J]^T r;  w0 <- w0 - eta_t sum(r)

    With s > 1, Y are the stacked rows of s batches. v = Y w and G = Y Y^T below the diagonal blocks are summed over
    the ranks in one buffer. Then every rank runs, with rho_j = 1 - eta_j l2 and P = 1:

        z_j = P v_j + w0 - sum_{i<j} G_ji c_i       the margin that SGD would see in step j
        c_j = (eta_j / b) a phi'(z_j, y_j)
        c_i <- rho_j c_i for i < j;  P <- rho_j P;  w0 <- w0 - sum(c_j)

    and then w <- P w - Y^T c on its own columns. In exact arithmetic each iterate is that of SGD: by induction
    w_j = P w - sum_{i<j} Y_i^T c_i. The method is that of arXiv 2011.08281 (no penalty) and 2606.18463. In FP32 the
    weights stay within a roundoff (2^-24) of the largest weight a step of those of s = 1 (tested, not proven).

    Blocks do not straddle epochs: the last block of an epoch may have fewer than s batches, and its last batch fewer
    than b rows. With ``options.prefetch`` and s > 1 the Gram blocks of the next outer step are sent ahead: two sums an
    outer step, of which only the one of s b words is exposed.

    comm: as :func:`precision_time.casgd.mpi.find_communicator` takes it; None is one process.
    start: where the run starts; None is zero weights, no intercept and no earlier steps.

    Features that are a dense CuPy array are solved on its GPU. The weights of the solution are on the host. On a GPU
    ``seconds`` are the wall seconds of the epochs, divided among the parts by events in every sixteenth outer step;
    ``options.prefetch`` needs a second copy of a block and of its packed buffer, and two launches more, a packing and
    a sum, in an outer step.

    Raises:
        InputError: data, options or ranks that do not fit together, or iterates that diverge; on a GPU also sparse
            features, s b above `kernels.largest_block_rows`, and a policy with weights below FP32.
        CommunicationError: a rank that is gone, or sums that are not the same on all ranks.
    """
    back_end = DeviceRun if library_of(problem.features) == "cupy" else HostRun
    run = back_end(problem, options, comm=comm, start=start)
    for epoch in run.epochs():
        run.pass_over(epoch)
    return run.finish()
