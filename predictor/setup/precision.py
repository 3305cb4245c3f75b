"""Precision policies, and every spelling that frameworks use for them."""

from dataclasses import dataclass

from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["FORMAT_BYTES", "PRECISIONS", "SPELLINGS", "Precision", "parse_precision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A policy: the formats in which a training step computes, stores, accumulates and communicates.

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
        "fp32_strict", "o0", "highest", "f32", "fp32-true", "float32-true", "torch.float", "ieee", "32bit", "32-bit",
    ),
    "tf32": ("tf32", "tensorfloat32", "tensorfloat-32", "tensor_float_32", "high", "medium", "fp32+tf32", "tf32-true"),
    # O2 keeps the model in fp16 beside fp32 master weights; autocast is the nearest policy.
    "amp_fp16": (
        "amp_fp16", "16", "16-mixed", "mixed_fp16_fp32", "fp16-mixed", "mixed_fp16", "fp16_mixed", "mixed-fp16",
        "amp", "amp-fp16", "autocast-fp16", "mixed_float16", "fp16_fp32", "fp16-amp", "fp16_amp", "o1", "o2",
        "mixed_precision", "mixed-precision", "mixed", "half", "fp16-o1", "fp16-o2", "float16-mixed", "amp_float16",
        "autocast", "autocast-float16", "native_amp", "torch.cuda.amp", "16bit", "16-bit",
    ),
    "amp_bf16": (
        "amp_bf16", "bf16-mixed", "mixed_bf16_fp32", "mixed_bf16", "bf16_mixed", "mixed-bf16", "amp-bf16",
        "autocast-bf16", "mixed_bfloat16", "bf16_fp32", "bf16-amp", "bf16_amp", "bfloat16-mixed", "bfloat16",
        "amp_bfloat16", "autocast-bfloat16",
    ),
    "fp16": (
        "fp16", "16-true", "float16", "fp16-pure", "pure_fp16", "pure-fp16", "fp16-true", "torch.float16",
        "torch.half", "o3", "f16", "float16-true", "half-true", "fp16-o3",
    ),
    "bf16": (
        "bf16", "bf16-true", "bf16-pure", "pure_bf16", "pure-bf16", "torch.bfloat16", "bfloat16-true",
    ),
    "fp8": (
        "fp8", "amp_fp8", "transformer-engine", "transformer-engine-float16", "float8", "float8_e4m3fn",
        "float8_e5m2", "fp8-mixed", "e4m3", "hybrid-fp8", "fp8-hybrid", "hybrid", "e5m2", "fp8_e4m3", "fp8_e5m2",
        "torch.float8_e4m3fn", "torch.float8_e5m2",
    ),
    "nvfp4": (
        "nvfp4", "fp4", "float4", "amp_nvfp4", "nvfp4-mixed", "e2m1", "float4_e2m1fn_x2", "torch.float4_e2m1fn_x2",
    ),
}  # fmt: skip

#: Spellings of formats that have no policy here, and the policy to ask for instead.
_NOT_COVERED: dict[str, tuple[tuple[str, ...], str]] = {
    "fp64 training": (
        ("fp64", "64", "64-true", "64bit", "64-bit", "float64", "double", "f64", "torch.float64", "torch.double"),
        "ask for fp32, the widest policy",
    ),
    "training on integer or quantised weights": (
        ("int8", "int8-training", "torch.int8", "int4", "nf4", "nf4-dq", "fp4-dq"),
        "ask for the format of the matrix products, e.g. amp_bf16",
    ),
    "training in microscaling formats": (
        ("mxfp8", "mxfp6", "mxfp4"),
        "ask for fp8 or nvfp4, whose scales differ",
    ),
}

_BY_SPELLING = {spelling: name for name, spellings in SPELLINGS.items() for spelling in spellings}
_KIND_NOT_COVERED = {spelling: kind for kind, (spellings, _) in _NOT_COVERED.items() for spelling in spellings}


def parse_precision(text: str | int | Precision) -> Precision:
    """The policy that ``text`` names, in any accepted spelling (case, blanks and ``_``/``-`` do not matter).

    ``16`` means ``16-mixed``; ``fp16`` and ``bf16`` mean the pure policies. Lightning and Accelerate call the mixed
    policies ``fp16`` and ``bf16``: write ``16-mixed`` or ``amp_fp16``, ``bf16-mixed`` or ``amp_bf16`` for those.

    Raises ``InputError`` for a known format without a policy (fp64, int8, microscaling), and ``UnknownNameError`` with
    the nearest three spellings for any other text.
    """
    if isinstance(text, Precision):
        return text
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise InputError("not a precision", got=repr(text), expected="a name such as fp32 or bf16-mixed")
    folded = str(text).strip().casefold().replace(" ", "_")
    for spelling in (folded, folded.replace("_", "-"), folded.replace("-", "_"), folded.replace("_", "")):
        if spelling in _BY_SPELLING:
            return PRECISIONS[_BY_SPELLING[spelling]]
        if spelling in _KIND_NOT_COVERED:
            kind = _KIND_NOT_COVERED[spelling]
            raise InputError(
                f"{kind} is not covered",
                got=repr(text),
                expected=f"one of {', '.join(PRECISIONS)}",
                fix=_NOT_COVERED[kind][1],
            )
    raise UnknownNameError("precision", str(text), _BY_SPELLING, fix=f"canonical names: {', '.join(PRECISIONS)}")
