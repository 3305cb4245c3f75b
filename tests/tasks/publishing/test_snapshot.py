"""A snapshot joins timings and tables, identifies its data by a digest, and holds out whole networks."""

import subprocess
import sys
from pathlib import Path

import pytest

from precision_time.predictor.rows.public_table import load_public_table, shipped_measurements
from precision_time.storage.errors import InputError, UnknownNameError
from precision_time.storage.tables import write_table
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.publishing.snapshot import take_snapshot


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    """Every fortieth row of the shipped table, as a file."""
    path = str(tmp_path_factory.mktemp("table") / "some.parquet")
    write_table(path, shipped_measurements().iloc[::40])
    return path


@pytest.fixture(scope="module")
def timings(measure, record, tmp_path_factory) -> str:
    url = str(tmp_path_factory.mktemp("timings"))
    record(url, measure(models=("mlp", "vit_tiny")))
    return url


def test_timings_and_tables_are_learned_from_together(table: str, timings: str) -> None:
    both = take_snapshot(timings, measurements=table)
    of_table, of_campaign = take_snapshot(measurements=table), take_snapshot(timings)
    assert len(both.training) == len(of_table.training) + len(of_campaign.training)
    assert {row.measurement.cell_id for row in both.training if row.index < 0} == {
        row.measurement.cell_id for row in of_campaign.training
    }
    assert len({both.sha256, of_table.sha256, of_campaign.sha256}) == 3
    assert take_snapshot(timings, measurements=table).sha256 == both.sha256


def test_the_shipped_table_is_a_source_of_its_own() -> None:
    snapshot = take_snapshot(public=True)
    assert len(snapshot.training) > 10_000
    assert {"dle0025"} <= {row.measurement.cell_id for row in snapshot.training}
    unusable = len(load_public_table().kept) - len(snapshot.training)
    assert any(reason.startswith(f"{unusable} sound rows cannot be used: ") for _, reason in snapshot.problems)
    assert snapshot.workloads == snapshot.hardware == ()


def test_the_digest_changes_with_either_source(table: str, measure, record, tmp_path: Path) -> None:
    url = str(tmp_path / "timings")
    record(url, measure(models=("mlp", "vit_tiny")))
    before = take_snapshot(url, measurements=table).sha256
    assert take_snapshot(url).sha256 == TimingsDataset(url).snapshot_sha256()
    record(url, measure(models=("bert_mini",)))
    more_cells = take_snapshot(url, measurements=table).sha256
    shorter = str(tmp_path / "shorter.parquet")
    write_table(shorter, shipped_measurements().iloc[::40].iloc[1:])
    assert len({before, more_cells, take_snapshot(url, measurements=shorter).sha256}) == 3


def test_a_public_model_is_held_out_under_all_its_names(table: str, timings: str) -> None:
    snapshot = take_snapshot(timings, measurements=table, holdout_models=("resnet50",))
    held_out = {row.measurement.model for row in snapshot.holdout}
    assert {"resnet50", "resnet50_v1.5"} <= held_out
    assert not held_out & {row.measurement.model for row in snapshot.training}
    assert {row.network for row in snapshot.holdout} == {"resnet50"}
    with pytest.raises(UnknownNameError, match="resnet50"):
        take_snapshot(measurements=table, holdout_models=("resnet5000",))


def test_rows_that_cannot_be_used_are_counted_with_their_reason(tmp_path: Path) -> None:
    frame = shipped_measurements().iloc[::40].head(60).reset_index(drop=True)
    frame.loc[:2, ["model", "task_input"]] = ["nobody_knows_it", ""]
    frame.loc[:2, ["model_params", "fwd_flops_per_sample"]] = float("nan")
    frame.loc[3, "flag"] = "suspect"
    path = str(tmp_path / "odd.parquet")
    write_table(path, frame)
    snapshot = take_snapshot(measurements=path)
    assert (path, "3 sound rows cannot be used: model unknown 3") in snapshot.problems
    assert any("suspect 1" in reason for _, reason in snapshot.problems)


def test_rows_without_an_id_are_known_by_their_content(tmp_path: Path) -> None:
    frame = shipped_measurements().iloc[::40].head(60).drop(columns="row_id")
    ids = []
    for number, ordered in enumerate((frame, frame.iloc[::-1])):
        path = str(tmp_path / f"{number}.csv")
        ordered.to_csv(path, index=False)
        ids.append({row.measurement.cell_id for row in take_snapshot(measurements=path).training})
    assert ids[0] == ids[1]
    assert len(ids[0]) > 40


def test_no_source_and_the_same_rows_twice_are_refused(table: str) -> None:
    with pytest.raises(InputError, match="no data to train on"):
        take_snapshot()
    with pytest.raises(InputError, match="rows in common"):
        take_snapshot(public=True, measurements=table)


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "few.parquet")
    write_table(path, shipped_measurements().iloc[::40].head(8))
    with pytest.raises(InputError, match="too few measured cells"):
        take_snapshot(measurements=path)


def test_the_same_table_and_seed_give_the_same_bytes_in_another_process(table: str) -> None:
    program = (
        "import hashlib, sys\n"
        "from precision_time.predictor.learning.hierarchy import HierarchicalPredictor\n"
        "from precision_time.tasks.publishing.snapshot import take_snapshot\n"
        "rows = take_snapshot(measurements=sys.argv[1]).training\n"
        "files = HierarchicalPredictor.fit(rows, seed=int(sys.argv[2])).to_files()\n"
        "print(*(hashlib.sha256(files[name]).hexdigest() for name in ('trees.npz', 'predictor.json')))"
    )

    def digests(*, hash_seed: str, seed: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, table, seed],
            env={"PYTHONHASHSEED": hash_seed, "PATH": "", "OMP_NUM_THREADS": hash_seed},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = digests(hash_seed="1", seed="0")
    assert digests(hash_seed="2", seed="0") == first
    assert digests(hash_seed="1", seed="1") != first
