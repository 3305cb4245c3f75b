import json
from pathlib import Path

import pytest

from precision_time.predictor.workloads.walk import Walk
from precision_time.predictor.workloads.zoo import ZooTable
from precision_time.tasks.zoo.build import WALKS, build_zoo, read_walks, write_zoo
from precision_time.tasks.zoo.network import Missing

FOLDER = Path(__file__).parent


@pytest.fixture
def networks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import faulty_networks

    return faulty_networks


@pytest.fixture
def walked(networks, tmp_path):
    lines: list[str] = []
    walks = build_zoo(
        networks.list_networks(),
        scratch=tmp_path,
        factory="faulty_networks:list_networks",
        workers=1,
        report=lines.append,
    )
    return walks, lines


def test_failures_are_recorded_with_their_reason_and_stop_nothing(walked, networks, tmp_path):
    walks, lines = walked
    assert walks["narrow"]["params"] == 8 * 4 + 4 + 4 * 10 + 10
    assert walks["wide"]["params"] == 8 * 16 + 16 + 16 * 10 + 10
    assert walks["wide"]["sizes"] == {"hidden_size": 16}
    assert "InputError: this network cannot be built" in walks["raises"]["failure"]
    assert walks["dies"]["failure"] == "its process ended with exit code 9"
    # names of one network are walked once
    assert len(lines) == 4
    assert lines[-1].startswith("4 of 4 walks, 2 failed now")

    # a second run walks nothing; a run whose file lost an entry, and has a line cut short, walks that entry alone
    again: list[str] = []
    options = {"scratch": tmp_path, "factory": "faulty_networks:list_networks", "workers": 1, "report": again.append}
    assert build_zoo(networks.list_networks(), **options) == walks
    assert again == []
    path = tmp_path / WALKS
    others = [line for line in path.read_text().splitlines() if json.loads(line)["builds"] != "wide"]
    path.write_text("\n".join([*others, '{"builds": "wi']) + "\n")
    assert build_zoo(networks.list_networks(), **options)["wide"]["fp32"] == walks["wide"]["fp32"]
    assert len(again) == 1
    assert ": wide: " in again[0]

    # walks made by other code are stale, unless the run keeps them
    stale = read_walks(path)
    path.write_text("".join(json.dumps(walk | {"code": "older"}) + "\n" for walk in stale.values()))
    again.clear()
    build_zoo(networks.list_networks()[:1], keep=True, **options)
    assert again == []
    build_zoo(networks.list_networks()[:1], **options)
    assert len(again) == 1


def test_a_walk_that_hangs_is_given_up(networks, tmp_path):
    options = {"scratch": tmp_path, "factory": "faulty_networks:list_slow", "workers": 1, "report": lambda line: None}
    walks = build_zoo(networks.list_slow()[:1], limit_s=1.0, **options)
    assert walks["hangs"]["failure"] == "no walk within 1 s"
    assert build_zoo(networks.list_slow(), **options)["narrow"]["params"] == 86


def test_walks_become_a_table_and_failures_a_list(walked, networks, tmp_path):
    walks, _ = walked
    missing = [Missing("unheard_of", "224", 7, "in none of the libraries")]
    summary = write_zoo(networks.list_networks(), walks=walks, missing=missing, usual={"narrow": "8"}, folder=tmp_path)
    assert summary.startswith("3 names, 3 rows, 2 walks")
    table = ZooTable((tmp_path / "zoo.parquet").read_bytes(), name="a test")
    assert table.names == ["narrow", "narrow_twin", "wide"]
    narrow, twin, wide = (table.read_entry(row, network=table.names[row]) for row in range(3))
    assert twin.fp32 == narrow.fp32
    assert twin.builds == narrow.builds
    assert narrow.params == 86
    assert dict(wide.sizes) == {"hidden_size": 16}
    walk = Walk.from_columns(walks["wide"]["amp"])
    assert wide.amp.total("flops") == pytest.approx(walk.total("flops"), rel=1e-6)
    assert wide.amp.total("ops") == walk.total("ops")
    lines = (tmp_path / "zoo_missing.csv").read_text().splitlines()
    assert lines[0] == "name,task_input,rows,reason"
    assert "dies,8,0,its process ended with exit code 9" in lines
    assert "unheard_of,224,7,in none of the libraries" in lines
