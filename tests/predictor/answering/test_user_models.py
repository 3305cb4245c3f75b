"""What a user may pass as a model: a name, a module, a factory or a configuration; and what is refused."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from precision_time import predict_time
from precision_time.__main__ import run
from precision_time.predictor.answering.user_models import import_factory, resolve_model
from precision_time.predictor.workloads.workload import find_workload
from precision_time.storage.errors import InputError, NotFoundError, UnknownNameError

pytestmark = pytest.mark.usefixtures("nothing_published")

RESNET_50 = {"params": 25.6e6, "forward_flops": 8.2e9, "convolution_share": 1.0}
FACTORIES = """
import torch
from torch import nn
from precision_time.tasks.workloads import OPTIMIZERS, Workload

def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

built = net()

def workload():
    return Workload(
        name="theirs", family="mlp", task_input="16", module=net(),
        make_batch=lambda samples, device: torch.randn(samples, 16, device=device),
        compute_loss=lambda module, batch: module(batch).square().mean(),
        make_optimizer=OPTIMIZERS["adamw"], optimizer_name="adamw",
    )

def words():
    return "a net"

def fails():
    raise OSError("no data set here")
"""


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRECISION_TIME_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_factories.py").write_text(FACTORIES)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_factories", raising=False)


class Halve(torch.autograd.Function):
    """A layer with a backward pass of its own."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values / 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


class Unlisted(nn.Module):
    """Odd shapes, a layer of its own, tied weights, a branch, attention written out, and three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(5, 37, (7, 3), stride=(3, 2), groups=1)
        self.depthwise = nn.Conv2d(37, 37, 3, groups=37, padding=1)
        self.mix = nn.Linear(37, 111)
        self.first, self.second = nn.Linear(37, 53, bias=False), nn.Linear(37, 53, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((37, 1, 1), 0.5))

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        values = self.patches(image)
        if values.shape[-1] % 2:
            values = values + self.depthwise(values) * self.scale
        tokens = Halve.apply(values).flatten(2).transpose(1, 2)
        query, key, value = self.mix(tokens).chunk(3, dim=-1)
        tokens = tokens + F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        return self.first(tokens), {"second": self.second(tokens).mean(1), "ids": tokens.argmax(-1)}


def test_an_unlisted_model_is_predicted_from_its_module(publish_made_up, measure, tmp_path: Path) -> None:
    publish_made_up(str(tmp_path / "registry"), measure())
    model, sample = Unlisted(), torch.randn(2, 5, 61, 47)

    def ask(batch: int, precision: str = "fp32"):
        return predict_time(
            model, precision, batch_size=batch, sample_input=sample, artifact=f"{tmp_path / 'registry'}/default"
        )

    estimates = [ask(batch) for batch in (8, 32, 128, 512, 2048)]
    assert {estimate.regime for estimate in estimates} == {"new family"}
    assert all(0 < estimate.low_s < estimate.iteration_time_s < estimate.high_s < math.inf for estimate in estimates)
    times = [estimate.iteration_time_s for estimate in estimates]
    assert times == sorted(times)
    assert times[-1] > 8 * times[0]
    assert estimates[0].model == "Unlisted"
    assert any("Unlisted was walked" in reason for reason in estimates[0].reasons)
    work = resolve_model(model, sample_input=sample).workload
    parameters = 37 * 5 * 7 * 3 + 37 + 37 * 9 + 37 + 37 * 111 + 111 + 37 * 53
    assert work.params == parameters
    height, width = (61 - 7) // 3 + 1, (47 - 3) // 2 + 1
    tokens = height * width
    products = tokens * 2 * (37 * 105 + 37 * 9 + 37 * 111 + 2 * 37 * 53) + 4 * tokens * tokens * 37
    assert work.forward_flops_per_sample == products
    assert (work.kind, work.task_input) == ("vision_transformer", "61x47")


def test_a_module_with_the_name_of_a_known_model_is_not_taken_for_it() -> None:
    class resnet50(nn.Linear):
        pass

    workload = resolve_model(resnet50(8, 8), sample_input="8").workload
    assert (workload.name, workload.network, workload.family) == ("resnet50", "own:resnet50", "")
    assert workload.forward_flops_per_sample == 2 * 8 * 8


def test_frozen_parameters_reach_the_closed_form() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))
    whole = predict_time(model, "fp32", batch_size=4096, sample_input="2048")
    model[0].requires_grad_(False)
    part = predict_time(model, "fp32", batch_size=4096, sample_input="2048")
    assert part.compute_time_s < whole.compute_time_s
    assert part.optimizer_time_s < whole.optimizer_time_s


def test_a_module_without_a_sample_is_refused() -> None:
    with pytest.raises(InputError, match=r"needs a sample of its input.*sample_input="):
        predict_time(nn.Linear(8, 8), "fp32", batch_size=1)


def test_task_input_does_not_go_with_a_module() -> None:
    with pytest.raises(InputError, match="task_input goes with"):
        resolve_model(nn.Linear(8, 8), sample_input="8", task_input="224")


@pytest.mark.parametrize("arguments", [{"sample_input": "3x224x224"}, {"loss": print}])
@pytest.mark.parametrize("model", ["resnet50", RESNET_50])
def test_sample_input_and_loss_go_only_with_a_module(model: object, arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="go with a module"):
        resolve_model(model, **arguments)


@pytest.mark.parametrize("model", [None, 3, nn.Linear, b"resnet50", ["resnet50"]])
def test_other_objects_are_refused_as_models(model: object) -> None:
    with pytest.raises(InputError, match="not a model"):
        resolve_model(model)


def test_names_are_found_as_by_find_workload() -> None:
    assert resolve_model("resnet50").workload == find_workload("resnet50")
    assert resolve_model("bert_base", task_input="512").workload == find_workload("bert_base", task_input="512")
    with pytest.raises(UnknownNameError, match="resnet50"):
        resolve_model("resnet5O")


def test_workload_features_are_a_model() -> None:
    work = find_workload("resnet50")
    assert resolve_model(work).workload is work


# Factories.


@pytest.mark.usefixtures("factories")
def test_a_factory_gives_a_module_or_a_workload() -> None:
    net = resolve_model("my_factories:net", sample_input="16").workload
    assert (net.name, net.family, net.params) == ("my_factories:net", "", 16 * 32 + 32 + 32 * 4 + 4)
    assert resolve_model("my_factories:built", sample_input="16").workload.walks == net.walks
    theirs = resolve_model("my_factories:workload").workload
    assert (theirs.name, theirs.family, theirs.optimizer) == ("my_factories:workload", "mlp", "adamw")
    assert theirs.forward_flops_per_sample == net.forward_flops_per_sample
    assert theirs.task_input == "16"


@pytest.mark.usefixtures("factories")
def test_a_model_that_was_measured_under_its_dotted_name_is_not_walked_again() -> None:
    measured = find_workload("mlp").__class__.from_dict(find_workload("mlp").to_dict() | {"name": "my_factories:none"})
    assert resolve_model("my_factories:none", measured=[measured]).workload == measured


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:net", "cannot be imported.*No module named"),
        ("my_factories:no_net", "cannot be imported.*no_net"),
        (":net", "cannot be imported"),
        ("my_factories:words", "does not return a model; got: str"),
        ("my_factories:fails", "fails; got: OSError: no data set here"),
        ("my_factories:net", "needs a sample"),
    ],
)
def test_a_factory_without_a_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_model(name)


@pytest.mark.usefixtures("factories")
def test_a_workload_has_its_own_batches() -> None:
    with pytest.raises(InputError, match="its own batches"):
        resolve_model("my_factories:workload", sample_input="16")


def test_a_module_is_imported_from_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("def make():\n    return 'made here'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert import_factory("only_here:make") == "made here"


@pytest.mark.usefixtures("factories")
def test_the_command_line_takes_a_factory_with_its_sample(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "--precision", "fp32", "--batch-size", "8", "--json", "--model", "my_factories:net"]
    assert run([*command, "--sample-input", "16"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "my_factories:net"
    assert run(command) == 2
    assert "--sample-input" in capsys.readouterr().err


# Paths.


@pytest.mark.parametrize("path", ["./none", "/none/config.json", "none.json", Path("none")])
def test_a_path_without_a_configuration_is_refused(path: str | Path) -> None:
    with pytest.raises(NotFoundError, match="no Hugging Face configuration"):
        resolve_model(path)


@pytest.mark.parametrize("name", ["someone/llama2-7bb", "bert/" * 2000, "a/\0b"])
def test_a_name_on_a_hub_is_not_downloaded(name: str) -> None:
    with pytest.raises(UnknownNameError, match="nothing is downloaded"):
        resolve_model(name)


def test_an_unknown_name_on_a_hub_offers_the_nearest_of_its_last_part() -> None:
    with pytest.raises(UnknownNameError) as refused:
        resolve_model("someone/llama2_7bb")
    assert "llama2_7b" in refused.value.nearest


def test_a_name_on_a_hub_whose_network_is_known_is_answered_from_the_zoo() -> None:
    workload = resolve_model("meta-llama/Llama-2-7b-hf").workload
    assert (workload.network, workload.source) == (find_workload("llama2_7b").network, "zoo")
    assert workload.params == find_workload("llama2_7b").params


def test_cards_and_names_are_answered_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys, precision_time as p\n"
        f"p.predict_time({RESNET_50}, 'fp32', batch_size=8)\n"
        "p.predict_time('resnet50', 'fp32', batch_size=8)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
