"""Public functions document each argument on its own line, and their examples run."""

import doctest
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import precision_time

FUNCTIONS = [precision_time.predict_time, precision_time.calibrate]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_argument_has_a_line(function: Callable[..., Any]) -> None:
    documented = re.findall(r"^        (\w+): \S", inspect.getdoc(function).replace("    ", "        "), re.MULTILINE)
    assert [name for name in inspect.signature(function).parameters if name not in documented] == []


@pytest.mark.bundle
@pytest.mark.parametrize("name", [name for name in precision_time.__all__ if not name.startswith("__")])
def test_the_examples_of_a_public_name_run(name: str) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(getattr(precision_time, name), name)
    assert sum(len(test.examples) for test in tests)
    for test in tests:
        result = doctest.DocTestRunner(verbose=False).run(test)
        assert result.failed == 0
