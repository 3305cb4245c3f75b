"""Errors that a person can mend end a run with their own words; Prefect adds a traceback to all others."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from prefect.states import Failed

from precision_time.storage.errors import PrecisionTimeError

__all__ = ["fail_plainly"]

Given = ParamSpec("Given")
Result = TypeVar("Result")


def fail_plainly(run: Callable[Given, Result]) -> Callable[Given, Result]:
    """``run``, for a flow or a task, which ends Failed with the message of a ``PrecisionTimeError``.

    Whoever calls the flow gets the error itself, as before; a task that is called returns the state, whose
    ``result()`` raises it.
    """

    @functools.wraps(run)
    def run_plainly(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return run(*args, **kwargs)
        except PrecisionTimeError as error:
            return cast(Result, Failed(message=str(error), data=error))

    return run_plainly
