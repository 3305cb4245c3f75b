"""Runs that fail with the message of our own errors alone; Prefect adds a traceback to any other error."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from prefect.states import Failed

from precision_time.storage.errors import PrecisionTimeError

__all__ = ["fail_plainly"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fail_plainly(run: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``run`` for a flow or a task, so that a ``PrecisionTimeError`` ends it Failed with the error's message.

    The caller of a flow still gets the error itself; a task returns its state, whose ``result()`` raises the error.
    """

    @functools.wraps(run)
    def run_plainly(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return run(*args, **kwargs)
        except PrecisionTimeError as error:
            return cast(Result, Failed(message=str(error), data=error))

    return run_plainly
