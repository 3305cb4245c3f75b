import subprocess
import sys
from dataclasses import replace

import pytest

from precision_time.predictor.workload import WorkloadFeatures, find_workload, known_workloads
from precision_time.storage.errors import InputError, UnknownNameError


def test_the_nine_workloads_have_cards():
    names = {"resnet18", "resnet50", "vit_b16", "vit_tiny", "bert_base", "bert_mini", "gpt2", "gpt2_mini", "mlp"}
    assert set(known_workloads()) == names


@pytest.mark.parametrize("name", ["resnet50", "mlp"])
def test_a_card_survives_its_dictionary(name):
    card = find_workload(name)
    assert WorkloadFeatures.from_dict(card.to_dict()) == card


def test_a_measured_card_comes_before_the_shipped_one():
    own = replace(find_workload("mlp"), params=1)
    assert find_workload("mlp", measured=[own]) is own


def test_an_unknown_model_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="nearest are resnet50,"):
        find_workload("resnet5")


@pytest.mark.parametrize("values", [{"name": "x"}, {**find_workload("mlp").to_dict(), "colour": "red"}])
def test_a_card_with_wrong_fields_is_bad_input(values):
    with pytest.raises(InputError, match="workload card"):
        WorkloadFeatures.from_dict(values)


def test_a_card_of_no_work_is_bad_input():
    with pytest.raises(InputError, match="forward_flops_per_sample of workload mlp"):
        replace(find_workload("mlp"), forward_flops_per_sample=0.0)


def test_cards_are_read_without_torch():
    code = "import sys; from precision_time.predictor.workload import find_workload; find_workload('gpt2'); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
