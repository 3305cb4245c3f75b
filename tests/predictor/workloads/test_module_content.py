"""The text of a module: the same for equal modules in any process, another after every change that a walk counts."""

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from precision_time.predictor.workloads.module_content import describe_module, describe_value
from precision_time.predictor.workloads.walk_cache import hash_content

SOURCE = """
import torch
from torch import nn

def helper(x):
    return x * 2

class Net(nn.Module):
    def __init__(self, width=8, act=torch.relu):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)
        self.act, self.table = act, {"a": [1, 2.5], "b": ("x", None)}
        self.first.register_forward_hook(lambda module, args, output: None)

    def forward(self, x):
        return helper(self.second(self.act(self.first(x))))
"""


def load(folder: Path, source: str = SOURCE, *, name: str = "mine"):
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", None)
    return load(tmp_path).Net


def key(module: nn.Module) -> str:
    return hash_content(describe_module(module))


def test_equal_modules_share_their_text_whatever_their_values_and_mode(net):
    first, second = net(), net().eval()
    with torch.no_grad():
        second.first.weight.fill_(3.0)
    assert key(first) == key(second)
    norm, trained = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    trained(torch.randn(8, 4))
    assert key(norm) == key(trained)


def test_the_text_is_the_same_in_another_process(net, tmp_path):
    program = (
        "import sys; sys.path.insert(0, '.'); import mine; from torch import nn\n"
        "nn.Linear(1, 1).register_forward_hook(print)\n"  # hooks are numbered over the whole process
        "from precision_time.predictor.workloads.module_content import describe_module\n"
        "from precision_time.predictor.workloads.walk_cache import hash_content\n"
        "print(hash_content(describe_module(mine.Net())))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == key(net())


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.first.weight.requires_grad_(False),
        lambda net: setattr(net, "act", torch.tanh),
        lambda net: net.table["a"].append(3),
        lambda net: net.register_buffer("more", torch.zeros(3)),
        lambda net: setattr(net, "extra", nn.Dropout(0.1)),
        lambda net: net.half(),
        lambda net: net.register_forward_pre_hook(lambda module, args: None),
        lambda net: setattr(net, "forward", lambda x: x),
    ],
)
def test_every_change_that_a_walk_counts_changes_the_text(net, change):
    module = net()
    change(module)
    assert key(module) != key(net())


def test_a_setting_of_a_submodule_changes_the_text():
    assert key(nn.Sequential(nn.Dropout(0.1))) != key(nn.Sequential(nn.Dropout(0.2)))
    assert key(nn.Conv2d(8, 8, 3, stride=1)) != key(nn.Conv2d(8, 8, 3, stride=2))


def test_tied_weights_are_not_two_equal_ones():
    tied, apart = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    tied[1].weight = tied[0].weight
    assert key(tied) != key(apart)


def test_code_of_the_class_and_of_the_functions_it_calls_is_part_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", None)
    before = key(load(tmp_path).Net())
    assert key(load(tmp_path, SOURCE.replace("x * 2", "x * 3")).Net()) != before
    assert key(load(tmp_path, SOURCE.replace("self.act(", "torch.tanh(")).Net()) != before
    assert key(load(tmp_path).Net()) == before


def test_code_in_a_file_that_the_file_imports_is_part_of_the_text(tmp_path, monkeypatch):
    for name in ("mine", "theirs"):
        monkeypatch.setitem(sys.modules, name, None)
    importing = "from theirs import helper\n" + SOURCE.replace("def helper(x):\n    return x * 2\n", "")
    keys = []
    for factor in (2, 3):
        load(tmp_path, f"def helper(x):\n    return x * {factor}\n", name="theirs")
        keys.append(key(load(tmp_path, importing).Net()))
    assert keys[0] != keys[1]


def test_functions_differ_by_code_defaults_and_closures():
    def close(width, default=1):
        return lambda x, y=default: x + width

    assert describe_value(close(1)) == describe_value(close(1))
    assert len({describe_value(function) for function in (close(1), close(2), close(1, 2))}) == 3
    assert describe_value(functools.partial(close, 1)) != describe_value(functools.partial(close, 2))


def test_circular_and_huge_values_have_a_text_of_limited_size():
    class Node:
        pass

    node = Node()
    node.self, node.parts = node, [node] * 3
    assert "Node" in describe_value(node)
    nested = [[[[[list(range(50))] * 50] * 50] * 50] * 50]
    assert len(describe_value(nested)) < 10_000_000


def test_an_extra_repr_that_fails_is_no_obstacle():
    class Broken(nn.Linear):
        def extra_repr(self):
            raise RuntimeError("no")

    assert key(Broken(2, 2))


def test_a_scripted_module_and_the_class_of_tensors_have_a_text() -> None:
    assert describe_value(torch.Tensor) == "torch.Tensor"
    assert describe_module(torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.ReLU())))
