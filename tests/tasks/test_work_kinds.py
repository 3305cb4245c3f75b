"""The kinds of work: which claims a model, and what a check of a campaign file loads."""

import subprocess
import sys

import pytest

from precision_time.tasks.work_kinds import WORK_KINDS, kind_of
from precision_time.tests.tasks.builders import ENVIRONMENT


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("casgd-logistic-n28", "CA-SGD"),
        ("casgd-misspelt", "CA-SGD"),
        ("mlp", "networks"),
        ("own.nets:make", "networks"),
    ],
)
def test_every_model_has_one_kind_of_work(model: str, name: str) -> None:
    assert kind_of(model).name == name


def test_strategies_belong_to_one_kind_each() -> None:
    strategies = [name for kind in WORK_KINDS for name in kind.strategies]
    assert len(strategies) == len(set(strategies))


def test_a_cell_runs_on_the_software_of_its_kind() -> None:
    assert kind_of("mlp").environment(ENVIRONMENT) == ENVIRONMENT
    assert kind_of("casgd-logistic-n28").environment(ENVIRONMENT).framework == "casgd"


def test_checking_a_campaign_file_loads_neither_dask_nor_torch() -> None:
    code = (
        "import sys; from precision_time.flows.planning.spec import CampaignSpec; "
        "CampaignSpec(name='a', models=['mlp'], precisions=['fp32'], gpus=[1], batch_sizes=[8]).cells(); "
        "print(sorted({'dask', 'distributed', 'torch'} & set(sys.modules)))"
    )
    checked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert checked.stdout == "[]\n"
