"""``precision-time predict``: each option reaches the prediction, and the answer is told to people and to programs."""

import json
from pathlib import Path
from typing import Any

import pytest

from precision_time import predict_time
from precision_time.__main__ import run
from precision_time.predictor import api

ASKED = ["predict", "--model", "llama2_7b", "--precision", "bf16", "--batch-size", "2"]


pytestmark = pytest.mark.usefixtures("nothing_published")


def ask(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run([*ASKED, *options, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_command_answers_as_the_call_does(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "--gpus", "8", "--gpu", "H100-SXM5-80GB", "--steps", "10")
    called = predict_time("llama2_7b", "bf16", batch_size=2, gpus=8, gpu="H100-SXM5-80GB", steps=10)
    assert answer == json.loads(json.dumps(called.to_dict()))


@pytest.mark.parametrize(
    ("options", "told"),
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
def test_an_option_tells_the_call_what_it_says_and_nothing_else(
    options: list[str], told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, Any]] = []
    real = predict_time("llama2_7b", "bf16", batch_size=2)

    def overhear(**facts: Any) -> object:
        heard.append(facts)
        return real

    monkeypatch.setattr(api, "predict_time", overhear)
    assert run(ASKED) == 0
    assert run([*ASKED, *options]) == 0
    plain, changed = heard
    assert {name: value for name, value in changed.items() if value != plain[name]} == told


def test_what_is_not_said_is_as_in_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[str, Any] = {}
    real = predict_time("llama2_7b", "bf16", batch_size=2)
    monkeypatch.setattr(api, "predict_time", lambda **facts: heard.update(facts) or real)
    assert run(ASKED) == 0
    # a loss is a function, which no option can be
    usual = {name: value for name, value in predict_time.__kwdefaults__.items() if name != "loss"}
    assert {name: value for name, value in heard.items() if name in usual} == usual


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


def test_people_read_the_closed_form_by_part_where_they_ask_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASKED, "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "closed form" in shown
    assert "forward" in shown
    assert "the closed forms" in shown
    assert run(ASKED) == 0
    assert "backward" not in capsys.readouterr().out


def test_unknown_checkpointing_is_answered_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASKED, "--activation-checkpointing", "some"]) == 2
    told = capsys.readouterr().err
    assert all(choice in told for choice in ("none", "selective", "full"))


def test_strict_ends_with_its_own_code_outside_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASKED, "--strict"]) == 6
    assert "outside the training data" in capsys.readouterr().err


def test_sizes_alone_are_a_model_and_nothing_at_all_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "--precision", "fp32", "--batch-size", "8", "--json"]
    assert run([*asked, "--params", "25.6M", "--forward-flops", "8.2G"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "my model"
    assert run(asked) == 2
    assert "no model was given" in capsys.readouterr().err
