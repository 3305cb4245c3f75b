import json
from dataclasses import replace

import pytest

from precision_time.storage.errors import InputError
from precision_time.tasks.ranks.job import MeasurementLimits, RankJob
from precision_time.tests.tasks import builders
from precision_time.tests.tasks.builders import CELL, ENVIRONMENT


def make_job(**sizes):
    limits = MeasurementLimits(memory_limit_bytes=10**9)
    environment = replace(ENVIRONMENT, cpu_cores=8)
    return builders.make_job("a", replace(CELL, **sizes), limits=limits, environment=environment, devices=("0", "1"))


def test_a_job_survives_its_json():
    job = make_job(world_size=2)
    assert RankJob.from_json(job.to_json()) == job


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cell": {"model": "mlp"}}'])
def test_text_that_is_no_job_is_bad_input(text):
    with pytest.raises(InputError, match="job cannot be read"):
        RankJob.from_json(text)


def test_a_job_with_an_unknown_field_is_bad_input():
    values = json.loads(make_job(world_size=2).to_json()) | {"colour": "red"}
    with pytest.raises(InputError, match="colour"):
        RankJob.from_json(json.dumps(values))


@pytest.mark.parametrize(("world_size", "nodes", "threads"), [(1, 1, 8), (3, 1, 2), (16, 1, 1), (4, 2, 4)])
def test_the_ranks_of_a_node_share_its_cores(world_size, nodes, threads):
    assert make_job(world_size=world_size, nodes=nodes).threads_per_rank == threads


@pytest.mark.parametrize(
    "limit",
    [
        {"warmup_steps": -1},
        {"measured_steps": 0},
        {"measured_steps": 2.5},
        {"seconds_per_cell": 0},
        {"seconds_per_cell": float("nan")},
        {"timeout_s": "60"},
        {"memory_limit_bytes": 0},
        {"memory_limit_bytes": True},
    ],
)
def test_a_limit_that_is_none_is_refused_by_name(limit):
    with pytest.raises(InputError, match=next(iter(limit))):
        MeasurementLimits(**limit)
