"""Plots: the rows and groups that they show, equal bytes for equal data, and all files in the folder or none."""

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precision_time.predictor.learning.domain import TrainingDomain
from precision_time.predictor.learning.splits import SPLITS
from precision_time.predictor.rows.observations import Observation, observe
from precision_time.predictor.scoring import plots
from precision_time.predictor.scoring.cross_validation import SPEED_UP, CrossValidation
from precision_time.predictor.scoring.evaluate_tables import predict_table
from precision_time.predictor.scoring.plots import (
    PredictedRows,
    check_plots,
    draw_cross_validation,
    draw_table,
    plot_distance,
    plot_predicted,
    write_plots,
)
from precision_time.storage.errors import InputError, StorageFullError
from precision_time.storage.local import LocalStore

matplotlib = pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def observations(measure: Any) -> list[Observation]:
    return observe(measure(models=("mlp", "vit_tiny", "bert_mini"), batches=(8, 16, 64)))


def make_result(observations: list[Observation], split: str = "configuration") -> CrossValidation:
    """Predictions of the folds of a split that are all 10 % too long."""
    fold_of = np.full(len(observations), -1)
    for number, fold in enumerate(SPLITS[split].divide(observations, seed=0)):
        fold_of[fold.test] = number
    rows = np.flatnonzero(fold_of >= 0)
    measured = np.array([observations[row].measurement.iteration_time_s for row in rows])
    return CrossValidation(
        split=split,
        rows=rows,
        measured_s=measured,
        predicted_s={"predictor": measured * 1.1},
        folds=fold_of[rows],
        regimes=tuple("known" if row % 2 else "new model" for row in rows),
        covered=None,
        level=0.9,
    )


def make_rows(**changes: Any) -> PredictedRows:
    values: dict[str, Any] = {
        "title": "a title",
        "measured_s": np.array([0.1, 0.2, 0.4, 1.0]),
        "predicted_s": np.array([0.1, 0.3, 0.4, 0.5]),
        "precisions": ("fp32", "fp32", "amp_bf16", "amp_bf16"),
        "regimes": ("known", "known", "new gpu", "new gpu"),
        "steps": {"a batch": np.array([0.0, 1.0, 3.5, np.inf])},
    }
    return PredictedRows(**values | changes)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were rendered."""
    figures: list[Any] = []
    render = plots.render_figure

    def remember(figure: Any) -> bytes:
        figures.append(figure)
        return render(figure)

    monkeypatch.setattr(plots, "render_figure", remember)
    return figures


def test_each_precision_has_a_panel_with_its_rows_its_mape_and_the_band(drawn: list[Any]) -> None:
    data = plot_predicted(make_rows())
    assert data.startswith(PNG)
    panels = drawn[0].axes
    assert [axes.get_title() for axes in panels] == ["fp32: 2 rows, MAPE 25.0 %", "amp_bf16: 2 rows, MAPE 25.0 %"]
    for axes, measured, predicted in zip(panels, ([0.1, 0.2], [0.4, 1.0]), ([0.1, 0.3], [0.4, 0.5]), strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        band, points = axes.collections
        assert points.get_offsets().tolist() == [list(pair) for pair in zip(measured, predicted, strict=True)]
        x, y = axes.lines[0].get_data()
        assert list(x) == list(y)
        shares = {round(float(y / x), 6) for x, y in band.get_paths()[0].vertices}
        assert shares == {0.75, 1.25}


def test_errors_are_grouped_by_regime_and_by_doublings_from_the_data(drawn: list[Any]) -> None:
    assert plot_distance(make_rows()).startswith(PNG)
    by_regime, by_batch = drawn[0].axes
    assert [text.get_text() for text in by_regime.get_xticklabels()] == ["known (2)", "new gpu (2)"]
    assert [text.get_text() for text in by_batch.get_xticklabels()] == [
        "in the data (1)", "up to 2x (1)", "farther (1)", "never seen (1)",
    ]  # fmt: skip
    assert by_batch.get_xlabel() == "a batch"
    [means] = [line for line in by_regime.lines if line.get_label().startswith("MAPE")]
    assert means.get_ydata() == pytest.approx([25.05, 25.05])  # no error at all is drawn as 0.1 %
    medians = [line.get_ydata()[0] for line in by_regime.lines if line.get_color() == "C1" and line is not means]
    assert medians == pytest.approx([25.05, 25.05])


def test_the_distances_of_a_fold_are_to_its_training_rows(observations: list[Observation]) -> None:
    result = make_result(observations)
    rows = PredictedRows.of_cross_validation(result, observations)
    assert rows.precisions == tuple(observations[row].setup.precision.name for row in result.rows)
    batches, worlds = rows.steps.values()
    for position, row in enumerate(result.rows):
        trained = [
            observations[other].setup
            for other, fold in zip(result.rows, result.folds, strict=True)
            if fold != result.folds[position] and observations[other].network == observations[row].network
        ]
        setup = observations[row].setup
        assert batches[position] == pytest.approx(
            min(abs(np.log2(setup.batch_size / other.batch_size)) for other in trained)
        )
        assert worlds[position] == pytest.approx(
            min(abs(np.log2(setup.world_size / other.world_size)) for other in trained)
        )


def test_a_network_that_was_left_out_is_infinitely_far(observations: list[Observation]) -> None:
    rows = PredictedRows.of_cross_validation(make_result(observations, "leave-model-out"), observations)
    assert all(np.isinf(steps).all() for steps in rows.steps.values())


def test_a_split_with_one_fold_measures_from_its_training_rows(measure: Any) -> None:
    observations = observe(measure(models=("mlp",), world_sizes=(1, 8, 32)))
    rows = PredictedRows.of_cross_validation(make_result(observations, "scale"), observations)
    batches, worlds = rows.steps.values()
    assert set(worlds) == {2.0}  # from 8 to 32
    assert set(batches) == {0.0}


def test_every_split_has_both_plots_and_speed_ups_have_one(observations: list[Observation], drawn: list[Any]) -> None:
    result = make_result(observations)
    results = {
        "configuration": result,
        "configuration without MLPerf": result.restrict(result.folds >= 0, split="configuration without MLPerf"),
        SPEED_UP: result.restrict(result.folds >= 0, split=SPEED_UP),
    }
    plotted = draw_cross_validation(results, observations)
    assert set(plotted) == {"configuration-predicted.png", "configuration-distance.png", "speed-up-predicted.png"}
    assert drawn[-1].axes[0].get_xlabel() == "measured speed-up"
    assert drawn[0].axes[0].get_xlabel() == "measured (s a step)"


def test_the_same_data_gives_the_same_bytes_whatever_the_users_settings_are(
    observations: list[Observation], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {"configuration": make_result(observations)}
    first = draw_cross_validation(results, observations)
    for setting, value in {"font.size": 20, "axes.facecolor": "black", "savefig.dpi": 30}.items():
        monkeypatch.setitem(matplotlib.rcParams, setting, value)
    assert draw_cross_validation(results, observations) == first
    assert matplotlib.rcParams["font.size"] == 20
    for data in first.values():
        assert data.startswith(PNG)
        assert b"Software" not in data


def test_pyplot_and_its_backends_are_left_alone() -> None:
    code = (
        "import sys, numpy as np\n"
        "from precision_time.predictor.scoring.plots import PredictedRows, plot_predicted\n"
        "assert 'matplotlib' not in sys.modules\n"
        "rows = PredictedRows(title='t', measured_s=np.ones(2), predicted_s=np.ones(2), precisions=('fp32',) * 2, "
        "regimes=('known',) * 2, steps={})\n"
        "plot_predicted(rows)\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_title_is_shown_as_text_and_not_as_a_formula() -> None:
    assert plot_predicted(make_rows(title="a$b^$c.csv")).startswith(PNG)


def test_rows_of_one_time_and_of_one_row_can_be_drawn() -> None:
    single = PredictedRows(
        title="one", measured_s=np.array([1.0]), predicted_s=np.array([1.0]), precisions=("fp32",), regimes=("known",),
        steps={"x": np.array([0.0])},
    )  # fmt: skip
    assert plot_predicted(single).startswith(PNG)
    assert plot_distance(single).startswith(PNG)


@pytest.mark.parametrize(
    "changes",
    [
        {"precisions": ("fp32",)},
        {"predicted_s": np.ones(3)},
        {"steps": {"x": np.zeros(2)}},
        {"measured_s": np.array([0.1, 0.2, 0.0, 1.0])},
        {"predicted_s": np.array([0.1, 0.2, np.nan, 1.0])},
    ],
)
def test_rows_that_do_not_match_or_have_no_time_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        make_rows(**changes)


def test_the_plots_of_a_table_measure_from_the_domain_of_the_artifact(tmp_path: Path, measure: Any) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(
        "model,gpu,num_gpus,precision,parallelism,batch_size_per_gpu,seconds_per_iteration\n"
        "resnet50,A100-SXM4-80GB,1,fp32,ddp,8,0.05\nresnet50,A100-SXM4-80GB,8,amp_bf16,ddp,256,0.2\n"
        "bert_base,A100-SXM4-80GB,1,fp32,ddp,8,0.05\n"
    )
    domain = TrainingDomain.of(observe(measure(models=("resnet50",), batches=(8, 64))))
    table = predict_table(str(file), published=None)
    rows = PredictedRows.of_table(table, title="rows", domain=domain)
    assert rows.precisions == ("fp32", "amp_bf16", "fp32")
    batches, worlds = rows.steps.values()
    assert batches.tolist() == [0.0, 2.0, np.inf]  # 8 to 64 were measured, so 256 is two doublings away
    assert worlds.tolist() == [0.0, 2.0, 0.0]  # from 2 GPUs to 8
    assert PredictedRows.of_table(table, title="rows").steps == {}
    paths = write_plots(draw_table(table, title="rows"), str(tmp_path / "out"))
    assert [Path(path).name for path in paths] == ["distance.png", "predicted.png"]
    assert all(Path(path).read_bytes().startswith(PNG) for path in paths)


def test_plots_are_written_all_or_none(
    tmp_path: Path, observations: list[Observation], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "folder"
    paths = write_plots(draw_cross_validation({"configuration": make_result(observations)}, observations), str(folder))
    assert paths == tuple(f"{folder}/configuration-{kind}.png" for kind in ("distance", "predicted"))
    assert sorted(folder.iterdir()) == sorted(map(Path, paths))

    (folder / "a.png").write_bytes(b"earlier")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write = LocalStore.write_bytes

    def fail_at_the_last(self: LocalStore, path: str, data: bytes) -> None:
        if path == "c.png":
            raise StorageFullError("no room")
        write(self, path, data)

    monkeypatch.setattr(LocalStore, "write_bytes", fail_at_the_last)
    with pytest.raises(StorageFullError):
        write_plots({"a.png": b"1", "b.png": b"2", "c.png": b"3"}, str(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plots(str(tmp_path))
    importing = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return importing(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for ask in (lambda: check_plots(str(tmp_path)), lambda: plot_predicted(make_rows())):
        with pytest.raises(InputError, match=r"plots need matplotlib.*precision-time\[campaign\]"):
            ask()


def test_a_folder_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    from precision_time.storage.errors import StorageError

    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(StorageError):
        check_plots(str(file))
