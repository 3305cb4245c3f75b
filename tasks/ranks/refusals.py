"""Why a cell is refused: the reasons that need no device, and the errors of a rank that has one."""

from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.storage.errors import InputError
from precision_time.storage.schema import GridCell

__all__ = [
    "CellRefusedError",
    "EnvironmentChangedError",
    "LossNotFiniteError",
    "refuse_cell",
]


class CellRefusedError(InputError):
    """The cell cannot be run as requested; ``cause`` is the word of its outcome."""

    code = "E-CELL-REFUSED"

    def __init__(self, what: str, *, cause: str = "option-unsupported", got: object = None, fix: str | None = None):
        super().__init__(what, got=got, fix=fix)
        self.cause = cause


class LossNotFiniteError(RuntimeError):
    """The loss became infinite or NaN, so the times that follow are not those of training."""


class EnvironmentChangedError(RuntimeError):
    """A worker runs other software than the plan of the campaign states."""


def refuse_cell(cell: GridCell) -> tuple[str, str] | None:
    """(cause, message) when ``cell`` can be refused before anything is started, else None.

    Refused are strategies other than ``ddp``, and gradient compression that changes nothing: on one rank, or to the
    format that the gradients already have.
    """
    if cell.strategy != "ddp":
        return "strategy-unsupported", f"strategy {cell.strategy} is not measured; only ddp is"
    if cell.compression != "none":
        if cell.world_size == 1:
            return "option-unsupported", f"{cell.compression} compression has no effect: one rank sends no gradients"
        precision = PRECISIONS.get(cell.precision)
        if precision is not None and precision.storage == cell.compression:
            return (
                "option-unsupported",
                f"{cell.compression} compression has no effect: the gradients of {cell.precision} have that format",
            )
    return None
