"""Precision policies and every spelling by which frameworks call them."""

from dataclasses import dataclass

from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["PRECISIONS", "SPELLINGS", "Precision", "parse_precision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A policy: in which format a training step computes, stores, accumulates and communicates.

    ``compute`` is the format of matrix products (the key of a device's peak rate), ``storage`` that of parameters
    and gradients, ``accumulate`` that of sums inside a product, ``communicate`` that of gradients on the wire, and
    ``activations`` that of tensors between operations.
    """

    name: str
    compute: str
    storage: str
    activations: str
    accumulate: str = "fp32"
    communicate: str = "fp32"
    loss_scaling: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether parameters stay in fp32 while products run in a narrower format (autocast)."""
        return self.compute != self.storage and self.compute != "tf32"


#: Bytes of one element in each storage format; tf32 is stored as fp32.
FORMAT_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "nvfp4": 0.5}

PRECISIONS: dict[str, Precision] = {
    policy.name: policy
    for policy in (
        Precision(name="fp32", compute="fp32", storage="fp32", activations="fp32"),
        Precision(name="tf32", compute="tf32", storage="fp32", activations="fp32"),
        # Under autocast parameters and gradients stay fp32, so data-parallel ranks send 4 bytes a parameter.
        Precision(name="amp_fp16", compute="fp16", storage="fp32", activations="fp16", loss_scaling=True),
        Precision(name="amp_bf16", compute="bf16", storage="fp32", activations="bf16"),
        Precision(name="fp16", compute="fp16", storage="fp16", activations="fp16", communicate="fp16"),
        Precision(name="bf16", compute="bf16", storage="bf16", activations="bf16", communicate="bf16"),
        Precision(name="fp8", compute="fp8", storage="fp32", activations="bf16"),
        Precision(name="nvfp4", compute="nvfp4", storage="fp32", activations="bf16"),
    )
}

#: Spellings of Lightning, Hugging Face Trainer and Accelerate, DeepSpeed, torch, Composer, Apex and common speech.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "fp32": (
        "fp32", "32", "32-true", "float32", "float", "single", "full", "no", "none", "fp32-strict", "torch.float32",
        "fp32_strict", "o0", "highest",
    ),
    "tf32": ("tf32", "tensorfloat32", "tensorfloat-32", "tensor_float_32", "high", "medium", "fp32+tf32", "tf32-true"),
    "amp_fp16": (
        "amp_fp16", "16", "16-mixed", "mixed_fp16_fp32", "fp16-mixed", "mixed_fp16", "fp16_mixed", "mixed-fp16",
        "amp", "amp-fp16", "autocast-fp16", "mixed_float16", "fp16_fp32", "fp16-amp", "fp16_amp", "o1",
        "mixed_precision", "mixed-precision", "mixed", "half",
    ),
    "amp_bf16": (
        "amp_bf16", "bf16-mixed", "mixed_bf16_fp32", "mixed_bf16", "bf16_mixed", "mixed-bf16", "amp-bf16",
        "autocast-bf16", "mixed_bfloat16", "bf16_fp32", "bf16-amp", "bf16_amp", "bfloat16-mixed", "bfloat16",
    ),
    "fp16": (
        "fp16", "16-true", "float16", "fp16-pure", "pure_fp16", "pure-fp16", "fp16-true", "torch.float16",
        "torch.half", "o3",
    ),
    "bf16": (
        "bf16", "bf16-true", "bf16-pure", "pure_bf16", "pure-bf16", "torch.bfloat16",
    ),
    "fp8": (
        "fp8", "amp_fp8", "transformer-engine", "transformer-engine-float16", "float8", "float8_e4m3fn",
        "float8_e5m2", "fp8-mixed", "e4m3", "hybrid-fp8",
    ),
    "nvfp4": ("nvfp4", "fp4", "float4", "amp_nvfp4", "nvfp4-mixed"),
}  # fmt: skip

_BY_SPELLING = {spelling: name for name, spellings in SPELLINGS.items() for spelling in spellings}


def parse_precision(text: str | int | Precision) -> Precision:
    """The policy that ``text`` names, in any accepted spelling (case, blanks and ``_``/``-`` do not matter).

    Raises ``UnknownNameError`` with the nearest three spellings.

    ``16`` means ``16-mixed`` and ``bf16`` the pure policy; Lightning reads ``bf16`` as ``bf16-mixed``, so write
    ``bf16-mixed`` or ``amp_bf16`` when the mixed policy is meant.
    """
    if isinstance(text, Precision):
        return text
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise InputError("not a precision", got=repr(text), expected="a name such as fp32 or bf16-mixed")
    folded = str(text).strip().casefold().replace(" ", "_")
    for spelling in (folded, folded.replace("_", "-"), folded.replace("-", "_"), folded.replace("_", "")):
        if spelling in _BY_SPELLING:
            return PRECISIONS[_BY_SPELLING[spelling]]
    raise UnknownNameError("precision", str(text), _BY_SPELLING, fix=f"canonical names: {', '.join(PRECISIONS)}")
