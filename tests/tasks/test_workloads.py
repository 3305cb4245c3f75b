import dataclasses
import doctest
import sys
from pathlib import Path

import pytest
import torch

from precision_time.predictor.workloads.workload import known_workloads
from precision_time.storage.errors import InputError, UnknownNameError
from precision_time.tasks import workloads
from precision_time.tasks.workloads import BUILDERS, OPTIMIZERS, build_workload, count_card

LIGHT = ("mlp", "vit_tiny", "bert_mini", "gpt2_mini")


@pytest.fixture
def on_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


def test_every_named_workload_has_a_card_and_every_card_a_builder():
    assert set(BUILDERS) == set(known_workloads())


@pytest.mark.parametrize("name", BUILDERS)
def test_a_workload_has_the_parameters_its_card_says(name):
    with torch.device("meta"):
        workload = build_workload(name)
    card = known_workloads()[name]
    parameters = list(workload.module.parameters())
    assert (sum(parameter.numel() for parameter in parameters), len(parameters)) == (
        card.params,
        card.parameter_tensors,
    )
    stated = (workload.family, workload.task_input, workload.optimizer_name)
    assert stated == (card.family, card.task_input, card.optimizer)


@pytest.mark.parametrize("name", LIGHT)
def test_the_shipped_card_is_what_counting_gives_now(name):
    counted = count_card(build_workload(name), name=name)
    assert counted.walks is not None
    assert dataclasses.replace(counted, walks=None) == known_workloads()[name]


@pytest.mark.parametrize("name", LIGHT)
def test_a_step_of_a_workload_changes_all_its_parameters(name):
    torch.manual_seed(0)
    workload = build_workload(name)
    before = [parameter.detach().clone() for parameter in workload.module.parameters()]
    loss = workload.compute_loss(workload.module, workload.make_batch(2, "cpu"))
    assert loss.shape == ()
    loss.backward()
    workload.make_optimizer(workload.module.parameters()).step()
    assert not any(torch.equal(old, new) for old, new in zip(before, workload.module.parameters(), strict=True))


def test_a_workload_of_ones_own_is_found_by_its_dotted_name(on_path):
    workload = build_workload("faulty_workloads:tiny")
    assert workload.make_batch(3, "cpu").shape == (3, 64)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="resnet50"):
        build_workload("resnet51")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:factory", "No module named 'no_such_module'"),
        ("faulty_workloads:no_such_factory", "no_such_factory"),
        (":factory", "cannot be imported"),
        ("faulty_workloads:not_a_workload", "returns no workload; got: str"),
    ],
)
def test_a_dotted_name_that_leads_nowhere_is_bad_input(on_path, name, said):
    with pytest.raises(InputError, match=said):
        build_workload(name)


def test_the_example_of_a_workload_runs() -> None:
    result = doctest.testmod(workloads)
    assert (result.failed, result.attempted > 0) == (0, True)


def test_adamw_stays_finite_in_fp16_where_the_square_of_a_gradient_is_zero() -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = OPTIMIZERS["adamw"]([weight])
    weight.grad = torch.full_like(weight, 1e-5)
    optimizer.step()
    assert torch.isfinite(weight).all()
