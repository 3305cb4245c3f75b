"""Facts about the code behind rows of the public table, source by source."""

import pytest

from precision_time.predictor.rows.implementation_facts import (
    LORA_TRAINABLE_SHARE,
    find_container,
    name_framework,
    read_implementation,
)

TIMM = "huggingface/pytorch-image-models"
DLE = "NVIDIA/DeepLearningExamples"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"notes": "pt112 cu113; memory_format=nchw; no torch.compile"}, {"channels_last": False, "compiled": False}),
        ({"notes": "memory_format=channels_last"}, {"channels_last": True}),
        ({"source_repo": DLE, "source_path": "MxNet/Classification/RN50v1.5/README.md", "precision": "amp_fp16"},
         {"channels_last": True}),
        ({"source_repo": DLE, "source_path": "MxNet/Classification/RN50v1.5/README.md", "precision": "fp32"},
         {"channels_last": False}),
        ({"source_repo": "lambdal/deeplearning-benchmark", "model": "resnet50"}, {"channels_last": False}),
        ({"notes": "headings: BERT-Base FP16 / batch size=160 & without xla"}, {"compiled": False}),
        ({"notes": "headings: W/O XLA & W/O clip"}, {"compiled": False}),
        ({"notes": "line 297; headings: with xla"}, {"compiled": True}),
        ({"notes": "dimension 3; xla=1; throughput=96"}, {"compiled": True}),
        ({"notes": "batch size=64 & without Graph Kernel Fusion", "framework": "mindspore"}, {"compiled": False}),
        ({"notes": "XLA on for TF", "framework": "tensorflow1-ngc"}, {"compiled": True}),
        ({"notes": "XLA on for TF", "framework": "mxnet-ngc"}, {"compiled": None}),
        ({"notes": "torch.compile; full AC", "framework": "torchtitan"}, {"compiled": True, "checkpointing": "full"}),
        ({"notes": "no compile; selective activation checkpointing", "framework": "torchtitan"},
         {"compiled": False, "checkpointing": "selective"}),
        ({"notes": "torch.compile not told; activation checkpointing=no"}, {"compiled": None, "checkpointing": "none"}),
        ({"framework": "pytorch-1.6"}, {"compiled": False, "flash_attention": False, "software_year": 2020.57}),
        ({"framework": "jax-pax", "notes": "GPT pretraining; Transformer Engine; XLA"},
         {"compiled": True, "fused_kernels": True}),
        ({"notes": "act_ckpt=True; act_cpu_offload=False"}, {"checkpointing": "full"}),
        ({"notes": "act_ckpt=False"}, {"checkpointing": "none"}),
        ({"notes": "activation_checkpointing=False; gbs=512"}, {"checkpointing": "none"}),
        ({"notes": "hidden=16384; activation checkpointing; TFLOPs=39"}, {"checkpointing": "full"}),
        ({"notes": "activation checkpointing=selective op; FSDP2"}, {"checkpointing": "selective"}),
        ({"notes": "fp8 rowwise; per-op SAC"}, {"checkpointing": "selective"}),
        ({"notes": "step time table; flash attention; minimal_flash remat"},
         {"flash_attention": True, "checkpointing": "selective"}),
        ({"notes": "FusedAdam, APEX"}, {"fused_kernels": True}),
        ({"notes": "micro batch as printed; DeepSpeed transformer kernel"}, {"fused_kernels": True}),
        ({"notes": "fwd+bwd incl. host-to-device copy, no optimizer step", "flag": "no_optimizer_step"},
         {"host_copy": True, "optimizer_step": False}),
        ({"flag": "eval_inside,startup_inside"}, {"evaluation_inside": True, "startup_inside": True}),
        ({"flag": "length_binned"}, {"packed": True}),
        ({"source_repo": "mlcommons/training_results_v3.0", "model": "bert-large"},
         {"packed": True, "tuned": True, "fused_kernels": True, "software_year": 2023.49}),
        ({"model": "llama2_7b_lora"}, {"trainable_share": LORA_TRAINABLE_SHARE}),
        ({"notes": "LoRA: most weights frozen"}, {"trainable_share": LORA_TRAINABLE_SHARE}),
        ({}, {"framework": "pytorch", "software_year": None, "channels_last": None, "compiled": None,
              "checkpointing": None, "flash_attention": None, "fused_kernels": None, "packed": None,
              "trainable_share": 1.0, "tuned": False, "optimizer_step": True, "host_copy": False}),
    ],
)  # fmt: skip
def test_facts_are_read_from_the_text_columns_of_a_row(row: dict[str, str], expected: dict[str, object]) -> None:
    read = read_implementation(row)
    assert {name: getattr(read, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("framework", "notes", "tag"),
    [
        ("NGC MXNet 22.05 , NGC PyTorch 22.05", "", "22.05"),
        ("PyTorch NGC20.06", "", "20.06"),
        ("pytorch", "system=H100; image=NGC pytorch 2.3.0a0+40ec155e58.nv24.03; throughput=21.05", "24.03"),
        ("pytorch", "image=NGC pytorch 1.4.0a0+a5b4d78", "20.01"),
        ("megatron-bridge", "line 275; container=26.04.01 NeMo Container", "26.04"),
        ("tensorflow", "framework_version_or_container=TensorFlow 20.06-tf1-py3; throughput=10.67", "20.06"),
        ("nemo", "line 41; NeMo 24.07/24.09 docs revision 3a", "24.07"),
        ("pytorch-1.12", "throughput=20.06 images/s", ""),
        ("LLMBoost 1.2.0", "", ""),
        ("CUDA 12.0", "", ""),
    ],
)
def test_containers_are_found_and_figures_are_not_taken_for_one(framework: str, notes: str, tag: str) -> None:
    assert find_container(framework, notes) == tag


@pytest.mark.parametrize(
    ("text", "model", "source", "name"),
    [
        ("tf2", "", "", "tensorflow"),
        ("megatron-deepspeed", "", "", "megatron"),
        ("nemo-megatron", "", "", "nemo"),
        ("deepspeed", "", "", "deepspeed"),
        ("simpledet-mxnet", "", "", "mxnet"),
        ("pytorch-composer", "", "", "composer"),
        ("NGC MXNet 22.09 , NGC PyTorch 22.09 , NGC TensorFlow 22.09-tf1", "resnet50_v1.5", "mlcommons/x", "mxnet"),
        ("NGC MXNet 22.09 , NGC PyTorch 22.09 , NGC TensorFlow 22.09-tf1", "bert-large", "mlcommons/x", "pytorch"),
        ("CUDA 12.0", "dlrm", "mlcommons/x", "hugectr"),
        ("PyTorch NVIDIA Release 23.04", "dlrm", "mlcommons/x", "pytorch"),
        ("", "", "", "pytorch"),
    ],
)
def test_frameworks_have_one_plain_name(text: str, model: str, source: str, name: str) -> None:
    assert name_framework(text, model=model, source_repo=source) == name


def test_a_container_dates_the_software_before_anything_else() -> None:
    assert read_implementation({"framework": "pytorch", "notes": "container=24.06"}).software_year == 2024.5
    assert read_implementation({"source_repo": TIMM, "framework": "pytorch-1.10"}).software_year == 2021.8
