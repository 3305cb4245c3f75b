"""Facts about the code behind a row of the public table: framework, year, layout, compiler, kernels, ..."""

import functools
import re
from collections.abc import Mapping

from precision_time.predictor.setup.implementation import Checkpointing, Implementation

__all__ = ["LORA_TRAINABLE_SHARE", "find_container", "name_framework", "read_implementation"]

#: Share of the parameters that LoRA trains: one constant of the order of two known cases. Rank 16 on all attention
#: projections of Llama-2 70B (80 layers, hidden 8192, key-value width 1024), the setting of the MLPerf benchmark, is
#: 80 x 16 x (8192 + 10240 + 8192 + 8192) = 44.6 M of 69 G, 0.0006; rank 32 on the fused query-key-value of Llama-3 8B
#: is 0.0013.
LORA_TRAINABLE_SHARE = 0.001

# Pattern of the framework column -> plain name. The first that fits wins, so a stack comes before its libraries.
_FRAMEWORKS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"detectron2|mmdetection|maskrcnn-benchmark", "pytorch"),
        (r"simpledet", "mxnet"),
        (r"tensorpack", "tensorflow"),
        (r"megatron-bridge|nemo", "nemo"),
        (r"megatron-deepspeed|megatron-lm|megatron", "megatron"),
        (r"torchtitan", "torchtitan"),
        (r"deepspeed", "deepspeed"),
        (r"colossal", "colossalai"),
        (r"composer", "composer"),
        (r"hugectr|merlin", "hugectr"),
        (r"jax|pax", "jax"),
        (r"mxnet", "mxnet"),
        (r"oneflow", "oneflow"),
        (r"paddle", "paddlepaddle"),
        (r"mindspore", "mindspore"),
        (r"caffe2", "caffe2"),
        (r"tinygrad", "tinygrad"),
        (r"tensorflow|\btf[12]", "tensorflow"),
        (r"torch|dgl", "pytorch"),
    )
)

# The framework of NVIDIA's MLPerf submissions by benchmark, for rows that name several frameworks or none.
_MLPERF_FRAMEWORKS = {
    "resnet50_v1.5": "mxnet",
    "unet3d": "mxnet",
    "ssd-resnet34-300": "pytorch",
    "maskrcnn-r50-fpn": "pytorch",
    "retinanet-resnext50": "pytorch",
    "bert-large": "pytorch",
    "gnmt": "pytorch",
    "transformer-big": "pytorch",
    "dlrm": "hugectr",
    "dlrm-dcnv2": "hugectr",
    "gpt3-175b": "nemo",
    "llama2-70b-lora": "nemo",
    "llama3.1-8b": "nemo",
    "llama3.1-405b": "nemo",
}

# Days of release as fractions of a year, from the projects' release notes (from memory, not re-checked).
_RELEASES = {
    "torch": {
        "1.0": 2018.93, "1.1": 2019.33, "1.2": 2019.60, "1.3": 2019.77, "1.4": 2020.04, "1.5": 2020.30, "1.6": 2020.57,
        "1.7": 2020.82, "1.8": 2021.17, "1.9": 2021.45, "1.10": 2021.80, "1.11": 2022.19, "1.12": 2022.49,
        "1.13": 2022.82, "2.0": 2023.20, "2.1": 2023.76, "2.2": 2024.08, "2.3": 2024.31, "2.4": 2024.56,
        "2.5": 2024.79, "2.6": 2025.08, "2.7": 2025.31, "2.8": 2025.60,
    },
    "tensorflow": {"1.13": 2019.15, "1.14": 2019.47, "1.15": 2019.79, "2.0": 2019.75, "2.1": 2020.02, "2.2": 2020.35},
    "mxnet": {"1.5": 2019.53, "1.6": 2020.14, "1.7": 2020.65, "1.8": 2021.17},
}  # fmt: skip
_RELEASE = re.compile(r"(torch|tensorflow|mxnet)[- ]?v?([0-9]+\.[0-9]+)(?=$|[^0-9])")

# MLPerf Training: the month in which the results of a round came out (mlcommons.org; from memory, not re-checked).
_ROUNDS = {
    "v0.6": 2019.53, "v0.7": 2020.58, "v1.0": 2021.50, "v1.1": 2021.92, "v2.0": 2022.49, "v2.1": 2022.86,
    "v3.0": 2023.49, "v3.1": 2023.86, "v4.0": 2024.45, "v4.1": 2024.87, "v5.0": 2025.42, "v5.1": 2025.86,
}  # fmt: skip

# When a source that names neither container nor release measured (from memory, within a year).
_SOURCE_YEARS = {
    "NVIDIA/JAX-Toolbox": 2023.7,
    "NVIDIA/Megatron-LM": 2021.3,
    "NVIDIA/NeMo-Framework-Launcher": 2024.3,
    "NVIDIA/NeMo-Megatron-Launcher": 2022.9,
    "Oneflow-Inc/DLPerf": 2020.7,
    "PaddlePaddle/Perf": 2021.3,
    "bigscience-workshop/bigscience": 2021.8,
    "deepspeedai/DeepSpeed": 2020.4,
    "facebookresearch/Detectron": 2018.0,
    "facebookresearch/detectron2": 2019.9,
    "facebookresearch/maskrcnn-benchmark": 2018.8,
    "hpcaitech/ColossalAI": 2025.3,
    "kakaobrain/torchgpipe": 2019.6,
    "mosaicml/diffusion": 2023.3,
    "mosaicml/llm-foundry": 2023.6,
    "pytorch/torchtitan": 2024.8,
    "ryujaehun/pytorch-gpu-benchmark": 2020.3,
}

# NVIDIA's PyTorch containers by the build they print: release notes of the NGC PyTorch container, and public logs.
_BUILDS = {
    "a5b4d78": "20.01", "7036e91": "20.10", "df837d0": "21.03", "ecc3718": "21.07", "d0d6b1f": "22.10",
    "4136153": "23.06",
}  # fmt: skip

_TAG = r"((?:1[7-9]|2[0-9])\.(?:0[1-9]|1[0-2]))(?![0-9])"
_TAG_IN_FRAMEWORK = re.compile(r"(?<![0-9.])" + _TAG)
_TAG_IN_NOTES = re.compile(
    r"(?:\.nv|ngc[ -]?|container=|nemo |image=[^;]*:|framework_version_or_container=[^;]*?(?<![0-9.]))" + _TAG
)
_BUILD = re.compile(r"image=ngc pytorch [0-9.]+a0\+([0-9a-f]{7})")

_HALF = ("amp_fp16", "fp16", "amp_bf16", "bf16")

# (repository, part of a path or model, channels last in half precision, channels last in other precisions): the layout
# that the launch scripts of a source pass, read in the named repository.
_LAYOUTS: tuple[tuple[str, str, bool, bool], ...] = (
    ("NVIDIA/DeepLearningExamples", "MxNet/Classification/RN50v1.5", True, False),  # runner
    ("NVIDIA/DeepLearningExamples", "PaddlePaddle/Classification/RN50v1.5", True, False),  # scripts/training
    ("NVIDIA/DeepLearningExamples", "PyTorch/Classification/ConvNets/resn", True, False),  # configs.yml
    ("NVIDIA/DeepLearningExamples", "TensorFlow/Classification/ConvNets", False, False),  # utils/cmdline_helper.py
    ("lambdal/deeplearning-benchmark", "resnet50", False, False),  # scripts/config*: no --memory-format, NCHW
    ("mlcommons/", "resnet50_v1.5", True, True),  # v1.0, resnet/implementations/mxnet/run_and_time.sh
)

_NOT_COMPILED = re.compile(r"no (torch\.)?compile\b|without xla|w/?o xla|xla=0|without graph kernel fusion")
_COMPILER_NOT_STATED = re.compile(r"torch\.compile not told|xla not stated")
_COMPILED = re.compile(r"torch\.compile|with xla|xla on\b(?! for)|xla=1|(^|; )xla(;|$)|with graph kernel fusion")
_FLASH = re.compile(r"flash attention|minimal_flash")
_FUSED = re.compile(r"fused ?(adam|lamb)|\bapex\b|transformer engine|(^|; )te(;|$)|transformer kernel")
_FULL = re.compile(r"act(ivation)?[ _]c(heck)?p?(oin)?ting=(true|full)\b|act_ckpt=true|full (ac\b|activation checkp)")
_SELECTIVE = re.compile(r"activation checkpointing=selective|selective activation checkp|\bsac\b|minimal_flash remat")
_NO_CHECKPOINTS = re.compile(r"act(ivation)?[ _]checkpointing=(false|no\b|none)|act_ckpt=false")
_UNQUALIFIED = re.compile(r"activation checkpointing( on)?(;|$)|checkpointing in pipeline runs")

# torch.compile came with PyTorch 2.0 (March 2023), FlashAttention with its paper (May 2022).
_FIRST_COMPILE = 2023.2
_FIRST_FLASH = 2022.4

# Sources whose code runs flash attention: llm-foundry by its benchmark page ("our models use Flash Attention");
# torchtitan through PyTorch's scaled dot-product attention; NeMo and Megatron-Bridge of 2024 and later through the
# fused attention of Transformer Engine.
_FLASH_SOURCES = (
    "mosaicml/llm-foundry",
    "pytorch/torchtitan",
    "NVIDIA-NeMo/Megatron-Bridge",
    "NVIDIA/NeMo",
    "NVIDIA/NeMo-Framework-Launcher",
)

# (repository, part of a path): NVIDIA's PyTorch BERT, and the benchmark suite that runs it, step with Apex or with
# their own fused LAMB (PyTorch/LanguageModeling/BERT/lamb_amp_opt/fused_lamb).
_FUSED_SOURCES = (
    ("NVIDIA/DeepLearningExamples", "PyTorch/LanguageModeling/BERT"),
    ("lambdal/deeplearning-benchmark", "PyTorch_bert_"),
)


def name_framework(text: str, *, model: str = "", source_repo: str = "") -> str:
    """The plain name of the framework in ``text``; ``pytorch`` where it names none.

    A row of MLPerf that names several frameworks or none gets that of its benchmark's implementation.
    """
    folded = text.casefold()
    named = list(dict.fromkeys(name for pattern, name in _FRAMEWORKS if pattern.search(folded)))
    if source_repo.startswith("mlcommons/") and len(named) != 1:
        usual = _MLPERF_FRAMEWORKS.get(model, "pytorch")
        return usual if not named or usual in named else named[0]
    return named[0] if named else "pytorch"


def find_container(framework: str, notes: str) -> str:
    """The NGC container that a row names, as ``YY.MM``; blank without one."""
    folded = framework.casefold()
    tag = _TAG_IN_FRAMEWORK.search(folded)
    if tag is None:
        folded = notes.casefold()
        tag = _TAG_IN_NOTES.search(folded)
    if tag is not None:
        return tag.group(1)
    build = _BUILD.search(folded)
    return _BUILDS.get(build.group(1), "") if build else ""


def read_implementation(row: Mapping[str, str]) -> Implementation:
    """The facts in the text columns of one row; absent columns count as blank.

    The columns are ``framework model precision source_repo source_path flag notes``.
    """
    return _read(*(row.get(column, "") for column in _COLUMNS))


_COLUMNS = ("framework", "model", "precision", "source_repo", "source_path", "flag", "notes")


# Most rows differ from another one in figures alone, which are not read here.
@functools.lru_cache(maxsize=65536)
def _read(
    framework: str, model: str, precision: str, source_repo: str, source_path: str, flag: str, notes: str
) -> Implementation:
    folded = notes.casefold()
    name = name_framework(framework, model=model, source_repo=source_repo)
    year = _year(framework, notes, source_repo)
    tuned = source_repo.startswith("mlcommons/")
    flags = flag.split(",")
    adapter = "lora" in model.casefold() or "lora" in folded
    return Implementation(
        framework=name,
        software_year=year,
        channels_last=_layout(folded, model, precision, source_repo, source_path),
        compiled=_compiled(folded, name, year, tuned=tuned),
        checkpointing=_checkpointing(folded),
        flash_attention=_flash(folded, source_repo, year, tuned=tuned),
        fused_kernels=_fused(folded, name, source_repo, source_path, tuned=tuned),
        packed=True if "length_binned" in flags or (tuned and model.startswith("bert")) else None,
        trainable_share=LORA_TRAINABLE_SHARE if adapter else 1.0,
        tuned=tuned,
        optimizer_step="no_optimizer_step" not in flags,
        host_copy="host-to-device copy" in folded,
        evaluation_inside="eval_inside" in flags,
        startup_inside="startup_inside" in flags,
    )


def _year(framework: str, notes: str, source_repo: str) -> float | None:
    tag = find_container(framework, notes)
    if tag:
        # A container comes out at the end of its month.
        return round(2000 + int(tag[:2]) + int(tag[3:]) / 12, 2)
    for text in (framework.casefold(), notes.casefold()):
        for library, version in _RELEASE.findall(text):
            year = _RELEASES[library].get(version)
            if year is not None:
                return year
    return _ROUNDS.get(source_repo.rpartition("_")[2]) or _SOURCE_YEARS.get(source_repo)


def _layout(folded: str, model: str, precision: str, source_repo: str, source_path: str) -> bool | None:
    if "memory_format=" in folded:
        return "memory_format=channels_last" in folded or "memory_format=nhwc" in folded
    for repository, part, half, other in _LAYOUTS:
        if source_repo.startswith(repository) and (part in source_path or part == model):
            return half if precision in _HALF else other
    return None


def _compiled(folded: str, framework: str, year: float | None, *, tuned: bool) -> bool | None:
    if _COMPILER_NOT_STATED.search(folded):
        return None
    if _NOT_COMPILED.search(folded):
        return False
    if framework == "jax" or _COMPILED.search(folded) or ("xla on for tf" in folded and framework == "tensorflow"):
        return True
    # MLPerf code compiled parts of its models before that (TorchScript, CUDA graphs).
    if framework == "pytorch" and year is not None and year < _FIRST_COMPILE and not tuned:
        return False
    return None


def _checkpointing(folded: str) -> Checkpointing | None:
    if _SELECTIVE.search(folded):
        return "selective"
    if _NO_CHECKPOINTS.search(folded):
        return "none"
    if _FULL.search(folded) or _UNQUALIFIED.search(folded):
        return "full"
    return None


def _flash(folded: str, source_repo: str, year: float | None, *, tuned: bool) -> bool | None:
    if _FLASH.search(folded) or source_repo in _FLASH_SOURCES:
        return True
    # NVIDIA's MLPerf BERT has had its own fused attention since round 0.7 (implementations/pytorch/mha.py).
    return False if year is not None and year < _FIRST_FLASH and not tuned else None


def _fused(folded: str, framework: str, source_repo: str, source_path: str, *, tuned: bool) -> bool | None:
    # Megatron-LM ships fused softmax and layer-norm kernels, NeMo runs Transformer Engine or Apex.
    if tuned or framework in ("megatron", "nemo") or _FUSED.search(folded):
        return True
    return True if any(source_repo == repo and part in source_path for repo, part in _FUSED_SOURCES) else None
