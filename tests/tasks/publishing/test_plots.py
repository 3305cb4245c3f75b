"""Pictures of campaigns and retrainings: what is drawn, who predicted, what is left out, and how large they are."""

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from precision_time.predictor.rows.observations import Observation, observe
from precision_time.predictor.scoring.cross_validation import CrossValidation
from precision_time.storage.schema import Measurement
from precision_time.tasks.publishing.plots import CAPTIONS, draw_campaign_plots, draw_retraining_plots, show_plots
from precision_time.tasks.publishing.validate import Validation

Measure = Callable[..., list[Measurement]]
Publish = Callable[[str, Sequence[Measurement]], None]

MOST_BYTES = 60_000


def colours_of(png: bytes) -> tuple[tuple[int, int], set[tuple[int, int, int]]]:
    from PIL import Image

    with Image.open(io.BytesIO(png)) as picture:
        return picture.size, {colour for _, colour in picture.convert("RGB").getcolors(10**7) or []}


def test_a_large_campaign_is_drawn_in_three_light_pictures(measure: Measure) -> None:
    precisions = ("fp32", "tf32", "amp_bf16", "amp_fp16")
    measured = measure(
        models=("mlp", "vit_tiny", "bert_mini", "gpt2_mini"), precisions=precisions, world_sizes=(1, 2, 4)
    )
    drawn = draw_campaign_plots(measured, name="trial")
    assert list(drawn.pictures) == ["predicted.png", "gpus.png", "speedup.png"]
    for name, png in drawn.pictures.items():
        size, colours = colours_of(png)
        assert min(size) > 300, name
        assert len(png) < MOST_BYTES, name
        # The palette must keep the colours of a few points on a white ground.
        assert any(blue - red > 60 for red, _, blue in colours), name
    assert "6 more models and batches are in the table only." in drawn.remarks


def test_it_is_said_who_predicted_and_how_much_of_it_the_artifact_had_seen(
    measure: Measure, publish_made_up: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PRECISION_TIME_REGISTRY", raising=False)
    monkeypatch.delenv("PRECISION_TIME_ARTIFACT", raising=False)
    measured = measure(models=("mlp", "vit_tiny"))
    by_champion = _publish_champion(publish_made_up, tmp_path, measured[:18])
    (remark,) = draw_campaign_plots(measured, name="trial", registry=by_champion).remarks
    assert remark.startswith(
        "Predictions are those of default@1, the champion of this campaign's registry, which was trained on 18 of "
        "these 24 cells. Mean error "
    )
    (remark,) = draw_campaign_plots(measured, name="trial", registry=str(tmp_path / "nothing")).remarks
    assert "default@1" not in remark
    monkeypatch.setenv("PRECISION_TIME_ARTIFACT", str(tmp_path / "nothing" / "default"))
    (remark,) = draw_campaign_plots(measured, name="trial").remarks
    assert remark.startswith("Predictions are those of the closed forms: no artifact can be used")


def _publish_champion(publish: Publish, folder: Path, measured: Sequence[Measurement]) -> str:
    from precision_time.storage.registry import Registry

    url = str(folder / "registry")
    publish(url, measured)
    registry = Registry(url)
    if "champion" not in registry.aliases("default"):
        registry.set_alias("default", "champion", 1)
    return url


def test_what_the_cells_do_not_support_is_said_instead_of_drawn(measure: Measure) -> None:
    (one, *_) = measure(precisions=("amp_bf16",), world_sizes=(1,))
    unknown = replace(one, model="casgd-logistic-n2000", cell_id="0" * 16)
    drawn = draw_campaign_plots([one, unknown], name="trial")
    assert list(drawn.pictures) == ["predicted.png"]
    said = " ".join(drawn.remarks)
    assert "1 cells have no card to predict from" in said
    assert "Time against GPUs is not drawn" in said
    assert "Speed-up is not drawn" in said


def test_without_matplotlib_the_report_says_so(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    drawn = draw_campaign_plots(measure(), name="trial")
    assert (drawn.pictures, drawn.remarks) == ({}, ("Pictures are missing: plots need matplotlib.",))


def test_a_retraining_is_drawn_by_row_and_by_precision(measure: Measure) -> None:
    observed = observe(measure())
    measured = np.array([row.measurement.iteration_time_s for row in observed])
    done = CrossValidation(
        split="configuration", rows=np.arange(len(observed)), measured_s=measured,
        predicted_s={"predictor": 1.1 * measured, "precision_blind": 2.0 * measured, "roofline": 0.6 * measured},
        folds=np.arange(len(observed)) % 5, regimes=("known",) * len(observed), covered=None, level=0.9,
    )  # fmt: skip
    validation = Validation(
        accuracy={"configuration": done.metrics()}, cross_validations={"configuration": done}, radii={}, level=0.9
    )
    pictures = draw_retraining_plots(validation, observed)
    assert list(pictures) == ["predicted.png", "precision.png", "gpus.png", "speedup.png"]
    assert all(png.startswith(b"\x89PNG") and len(png) < MOST_BYTES for png in pictures.values())
    assert set(pictures) <= set(CAPTIONS)


def validate_made_up(observed: Sequence[Observation], *, error: float) -> Validation:
    """A validation whose log errors are mostly below ``error``, and a few of them far above."""
    measured = np.array([row.measurement.iteration_time_s for row in observed])
    odd = np.random.default_rng(0).standard_t(3, len(measured))
    done = CrossValidation(
        split="configuration", rows=np.arange(len(observed)), measured_s=measured,
        predicted_s={"predictor": measured * np.exp(error * odd), "roofline": 0.6 * measured},
        folds=np.arange(len(observed)) % 5, regimes=("known",) * len(observed), covered=None, level=0.9,
    )  # fmt: skip
    return Validation(accuracy={}, cross_validations={"configuration": done}, radii={}, level=0.9)


def test_the_whole_public_table_is_drawn_in_pictures_that_a_page_takes() -> None:
    from precision_time.predictor.rows.observations import observe_table
    from precision_time.predictor.rows.public_table import load_public_table

    observed, _ = observe_table(load_public_table().kept)
    assert len(observed) > 10_000
    pictures = draw_retraining_plots(validate_made_up(observed, error=0.08), observed)
    assert list(pictures) == ["predicted.png", "precision.png", "gpus.png", "speedup.png"]
    for name, png in pictures.items():
        _, colours = colours_of(png)
        assert len(png) < 0.95 * MOST_BYTES, name
        assert any(blue - red > 60 for red, _, blue in colours), name


def test_a_retraining_draws_gpus_and_speed_up_of_campaigns_before_tables_and_only_where_there_are_any(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    titles: list[str] = []
    write = Axes.set_title

    def keep(self: Axes, title: str, **style: object) -> object:
        titles.append(title)
        return write(self, title, **style)

    monkeypatch.setattr(Axes, "set_title", keep)
    of_campaign = observe(measure(models=("mlp",)))
    table = [replace(row, index=number) for number, row in enumerate(observe(measure(models=("vit_tiny",))))]
    for rows, model in ((of_campaign + table, "mlp"), (table, "vit_tiny")):
        titles.clear()
        pictures = draw_retraining_plots(validate_made_up(rows, error=0.1), rows)
        assert list(pictures) == ["predicted.png", "precision.png", "gpus.png", "speedup.png"]
        assert [title for title in titles if "batch" in title] == [f"{model}, batch {size}" for size in (8, 16, 32)]
    alone = observe(measure(models=("mlp",), precisions=("amp_bf16",), world_sizes=(1,)))
    pictures = draw_retraining_plots(validate_made_up(alone, error=0.1), alone)
    assert list(pictures) == ["predicted.png", "precision.png"]


def test_runs_on_two_devices_share_no_line_and_no_ratio_and_repeats_count_once(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    lines: list[tuple[str, list[float]]] = []
    ratios: list[float] = []
    plot, scatter = Axes.plot, Axes.scatter

    def keep_line(self: Axes, xs: list[float], ys: list[float], *rest: object, **style: object) -> object:
        if "label" in style:
            lines.append((str(style["label"]), list(ys)))
        return plot(self, xs, ys, *rest, **style)

    def keep_points(self: Axes, xs: list[float], ys: list[float], **style: object) -> object:
        if "label" in style:
            ratios.extend(ys)
        return scatter(self, xs, ys, **style)

    monkeypatch.setattr(Axes, "plot", keep_line)
    monkeypatch.setattr(Axes, "scatter", keep_points)
    a100 = measure(models=("mlp",), batches=(8,))
    h100 = measure(models=("mlp",), batches=(8,), gpu="H100-SXM5-80GB", precisions=("amp_bf16",))
    slow = replace(a100[0], iteration_time_s=9 * a100[0].iteration_time_s)
    draw_campaign_plots([*a100, *h100, slow, slow], name="trial")
    assert [label for label, _ in lines] == ["fp32", "amp_bf16", "amp_bf16"]
    assert (a100[0].precision, a100[0].world_size) == ("fp32", 1)
    assert lines[0][1][0] == pytest.approx(1e3 * slow.iteration_time_s)
    assert len(ratios) == 2


def test_a_picture_has_words_for_whoever_cannot_see_it() -> None:
    (line, blank) = show_plots(["speedup.png"])
    assert (line, blank) == ("![Speed-up of each precision over fp32, one point per cell](plots/speedup.png)", "")
