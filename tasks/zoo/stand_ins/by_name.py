"""Stand-ins by the names and inputs of the public table."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from precision_time.storage.errors import InputError, UnknownNameError
from precision_time.tasks.workloads import Workload
from precision_time.tasks.zoo.stand_ins.detection import build_ssd300_resnet34, build_ssd300_resnet50
from precision_time.tasks.zoo.stand_ins.faces import build_face_mobilenet, build_face_resnet100
from precision_time.tasks.zoo.stand_ins.forecasting import build_tft
from precision_time.tasks.zoo.stand_ins.recommendation import (
    build_dcnv2,
    build_dlrm,
    build_ncf,
    build_vae_cf,
    build_wide_and_deep,
)
from precision_time.tasks.zoo.stand_ins.recurrent import build_gnmt, build_rnnt, build_tacotron2
from precision_time.tasks.zoo.stand_ins.segmentation import (
    build_nnunet_2d,
    build_nnunet_3d,
    build_unet_3d,
    build_unet_industrial,
    build_unet_medical,
    build_vnet,
)
from precision_time.tasks.zoo.stand_ins.speech import build_fastpitch, build_jasper, build_quartznet
from precision_time.tasks.zoo.stand_ins.transformers import build_transformer_big, build_transformer_xl
from precision_time.tasks.zoo.stand_ins.vocoders import build_hifigan, build_waveglow

__all__ = ["STAND_INS", "build_stand_in", "stand_in_inputs"]

Build = Callable[[], Workload]

CRITEO, CRITEO_PLAIN = "Criteo 1TB, 13 dense + 26 categorical", "Criteo 1TB"
LJSPEECH, LIBRISPEECH = "LJSpeech, variable length", "LibriSpeech utterances, variable length"

#: Builders by name, each with its inputs as the table spells them; the first one is the usual input.
STAND_INS: dict[str, tuple[tuple[Build, tuple[str, ...]], ...]] = {
    "gnmt": ((build_gnmt, ("WMT16 en-de", "WMT16 en-de, variable length")),),
    "ssd300_resnet50": ((build_ssd300_resnet50, ("300", "300x300", "300x300 images")),),
    "ssd-resnet34-300": ((build_ssd300_resnet34, ("300", "300x300", "COCO 300x300")),),
    "tacotron2": ((build_tacotron2, (LJSPEECH,)),),
    "waveglow": ((build_waveglow, ("8000", "LJSpeech, segments of 8000 audio samples")),),
    "hifigan": ((build_hifigan, ("8192", "LJSpeech, segments of 8192 audio samples")),),
    "fastpitch": ((build_fastpitch, (LJSPEECH,)),),
    "jasper10x5": ((build_jasper, (LIBRISPEECH,)),),
    "quartznet15x5": ((build_quartznet, (LIBRISPEECH,)),),
    "rnnt": ((build_rnnt, ("LibriSpeech",)),),
    "transformerxl_base": ((build_transformer_xl, ("192", "WikiText-103, tgt_len 192, mem_len 192")),),
    "transformerxl_large": (
        (partial(build_transformer_xl, "large"), ("384", "WikiText-103, tgt_len 384, mem_len 384")),
    ),
    "transformer_big": ((build_transformer_big, ("one token",)),),
    "transformer-big": ((build_transformer_big, ("WMT17 en-de",)),),
    "transformer_big_wmt": ((build_transformer_big, ("WMT14 en-de, batch counted in tokens",)),),
    "ncf": ((build_ncf, ("ML-20M",)),),
    "ncf_ml20m": ((build_ncf, ("ML-20M",)),),
    "vae_cf": ((build_vae_cf, ("ML-20M user interaction vectors",)),),
    "wide_and_deep": ((build_wide_and_deep, ("Outbrain",)),),
    "dlrm": ((partial(build_dlrm, "mlperf"), (CRITEO_PLAIN,)),),
    "dlrm_small": ((partial(build_dlrm, "small"), (CRITEO,)),),
    "dlrm_large": ((partial(build_dlrm, "large"), (CRITEO,)),),
    "dlrm_xlarge": ((partial(build_dlrm, "xlarge"), (CRITEO,)),),
    "dlrm-dcnv2": ((partial(build_dcnv2, "mlperf_multi_hot", multi_hot=True), ("Criteo 1TB multi-hot",)),),
    "dcnv2_small": ((partial(build_dcnv2, "small"), (CRITEO,)),),
    "dcnv2_large": ((partial(build_dcnv2, "large"), (CRITEO,)),),
    "nnunet_2d": ((build_nnunet_2d, ("192x160", "Task01 BrainTumour 2D slices")),),
    "nnunet_3d": ((build_nnunet_3d, ("128x128x128", "Task01 BrainTumour 128x128x128 patches")),),
    "unet3d": (
        (partial(build_unet_3d, inputs=4, classes=4, optimizer="adam"), ("BraTS 128x128x128x4 volumes",)),
        (partial(build_unet_3d, inputs=1, classes=3, optimizer="sgd_momentum"), ("KiTS19 128x128x128",)),
    ),
    "unet2d_medical": ((build_unet_medical, ("572x572", "572x572x1 images")),),
    "unet_industrial": ((build_unet_industrial, ("512x512x1", "DAGM2007 512x512x1 images")),),
    "vnet": ((build_vnet, ("32x32x32", "Hippocampus 32x32x32 volumes")),),
    "insightface_resnet100": ((build_face_resnet100, ("112",)),),
    "insightface_mobilefacenet": ((build_face_mobilenet, ("112",)),),
    "tft_electricity": ((build_tft, ("168 history + 24 horizon steps",)),),
    "tft_traffic": ((partial(build_tft, series=963), ("168 history + 24 horizon steps",)),),
}


def stand_in_inputs(name: str) -> tuple[str, ...]:
    """The inputs of the stand-in ``name`` as the table or a card spells them, the usual one first.

    Raises ``UnknownNameError`` for a name without a stand-in.
    """
    if name not in STAND_INS:
        raise UnknownNameError("stand-in", name, STAND_INS)
    return tuple(task_input for _, inputs in STAND_INS[name] for task_input in inputs)


def build_stand_in(name: str, task_input: str = "") -> Workload:
    """The stand-in of the network ``name`` at one of ``stand_in_inputs(name)``, with random weights.

    The workload takes ``name`` and ``task_input`` for its own. Build it under ``torch.device("meta")`` to have shapes
    alone. Raises ``UnknownNameError`` for a name without a stand-in, ``InputError`` for an unlisted input.
    """
    known_inputs = stand_in_inputs(name)
    for build, inputs in STAND_INS[name]:
        if not task_input or task_input in inputs:
            workload = build()
            return replace(workload, name=name, task_input=task_input or workload.task_input)
    raise InputError(
        f"stand-in {name} does not have this input", got=task_input, expected="one of: " + "; ".join(known_inputs)
    )
