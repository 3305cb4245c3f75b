"""``precision-time predict``: each option reaches the prediction, and the answer is printed as text or as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from precision_time import predict_time
from precision_time.__main__ import run
from precision_time.predictor import api

QUESTION = ["predict", "--model", "llama2_7b", "--precision", "bf16", "--batch-size", "2"]


pytestmark = pytest.mark.usefixtures("nothing_published")


def ask(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run([*QUESTION, *options, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_command_answers_as_the_call_does(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "--gpus", "8", "--gpu", "H100-SXM5-80GB", "--steps", "10")
    called = predict_time("llama2_7b", "bf16", batch_size=2, gpus=8, gpu="H100-SXM5-80GB", steps=10)
    assert answer == json.loads(json.dumps(called.to_dict()))


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (["--strategy", "tp4-pp2"], {"strategy": "tp4-pp2"}),
        (["--task-input", "1024"], {"task_input": "1024"}),
        (["--sample-input", "tokens:512"], {"sample_input": "tokens:512"}),
        (
            ["--params", "7B", "--forward-flops", "14T", "--activations", "2G"],
            {"model": {"name": "llama2_7b", "params": "7B", "forward_flops": "14T", "activations": "2G"}},
        ),
        (["--activation-checkpointing", "full"], {"activation_checkpointing": "full"}),
        (["--compiled"], {"compiled": True}),
        (["--eager"], {"compiled": False}),
        (["--explain"], {"explain": True}),
        (["--strict"], {"strict": True}),
        (["--gradient-accumulation-steps", "4"], {"gradient_accumulation_steps": 4}),
        (["--nodes", "2"], {"nodes": 2}),
        (["--epochs", "1.5", "--dataset-size", "100"], {"epochs": 1.5, "dataset_size": 100}),
        (["--network-bandwidth", "25 Gbit/s"], {"network_bandwidth": "25 Gbit/s"}),
        (["--hardware-file", "mine.toml"], {"hardware_file": Path("mine.toml")}),
        (["--artifact", "here/mine@3"], {"artifact": "here/mine@3"}),
        (["--refresh"], {"refresh": True}),
    ],
)
def test_an_option_changes_its_own_arguments_of_the_call_and_no_others(
    options: list[str], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    estimate = predict_time("llama2_7b", "bf16", batch_size=2)
    monkeypatch.setattr(api, "predict_time", lambda **arguments: calls.append(arguments) or estimate)
    assert run(QUESTION) == 0
    assert run([*QUESTION, *options]) == 0
    plain, changed = calls
    assert {name: value for name, value in changed.items() if value != plain[name]} == changes


def test_an_option_that_is_left_out_has_the_default_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {}
    estimate = predict_time("llama2_7b", "bf16", batch_size=2)
    monkeypatch.setattr(api, "predict_time", lambda **given: arguments.update(given) or estimate)
    assert run(QUESTION) == 0
    # a loss is a function, which no option can be
    defaults = {name: value for name, value in predict_time.__kwdefaults__.items() if name != "loss"}
    assert {name: value for name, value in arguments.items() if name in defaults} == defaults


def test_a_layout_its_input_and_its_checkpointing_change_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ask(capsys, "--gpus", "8")
    assert plain["global_batch_size"] == 16
    assert plain["explanation"] is None
    tensor = ask(capsys, "--gpus", "8", "--strategy", "tp8")
    assert tensor["global_batch_size"] == 2
    assert tensor["iteration_time_s"] < plain["iteration_time_s"]
    assert ask(capsys, "--task-input", "1024")["iteration_time_s"] < ask(capsys)["iteration_time_s"]
    full = ask(capsys, "--activation-checkpointing", "full", "--explain")
    assert full["explanation"]["closed_form_s"]["recomputation"] > 0


def test_explain_prints_the_closed_form_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUESTION, "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "closed form" in shown
    assert "forward" in shown
    assert "the closed forms" in shown
    assert run(QUESTION) == 0
    assert "backward" not in capsys.readouterr().out


def test_unknown_checkpointing_is_refused_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUESTION, "--activation-checkpointing", "some"]) == 2
    error = capsys.readouterr().err
    assert all(choice in error for choice in ("none", "selective", "full"))


def test_strict_has_an_exit_code_of_its_own_outside_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUESTION, "--strict"]) == 6
    assert "outside the training data" in capsys.readouterr().err


def test_sizes_alone_are_a_model_and_a_model_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["predict", "--precision", "fp32", "--batch-size", "8", "--json"]
    assert run([*question, "--params", "25.6M", "--forward-flops", "8.2G"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "my model"
    assert run(question) == 2
    assert "no model was given" in capsys.readouterr().err
