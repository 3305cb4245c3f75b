"""The public table: every row is kept or set aside with a reason, also an odd row of a user's file."""

import csv
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precision_time.predictor.rows.public_table import (
    PublicTable,
    imply_utilisation,
    load_public_table,
    row_implementation,
    row_parallelism,
    shipped_collectives,
    shipped_measurements,
)
from precision_time.predictor.rows.quarantine import REASONS
from precision_time.storage.errors import InputError
from precision_time.storage.tables import NUMBER_COLUMNS, TEXT_COLUMNS

PLAIN = {"row_id": "a", "model": "m", "gpu": "A100-SXM4-80GB", "num_gpus": "8", "precision": "amp_bf16",
         "parallelism": "ddp", "batch_size_per_gpu": "32", "grad_accumulation_steps": "2", "global_batch_size": "512",
         "task_input": "224", "seconds_per_micro_step": "0.1", "flag": "", "fwd_flops_per_sample": "",
         "samples_per_second": "", "notes": "", "source_repo": "", "model_params": ""}  # fmt: skip


@pytest.fixture(scope="module")
def shipped() -> PublicTable:
    return load_public_table()


def load(tmp_path: Path, *rows: dict[str, str], drop: tuple[str, ...] = ()) -> PublicTable:
    path = tmp_path / "table.csv"
    filled = [PLAIN | {"row_id": str(number)} | row for number, row in enumerate(rows)]
    names = [name for name in dict.fromkeys(name for row in filled for name in row) if name not in drop]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(filled)
    return load_public_table(str(path))


def reason(tmp_path: Path, **values: str) -> str:
    table = load(tmp_path, values)
    return str(table.quarantined["reason"][0]) if len(table.quarantined) else ""


def test_the_shipped_rows_are_raw_and_whole() -> None:
    frame = shipped_measurements()
    assert len(frame) == 12429
    assert set(frame.columns) == {*TEXT_COLUMNS, *NUMBER_COLUMNS}
    assert frame["row_id"].is_unique
    vector = frame.set_index("row_id").loc["dle0387"]
    assert (vector["model"], vector["num_gpus"], vector["flag"]) == ("bert_large_pretrain_seq512", 1, "length_binned")
    frame.loc[:, "model"] = ""
    assert shipped_measurements()["model"].ne("").all()


def test_the_shipped_curves_have_one_name_for_each_collective() -> None:
    curves = shipped_collectives()
    assert len(curves) == 2045 + 560
    assert set(curves["kind"]) == {
        "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "point_to_point",
    }  # fmt: skip
    assert not curves.duplicated(["curve_id", "bytes"]).any()
    assert (curves["seconds"] > 0).all()


def test_every_shipped_row_is_kept_or_set_aside(shipped: PublicTable) -> None:
    assert len(shipped.kept) + len(shipped.quarantined) == 12429
    assert set(shipped.kept["row_id"]).isdisjoint(shipped.quarantined["row_id"])
    assert len(shipped.kept) > 10_000
    assert set(shipped.count_reasons()) <= set(REASONS)


def test_kept_rows_have_everything_a_prediction_needs(shipped: PublicTable) -> None:
    kept = shipped.kept
    for name in ("hardware", "policy", "framework_name"):
        assert kept[name].ne("").all()
    for name in ("world_size", "nodes", "per_gpu_batch_size", "accumulation", "data", "micro_step_time_s"):
        assert kept[name].gt(0).all()
    assert kept["per_gpu_batch_size"].mul(kept["data"] * kept["accumulation"]).sub(
        kept["global_batch_size"].fillna(kept["per_gpu_batch_size"] * kept["data"] * kept["accumulation"])
    ).abs().le(0.01 * kept["per_gpu_batch_size"] * kept["data"] * kept["accumulation"]).all()  # fmt: skip
    assert not kept["utilisation"].gt(0.95).any()


def test_rows_without_optimizer_step_are_kept_as_such(shipped: PublicTable) -> None:
    timed = shipped.kept[shipped.kept["source"].eq("ryujaehun/pytorch-gpu-benchmark")]
    assert len(timed) == 1208
    assert not timed["optimizer_step"].any()
    assert timed["host_copy"].all()


def test_convnext_rows_of_the_wrong_size_are_set_aside(shipped: PublicTable) -> None:
    assert shipped.count_reasons()["another network"] == 16


def test_devices_of_other_makers_are_unknown(shipped: PublicTable) -> None:
    unknown = shipped.quarantined[shipped.quarantined["reason"].str.contains("hardware unknown")]
    assert set(unknown["gpu"]) == {"MI300X", "MI325X", "MI350X", "MI355X"}
    assert not unknown["can_predict"].any()


def test_a_plain_row_is_kept_with_its_parsed_columns(tmp_path: Path) -> None:
    table = load(tmp_path, {"precision": "bf16-mixed", "team": "x"})
    row = table.kept.iloc[0]
    assert (row["hardware"], row["policy"], row["team"]) == ("A100-SXM4-80GB", "amp_bf16", "x")
    assert (row["world_size"], row["data"], row["accumulation"]) == (8, 8, 2)
    assert (row["micro_step_time_s"], row["iteration_time_s"], row["input_size"]) == (0.1, 0.2, 224)
    assert row_parallelism(row).data == 8
    assert row_implementation(row).software_year is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"gpu": "Banana-9"}, "hardware unknown"),
        ({"precision": ""}, "precision unknown"),
        ({"precision": "bf16", "gpu": "V100-SXM2-16GB"}, "precision unsupported"),
        ({"num_gpus": ""}, "device count missing"),
        ({"batch_size_per_gpu": "", "global_batch_size": ""}, "batch missing"),
        ({"batch_size_per_gpu": "", "global_batch_size": "12", "flag": "batch_missing"}, "batch missing"),
        ({"parallelism": "sideways"}, "parallelism unknown"),
        ({"parallelism": "tp3"}, "parallelism unknown"),
        ({"num_gpus": "-8"}, "number unusable"),
        ({"num_gpus": "2.5"}, "number unusable"),
        ({"grad_accumulation_steps": "some"}, "number unusable"),
        ({"seconds_per_micro_step": ""}, "time missing"),
    ],
)
def test_a_row_that_is_not_understood_cannot_be_predicted(
    tmp_path: Path, values: dict[str, str], expected: str
) -> None:
    table = load(tmp_path, values)
    assert expected in table.quarantined["reason"][0].split(", ")
    assert not table.quarantined["can_predict"][0]


@pytest.mark.parametrize(
    "flag",
    ["suspect", "suspect_value", "precision_ambiguous", "gpu_ambiguous", "table_inconsistent",
     "printed_ratio_mismatch", "duplicate", "length_varies", "length_binned", "unit_ambiguous",
     "superlinear_scaling"],
)  # fmt: skip
def test_a_flag_is_a_doubt_and_not_a_refusal(tmp_path: Path, flag: str) -> None:
    table = load(tmp_path, {"flag": f"eval_inside,{flag}"})
    assert table.quarantined["reason"].tolist() == [flag]
    assert table.quarantined["can_predict"].tolist() == [True]


def test_flags_that_state_facts_are_columns(tmp_path: Path) -> None:
    row = load(tmp_path, {"flag": "no_optimizer_step,eval_inside,startup_inside"}).kept.iloc[0]
    assert (row["optimizer_step"], row["evaluation_inside"], row["startup_inside"]) == (False, True, True)


def test_a_batch_is_derived_from_the_global_one(tmp_path: Path) -> None:
    row = load(tmp_path, {"batch_size_per_gpu": "", "parallelism": "tp2"}).kept.iloc[0]
    assert row["per_gpu_batch_size"] == 64
    assert reason(tmp_path, batch_size_per_gpu="", flag="batch_missing") == "batch_missing"


def test_counts_that_do_not_multiply_are_doubted(tmp_path: Path) -> None:
    assert reason(tmp_path, global_batch_size="500") == "table_inconsistent"
    assert reason(tmp_path, global_batch_size="") == ""


def test_a_throughput_is_a_time_only_where_no_seconds_are_kept(tmp_path: Path) -> None:
    blank = {"seconds_per_micro_step": "", "samples_per_second": "2560"}
    table = load(tmp_path, {}, blank)
    assert table.quarantined["reason"].tolist() == ["time not converted"]
    table = load(tmp_path, blank, drop=("seconds_per_micro_step",))
    assert table.kept["micro_step_time_s"].tolist() == [pytest.approx(0.1)]
    assert table.kept["iteration_time_s"].tolist() == [pytest.approx(0.2)]


def test_a_figure_printed_twice_counts_once(tmp_path: Path) -> None:
    table = load(tmp_path, {"notes": "line 7; x"}, {"notes": "line 9; x"}, {"notes": "line 9; y"})
    assert table.kept["row_id"].tolist() == ["0", "2"]
    assert table.quarantined["reason"].tolist() == ["exact repeat"]


def test_more_flops_than_the_device_has_are_doubted(tmp_path: Path) -> None:
    # 3 x 1e12 x 32 / 0.1 s = 960 TFLOP/s on a device of 312.
    assert reason(tmp_path, fwd_flops_per_sample="1e12") == "utilisation above 0.95"
    kept = load(tmp_path, {"fwd_flops_per_sample": "1e12", "parallelism": "tp8", "global_batch_size": ""}).kept
    assert kept["utilisation"].tolist() == [pytest.approx(960 / 312 / 8)]
    assert imply_utilisation(kept, forward_flops=kept["fwd_flops_per_sample"] / 2)[0] == pytest.approx(480 / 312 / 8)


def test_rows_without_an_id_get_one(tmp_path: Path) -> None:
    table = load(tmp_path, {}, {"seconds_per_micro_step": "0.2"}, drop=("row_id",))
    assert table.kept["row_id"].tolist() == ["row 1", "row 2"]


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"lacks columns.*gpu"):
        load(tmp_path, {}, drop=("gpu",))


def test_an_extra_column_with_a_name_of_ours_stands_beside_it(tmp_path: Path) -> None:
    kept = load(tmp_path, {"hardware": "x"}).kept
    assert kept["file_hardware"].tolist() == ["x"]
    assert kept["hardware"].tolist() != ["x"]


def test_a_cell_that_no_prediction_needs_counts_as_blank(tmp_path: Path) -> None:
    assert len(load(tmp_path, {"global_batch_size": "many"}).kept) == 1


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                name: st.one_of(
                    st.sampled_from(
                        ["", "0", "-1", "1e300", "nan", "inf", "8", "1.5", "ddp", "tp8-pp2", "16x16", "{}"]
                    ),
                    st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=12),
                )
                for name in PLAIN
            },
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_odd_row_stops_the_table(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    table = load(tmp_path, *rows)
    assert len(table.kept) + len(table.quarantined) == len(rows)
    assert table.quarantined["reason"].ne("").all()
    assert isinstance(table.kept, pd.DataFrame)
