"""What predict_time may be told beside model, precision and batch: layout, input and script; and how it explains."""

import contextlib
import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precision_time import predict_time
from precision_time.predictor import api
from precision_time.predictor.answering.artifact import PublishedPredictor, StandingArtifact
from precision_time.predictor.learning.blending import Blend
from precision_time.storage.errors import InputError, UnknownNameError
from precision_time.storage.manifests import ArtifactManifest

pytestmark = pytest.mark.usefixtures("nothing_published")


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [("ddp", 8), ("", 8), ("fsdp", 8), ("zero1", 8), ("tp4", 2), ("tp2-pp2", 2), ("tp8", 1), ("cp4", 2), ("ep8", 8)],
)
def test_the_global_batch_counts_replicas_and_not_the_gpus_of_each(strategy: str, replicas: int) -> None:
    estimate = predict_time(
        "mixtral_8x7b", "amp_bf16", gpus=8, batch_size=4, gradient_accumulation_steps=3, strategy=strategy
    )
    assert estimate.world_size == 8
    assert estimate.global_batch_size == 4 * replicas * 3
    assert estimate.samples_per_s == pytest.approx(estimate.global_batch_size / estimate.iteration_time_s)
    assert 0 < estimate.iteration_time_s < math.inf


def test_plain_data_parallelism_is_the_same_however_it_is_spelled() -> None:
    plain = predict_time("resnet50", "fp32", gpus=8, batch_size=32)
    assert predict_time("resnet50", "fp32", gpus=8, batch_size=32, strategy="dp8") == plain


def test_a_strategy_changes_the_answer_as_its_closed_form_does() -> None:
    def ask(strategy: str, micro_steps: int = 1):
        return predict_time(
            "llama2_7b", "bf16", gpus=8, batch_size=2, strategy=strategy, gradient_accumulation_steps=micro_steps
        )

    ddp, tensor = ask("ddp"), ask("tp8")
    # one replica instead of eight: an eighth of the work, most of it divided
    assert tensor.compute_time_s < ddp.compute_time_s / 4
    # every layer waits for the sum over its tensor ranks
    assert tensor.exposed_communication_s == tensor.communication_time_s > 0
    assert ask("fsdp").optimizer_time_s < ddp.optimizer_time_s / 4
    # more micro-steps fill a pipeline
    assert ask("pp8", 32).samples_per_s > 2 * ask("pp8").samples_per_s


@pytest.mark.parametrize("strategy", ["tp3", "tp4-pp4", "tp0", "sideways", "tp4-tp2"])
def test_degrees_that_do_not_fill_the_gpus_or_are_none_are_refused(strategy: str) -> None:
    with pytest.raises(InputError):
        predict_time("llama2_7b", "bf16", gpus=8, batch_size=2, strategy=strategy)


@pytest.mark.parametrize(("model", "usual", "other"), [("resnet50", "224", "448"), ("bert_base", "128", "512")])
def test_another_input_takes_another_time(model: str, usual: str, other: str) -> None:
    def ask(task_input: object) -> float:
        return predict_time(model, "fp32", batch_size=32, task_input=task_input).iteration_time_s  # type: ignore[arg-type]

    assert ask(usual) == ask("") == ask(None)
    assert 3 < ask(other) / ask(usual) < 5
    assert ask(int(other)) == ask(other)


def test_an_input_that_names_no_size_is_refused() -> None:
    with pytest.raises(InputError, match="names no size"):
        predict_time("resnet50", "fp32", batch_size=32, task_input="large")


def test_activations_computed_again_cost_a_forward_pass() -> None:
    def ask(kept: str | None) -> dict[str, float]:
        estimate = predict_time("bert_base", "fp32", batch_size=32, activation_checkpointing=kept, explain=True)
        assert estimate.explanation is not None
        return estimate.explanation["closed_form_s"] | {"all": estimate.iteration_time_s}

    plain, selective, full = ask("none"), ask("selective"), ask("full")
    assert ask(None) == plain
    assert "recomputation" not in plain
    assert full["recomputation"] == pytest.approx(full["forward"])
    assert plain["all"] < selective["all"] < full["all"]


@pytest.mark.parametrize("kept", ["some", "", "FULL", True])
def test_unknown_checkpointing_is_refused_with_the_choices(kept: object) -> None:
    with pytest.raises(UnknownNameError, match="activation checkpointing") as caught:
        predict_time("bert_base", "fp32", batch_size=32, activation_checkpointing=kept)  # type: ignore[arg-type]
    assert set(caught.value.nearest) == {"none", "selective", "full"}


@pytest.mark.parametrize("compiled", ["yes", 1, 2.0])
def test_compiled_is_yes_no_or_unsaid(compiled: object) -> None:
    with pytest.raises(InputError, match="compiled"):
        predict_time("resnet50", "fp32", batch_size=32, compiled=compiled)  # type: ignore[arg-type]


@pytest.fixture
def ask_large(large_predictor, monkeypatch: pytest.MonkeyPatch):
    """Ask a predictor with a model of whole iterations, published with the given blend."""

    def ask(model: str = "resnet50", *, blend: dict[str, Blend] | None = None, **told):
        published = PublishedPredictor(
            manifest=ArtifactManifest.model_construct(name="large", version=2, default_gpu="A100-SXM4-80GB"),
            predictor=dataclasses.replace(large_predictor, blend=blend or large_predictor.blend),
            workloads=(),
            hardware=(),
        )
        monkeypatch.setattr(api, "standing_artifact", lambda: StandingArtifact(published, "it is the only one"))
        return predict_time(model, **{"precision": "fp32", "batch_size": 16} | told)

    return ask


def test_what_is_said_of_the_script_reaches_the_trees(ask_large, large_predictor, monkeypatch) -> None:
    asked = []
    predict = type(large_predictor).predict

    def overhear(self, queries, blends=None):
        asked.extend(queries)
        return predict(self, queries, blends)

    monkeypatch.setattr(type(large_predictor), "predict", overhear)
    ask_large(compiled=True, activation_checkpointing="full")
    ask_large(compiled=False)
    ask_large(gpus=8, strategy="tp2-zero1")
    rows = [query.row for query in asked]
    assert [row["compiled"] for row in rows[:2]] == [1.0, 0.0]
    assert rows[0]["checkpointing"] == 2.0
    assert math.isnan(rows[1]["checkpointing"])
    assert (rows[2]["log_tensor"], rows[2]["log_data"]) == (math.log(2), math.log(4))
    assert rows[2]["sharding"] == 1.0


def test_an_explanation_multiplies_up_to_the_answer(ask_large) -> None:
    estimate = ask_large(explain=True)
    closed_s, factors = estimate.explanation["closed_form_s"], estimate.explanation["factors"]
    assert sum(closed_s.values()) * math.prod(factors.values()) == pytest.approx(estimate.iteration_time_s, rel=1e-5)
    assert factors["precision"] < 1
    assert "learned" in repr(estimate)
    assert ask_large().explanation is None


def test_by_the_closed_forms_alone_nothing_is_learned() -> None:
    estimate = predict_time("resnet50", "fp32", batch_size=32, explain=True)
    assert estimate.explanation is not None
    assert estimate.explanation["factors"] == {}
    assert sum(estimate.explanation["closed_form_s"].values()) == pytest.approx(estimate.iteration_time_s)


@pytest.mark.parametrize(
    ("told", "subject"),
    [
        ({"model": "gnmt"}, "gnmt"),
        ({"model": "resnet18"}, "resnet18"),
        ({"gpu": "RTX4090-24GB"}, "RTX4090-24GB"),
        ({"model": "gnmt", "gpu": "RTX4090-24GB"}, "RTX4090-24GB"),
        ({"gpus": 64}, "64 ranks"),
    ],
)
def test_what_an_artifact_does_not_speak_of_is_named(ask_large, told: dict, subject: str) -> None:
    estimate = ask_large(**told, blend={"known": Blend(1.0, 1.0)})
    assert estimate.artifact_id is None
    assert any(f"large@2 has no answer for {subject}:" in reason for reason in estimate.reasons)


anything = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers()))


@settings(max_examples=100, deadline=None)
@given(
    strategy=st.sampled_from(["ddp", "tp2", "fsdp", "pp4", ""]) | anything,
    task_input=st.sampled_from(["", "224", "256x512", "seq 77", "9" * 30]) | anything,
    activation_checkpointing=st.sampled_from([None, "full"]) | anything,
    compiled=st.sampled_from([None, True]) | anything,
    model=st.sampled_from(["resnet50", "bert_base", "mlp", "dlrm_small"]),
)
def test_any_facts_give_a_positive_time_or_a_named_error(**facts) -> None:
    with contextlib.suppress(InputError):
        estimate = predict_time(precision="fp32", batch_size=4, gpus=8, **facts)
        assert 0 < estimate.low_s < estimate.iteration_time_s < estimate.high_s < math.inf


def test_a_pipeline_divides_the_batch_of_a_step_into_micro_steps() -> None:
    question = {"model": "llama3_8b", "precision": "bf16", "gpu": "H100", "gpus": 8, "strategy": "pp8"}
    at_once = predict_time(**question, batch_size=32)
    told = predict_time(**question, batch_size=1, gradient_accumulation_steps=32)
    assert at_once.iteration_time_s == told.iteration_time_s
    assert at_once.global_batch_size == told.global_batch_size == 32
    assert any("assumed 32 micro-steps" in reason for reason in at_once.reasons)
