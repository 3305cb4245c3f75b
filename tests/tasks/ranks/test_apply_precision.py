import pytest
import torch
from torch import nn

from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.storage.errors import PrecisionUnsupportedError
from precision_time.tasks.ranks.apply_precision import apply_precision, check_switches, reason_unsupported

CPU = torch.device("cpu")


def apply(name):
    module = nn.Linear(8, 8)
    return apply_precision(PRECISIONS[name], module, device=CPU), module


@pytest.mark.parametrize(
    ("name", "parameters", "products", "scaled"),
    [
        ("fp32", torch.float32, torch.float32, False),
        ("amp_bf16", torch.float32, torch.bfloat16, False),
        ("amp_fp16", torch.float32, torch.float16, True),
        ("bf16", torch.bfloat16, torch.bfloat16, False),
        ("fp16", torch.float16, torch.float16, False),
    ],
)
def test_a_policy_takes_hold_where_it_says(name, parameters, products, scaled):
    policy, module = apply(name)
    assert policy.effective == name
    assert module.weight.dtype == parameters
    batch = policy.cast_batch({"inputs": torch.ones(2, 8), "labels": torch.ones(2, dtype=torch.long)})
    assert (batch["inputs"].dtype, batch["labels"].dtype) == (parameters, torch.long)
    with policy.autocast():
        assert module(batch["inputs"]).dtype == products
    assert (policy.scaler is not None) == scaled


def test_fp32_switches_every_tf32_mode_off():
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    apply("fp32")
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32


def test_convolutions_in_tf32_beside_products_in_fp32_are_no_fp32(monkeypatch):
    class Deaf:
        """cuDNN's switches, turned by something else."""

        allow_tf32 = property(lambda self: True, lambda self, value: None)

    monkeypatch.setattr(torch.backends, "cudnn", Deaf())
    said = r"float32_matmul_precision=highest with cudnn.allow_tf32=True came into force"
    with pytest.raises(PrecisionUnsupportedError, match=said):
        apply("fp32")


@pytest.mark.parametrize("name", ["fp32", "amp_bf16"])
def test_a_model_that_turns_a_switch_while_it_trains_is_refused(monkeypatch, name):
    policy, _ = apply(name)
    check_switches(policy, device=CPU)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with pytest.raises(PrecisionUnsupportedError, match=r"does not run .*the model changed the TF32 switches"):
        check_switches(policy, device=CPU)


@pytest.mark.parametrize("name", ["tf32", "fp8", "nvfp4"])
def test_what_a_cpu_cannot_do_is_refused_by_name_and_never_replaced(name):
    with pytest.raises(PrecisionUnsupportedError, match=f"this CPU does not run {name}"):
        apply(name)
    assert reason_unsupported(PRECISIONS[name], device=CPU)


def test_a_module_that_keeps_another_format_is_not_called_by_the_asked_one():
    class Stubborn(nn.Linear):
        def to(self, *args, **kwargs):
            return self

    with pytest.raises(PrecisionUnsupportedError, match="came into force instead"):
        apply_precision(PRECISIONS["bf16"], Stubborn(8, 8), device=CPU)


def test_a_missing_kernel_is_the_reason(monkeypatch):
    assert reason_unsupported(PRECISIONS["fp16"], device=CPU) is None

    def missing(*args, **kwargs):
        raise RuntimeError("\"layer\" not implemented for 'Half'\nmore lines")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", missing)
    assert reason_unsupported(PRECISIONS["fp16"], device=CPU) == "\"layer\" not implemented for 'Half'"
