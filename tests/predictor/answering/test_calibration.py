"""Calibration: which measured rows are accepted, how they correct answers, and how a calibration is saved."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from precision_time.predictor.answering.answers import Answers, answer_queries
from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.answering.calibration import Calibration, calibrate, load_calibration
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.learning.regimes import SHIPPED_COVARIANCES
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.measured_rows import read_measured_rows
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.workloads.workload import find_workload
from precision_time.storage.errors import InputError, IntegrityError, NotFoundError, UnknownNameError
from precision_time.storage.schema import Measurement

RADII = {
    "known": 0.1, "new pair": 0.2, "new gpu": 0.3, "new model": 0.4, "new family": 0.6, "new model and gpu": 0.6,
    "beyond scale": 0.5,
}  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    usual = {"model": "resnet50", "gpu": "A100-SXM4-80GB", "precision": "amp_fp16", "batch_size": 64}
    return {name: value for name, value in (usual | {"iteration_time_s": 0.06} | changes).items() if value is not None}


def ask(**changes: Any) -> Query:
    ((setup, _),) = read_measured_rows([row(**changes)])
    return Query.of(setup)


@pytest.fixture(autouse=True)
def _nothing(nothing_published: None) -> None:
    """The closed forms answer unless a test names an artifact."""


@pytest.fixture(scope="module")
def published(large_predictor: HierarchicalPredictor, as_published) -> PublishedPredictor:
    return as_published(large_predictor.with_intervals(RADII, level=0.9))


def closed_s(query: Query) -> float:
    return query.closed.iteration_time_s


def answer(queries: list[Query], published: PublishedPredictor | None = None) -> Answers:
    return answer_queries(queries, published=published)


def measured(query: Query, *, factor: float, published: PublishedPredictor | None = None) -> float:
    return float(answer([query], published).parts.iteration_time_s[0]) * factor


def test_a_row_corrects_its_own_question_most_and_less_similar_ones_less() -> None:
    calibration = calibrate([row(iteration_time_s=2 * closed_s(ask()))])
    queries = [ask(), ask(batch_size=128), ask(precision="fp32"), ask(model="vgg16", gpu="T4-16GB")]
    before = answer(queries)
    after = calibration.correct(queries, before)
    factors = after.parts.iteration_time_s / before.parts.iteration_time_s
    assert 1.9 < factors[0] < 2.0
    assert (np.diff(factors) < 0).all()
    assert factors[3] < 1.3
    # the interval is the narrowest where the correction is the largest, and not wider than before
    widths = np.log(after.high_s / after.low_s)
    assert (np.diff(widths) > 0).all()
    assert (widths <= np.log(before.high_s / before.low_s) + 1e-9).all()
    # the shares of an iteration stay
    share = after.parts.compute_time_s / after.parts.iteration_time_s
    assert share == pytest.approx(before.parts.compute_time_s / before.parts.iteration_time_s)
    assert after.corrections[0] == f"calibrated by 1 measured row of resnet50 on A100-SXM4-80GB: x{factors[0]:.2f}"


def test_a_row_unlike_the_question_moves_nothing_and_the_answer_says_so(published: PublishedPredictor) -> None:
    calibration = calibrate(
        [row(iteration_time_s=measured(ask(), factor=1.3, published=published))], artifact=published
    )
    other = [ask(model="bert_base", gpu="T4-16GB")]
    before = answer(other, published)
    after = calibration.correct(other, before)
    assert after.parts.iteration_time_s == pytest.approx(before.parts.iteration_time_s)
    assert after.low_s == pytest.approx(before.low_s)
    assert after.corrections == ("no measured row is like this question: the answer is the same as without them",)


def test_a_new_model_moves_further_than_a_known_one(published: PublishedPredictor) -> None:
    moved = []
    regimes = {"resnet50": "known", "resnet101": "new model", "mobilenet_v2": "new family"}
    for model, regime in regimes.items():
        near = ask(model=model, batch_size=32)
        calibration = calibrate(
            [row(model=model, batch_size=32, iteration_time_s=measured(near, factor=1.2, published=published))],
            artifact=published,
        )
        queries = [ask(model=model, gpu="H100-SXM5-80GB")]
        before = answer(queries, published)
        moved.append(
            float(
                np.log(calibration.correct(queries, before).parts.iteration_time_s / before.parts.iteration_time_s)[0]
            )
        )
        assert calibration.rows[0].source.name == regime
    assert moved[0] < 0.02 < moved[1] < math.log(1.2)
    assert 0.05 < moved[2] < math.log(1.2)


def test_rows_of_another_network_on_a_new_gpu_correct_the_chip(published: PublishedPredictor) -> None:
    gpu = "RTX4090-24GB"
    rows = []
    for model in ("vgg16", "densenet121", "bert_base"):
        query = ask(model=model, gpu=gpu)
        rows.append(row(model=model, gpu=gpu, iteration_time_s=measured(query, factor=1.4, published=published)))
    calibration = calibrate(rows, artifact=published)
    queries = [ask(gpu=gpu), ask()]
    before = answer(queries, published)
    after = calibration.correct(queries, before)
    factors = after.parts.iteration_time_s / before.parts.iteration_time_s
    assert 1.08 < factors[0] < 1.4
    assert factors[1] == pytest.approx(1.0, abs=0.01)
    assert after.corrections[0].startswith("calibrated by 3 measured rows (1 of vgg16 on RTX4090-24GB, ")


def test_no_corrected_interval_is_narrower_than_that_of_a_known_configuration(published: PublishedPredictor) -> None:
    query = ask(model="mobilenet_v2")
    rows = [row(model="mobilenet_v2", iteration_time_s=measured(query, factor=1.0, published=published))] * 20
    after = calibrate(rows, artifact=published).correct([query], answer([query], published))
    assert np.log(after.high_s / after.parts.iteration_time_s) == pytest.approx(RADII["known"])


def test_on_average_a_row_improves_other_answers(published: PublishedPredictor, many_rows: list[Observation]) -> None:
    rng = np.random.default_rng(0)
    # each network has a shift of its own, and each row noise
    errors = []
    for model in ("resnet101", "mobilenet_v2", "vgg19", "resnet18"):
        shift = rng.normal(0, 0.25)
        queries = [
            ask(model=model, batch_size=size, gpu=gpu) for size in (8, 32, 128) for gpu in ("T4-16GB", "L4-24GB")
        ]
        truth = answer(queries, published).parts.iteration_time_s * np.exp(shift + rng.normal(0, 0.1, len(queries)))
        for place, query in enumerate(queries):
            setup = query.setup
            measured_row = row(
                model=model, batch_size=setup.batch_size, gpu=setup.hardware.name, iteration_time_s=float(truth[place])
            )
            others = [other for other in range(len(queries)) if other != place]
            before = answer([queries[other] for other in others], published)
            after = calibrate([measured_row], artifact=published).correct([queries[other] for other in others], before)
            errors.append(
                [np.abs(np.log(answers.parts.iteration_time_s / truth[others])).mean() for answers in (before, after)]
            )
    error_before, error_after = np.mean(errors, axis=0)
    assert error_after < 0.9 * error_before


def test_every_form_of_rows_gives_the_same_calibration(tmp_path: Path) -> None:
    record = Measurement(
        source="mine", model="resnet50", task_input="", gpu="A100-SXM4-80GB", nodes=1, world_size=2,
        precision="amp_fp16", strategy="ddp", per_gpu_batch_size=64, gradient_accumulation_steps=1,
        framework="pytorch", iteration_time_s=0.06,
    )  # fmt: skip
    plain = row(gpus=2)
    rate = row(gpus=2, iteration_time_s=None, samples_per_s=128 / 0.06)
    public = {
        "model": "resnet50", "gpu": "A100-SXM4-80GB", "num_gpus": 2, "num_nodes": None, "precision": "amp_fp16",
        "batch_size_per_gpu": 64, "seconds_per_iteration": 0.06, "parallelism": "", "framework": "pytorch", "notes": "",
    }  # fmt: skip
    rows_file, table = tmp_path / "rows.csv", tmp_path / "public.csv"
    pd.DataFrame([plain]).to_csv(rows_file, index=False)
    pd.DataFrame([public]).to_csv(table, index=False)
    forms: list[Any] = [[record], [plain], [rate], rows_file, str(table), pd.DataFrame([plain]), pd.DataFrame([public])]
    calibrations = [calibrate(form) for form in forms]
    for calibration in calibrations:
        assert calibration.rows[0].query.setup == calibrations[0].rows[0].query.setup
        assert calibration.rows[0].measured_s == pytest.approx(0.06)
    assert calibrations[0].rows[0].query.setup.world_size == 2


def test_a_row_may_carry_the_workload_of_a_users_model() -> None:
    work = dataclasses.replace(find_workload("resnet50"), name="mine", network="mine")
    measured_row = row(model=None, workload=work, iteration_time_s=2 * closed_s(ask()))
    queries = [ask(model=None, workload=work, batch_size=32)]
    before = answer(queries)
    after = calibrate([measured_row]).correct(queries, before)
    assert after.parts.iteration_time_s[0] > 1.5 * before.parts.iteration_time_s[0]
    assert "row of mine on" in after.corrections[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"iteration_time_s": None}, "values are missing"),
        ({"iteration_time_s": -1.0}, "iteration_time_s is not usable"),
        ({"iteration_time_s": math.nan}, "iteration_time_s is not usable"),
        ({"iteration_time_s": "fast"}, "iteration_time_s is not usable"),
        ({"iteration_time_s": True}, "iteration_time_s is not usable"),
        ({"samples_per_s": 0}, "samples_per_s is not usable"),
        ({"samples_per_s": 10.0}, "mixed units"),
        ({"model": "resnet5O"}, "unknown model"),
        ({"gpu": "A1OO"}, "unknown"),
        ({"precision": "fp33"}, "unknown precision"),
        ({"iteration_time_ms": 60.0}, "unknown field"),
        ({"batch_size": 0}, "batch_size is out of range"),
        ({"batch_size": 6.5}, "batch_size is not a count"),
        ({"gpus": 3, "nodes": 2}, "do not divide"),
        ({"compiled": "maybe"}, "compiled is not usable"),
        ({"model": None}, "values are missing"),
        ({"workload": "resnet50"}, "workload of a wrong type"),
        ({"activation_checkpointing": "half"}, "activation checkpointing"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        calibrate([row(), row(**changes)])
    assert words in str(caught.value)
    assert "measured row 2" in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 5, row(), [5], {"model": "resnet50"}])
def test_measurements_of_a_wrong_type_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="wrong type"):
        calibrate(wrong)


def test_no_rows_and_missing_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing was measured"):
        calibrate([])
    with pytest.raises(InputError, match="lacks columns") as caught:
        calibrate(pd.DataFrame([{"model": "resnet50", "gpu": "T4-16GB"}]))
    assert "iteration_time_s or samples_per_s" in str(caught.value)
    with pytest.raises(NotFoundError):
        calibrate(tmp_path / "none.csv")


def test_milliseconds_for_seconds_are_refused() -> None:
    with pytest.raises(InputError, match="not believable") as caught:
        calibrate([row(), row(iteration_time_s=60.0)])
    assert "measured row 2" in str(caught.value)
    assert "milliseconds" in str(caught.value)


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        calibrate([row(model="resnet5O")])
    assert "resnet50" in caught.value.nearest


def test_a_calibration_is_the_same_after_json_and_a_file(tmp_path: Path, published: PublishedPredictor) -> None:
    calibration = calibrate(
        [row(), row(gpus=8, strategy="fsdp", compiled=True, iteration_time_s=0.1)], artifact=published
    )
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration
    calibration.save(tmp_path / "mine.json")
    assert load_calibration(tmp_path / "mine.json") == calibration
    assert calibrate(str(tmp_path / "mine.json"), artifact=published) == calibration
    assert calibrate(calibration, artifact=published) is calibration


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"form": 2}'])
def test_another_json_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(IntegrityError):
        load_calibration(tmp_path / "broken.json")


def test_unusable_values_of_a_calibration_are_refused() -> None:
    values = calibrate([row()]).to_dict()
    for broken in ({"narrowest": -1}, {"rows": [{}]}, {"rows": [values["rows"][0] | {"regime": "unheard of"}]}):
        with pytest.raises(IntegrityError):
            Calibration.from_dict(values | broken)


def test_a_calibration_is_compared_with_the_artifact_that_answers(published: PublishedPredictor) -> None:
    calibration = calibrate([row()])
    assert calibration.artifact_id is None
    assert calibration.rows[0].source.name == "closed forms"
    other = calibration.against(published)
    assert other.artifact_id == "made-up@1"
    assert other.rows[0].source.name == "known"
    assert other.rows[0].predicted_s == pytest.approx(measured(ask(), factor=1.0, published=published))
    assert other.narrowest == RADII["known"]


def test_errors_of_the_closed_forms_do_not_correct_answers_of_the_trees(
    published: PublishedPredictor,
) -> None:
    measured_row = row(gpu="cpu", precision="fp32", batch_size=8, iteration_time_s=2.0)
    calibration = calibrate([measured_row], artifact=published)
    assert calibration.rows[0].source.name == "closed forms on a CPU"
    queries = [ask(), ask(gpu="cpu", precision="fp32", batch_size=16)]
    before = answer(queries, published)
    factors = calibration.correct(queries, before).parts.iteration_time_s / before.parts.iteration_time_s
    assert factors[0] == 1.0
    assert abs(math.log(factors[1])) > 0.1


def test_covariances_of_an_artifact_come_before_the_shipped_ones(published: PublishedPredictor) -> None:
    stiff = dataclasses.replace(SHIPPED_COVARIANCES["known"], repeat=0.01)
    changed = dataclasses.replace(published, predictor=published.predictor.with_covariances({"known": stiff}))
    loaded = HierarchicalPredictor.from_files(changed.predictor.to_files())
    assert loaded.covariances == {"known": stiff}
    moved = []
    for artifact in (published, dataclasses.replace(changed, predictor=loaded)):
        measured_row = row(iteration_time_s=measured(ask(), factor=1.2, published=artifact))
        before = answer([ask()], artifact)
        after = calibrate([measured_row], artifact=artifact).correct([ask()], before)
        moved.append(float(after.parts.iteration_time_s[0] / before.parts.iteration_time_s[0]))
    assert moved[0] > 1.1
    assert moved[1] == pytest.approx(1.0, abs=0.01)
