"""Networks of torchvision for classification, segmentation, video and optical flow."""

import functools
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from precision_time.tasks.zoo.libraries.torchvision_door import load_torchvision
from precision_time.tasks.zoo.network import Built, Network, build_light, classify, image_batches

__all__ = ["find_torchvision", "list_torchvision"]

SOURCE = "torchvision"

#: Quantised networks compute in int8 and cannot be trained; ``torchvision_detectors`` lists the detectors.
_LEFT_OUT = ("quantized_", "fasterrcnn", "maskrcnn", "keypointrcnn", "retinanet", "fcos", "ssd")
#: Sides of the images that torchvision's recipes train or evaluate on, where they are not 224.
_SIDES = {
    "inception_v3": 299, "efficientnet_b1": 240, "efficientnet_b2": 288, "efficientnet_b3": 300, "efficientnet_b4": 380,
    "efficientnet_b5": 456, "efficientnet_b6": 528, "efficientnet_b7": 600, "efficientnet_v2_s": 384,
    "efficientnet_v2_m": 480, "efficientnet_v2_l": 480, "vit_h_14": 224, "swin_v2_t": 256, "swin_v2_s": 256,
    "swin_v2_b": 256,
}  # fmt: skip
#: Crops of the segmentation recipe; clips [frames, height, width] of the video recipes.
_SEGMENTATION = ("deeplabv3_", "fcn_", "lraspp_")
_SEGMENTATION_SIDE = 480
_CLIPS = {
    "mc3_18": (16, 112, 112), "r2plus1d_18": (16, 112, 112), "r3d_18": (16, 112, 112), "s3d": (16, 224, 224),
    "mvit_v1_b": (16, 224, 224), "mvit_v2_s": (16, 224, 224), "swin3d_t": (16, 224, 224), "swin3d_s": (16, 224, 224),
    "swin3d_b": (16, 224, 224),
}  # fmt: skip
#: Networks that take the side of their images as an argument.
_SIZED = ("vit_",)


def list_torchvision() -> list[Network]:
    """Every architecture of the installed torchvision at its usual input, detectors and quantised ones left out."""
    names = load_torchvision().models.list_models()
    return [network for name in names if (network := find_torchvision(name)) is not None]


def find_torchvision(
    name: str, side: float | None = None, *, task_input: str = "", params: float | None = None
) -> Network | None:
    """The network called ``name`` for images of ``side`` pixels (its usual input); None for an unknown name."""
    torchvision = load_torchvision()
    if name not in torchvision.models.list_models() or name.startswith(_LEFT_OUT):
        return None
    options: dict[str, Any] = {}
    if name in _CLIPS:
        shape: tuple[int, ...] = (3, *_CLIPS[name])
    elif name.startswith("raft"):
        shape = (3, 368, 496)
    else:
        usual = _SEGMENTATION_SIDE if name.startswith(_SEGMENTATION) else _SIDES.get(name, 224)
        pixels = round(side) if side else usual
        shape = (3, pixels, pixels)
        if name.startswith(_SIZED) and pixels != 224:
            options["image_size"] = pixels
        if name.startswith(_SEGMENTATION):
            options |= {"weights_backbone": None, "num_classes": 21, "aux_loss": not name.startswith("lraspp")}
            if name.startswith("lraspp"):
                del options["aux_loss"]
        if name.startswith("mnasnet"):
            options["dropout"] = 0.0
    sides = "x".join(map(str, shape[1:]))
    arguments = ", ".join(f"{key}={value}" for key, value in options.items())
    return Network(
        name=name,
        task_input=task_input or (str(shape[1]) if shape[1:] == (shape[1],) * 2 else sides),
        source=SOURCE,
        builds=f"torchvision {metadata.version('torchvision').partition('+')[0]} {name}({arguments}) at 3x{sides}",
        build=functools.partial(_build, name, options, shape),
        params=params,
        tolerance=0.002,
    )


def _build(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> Built:
    torchvision = load_torchvision()
    if name in ("inception_v3", "googlenet"):
        # both warn of their slow initialisation unless it is chosen
        options = options | {"init_weights": False, "aux_logits": True}
    module: nn.Module = build_light(lambda: torchvision.models.get_model(name, weights=None, **options))
    if name.startswith("raft"):
        return Built(module=module, make_batch=_frame_pairs(*shape), loss_of=_flow_loss)
    return Built(module=module, make_batch=image_batches(*shape), loss_of=classify)


def _frame_pairs(*shape: int) -> Any:
    def make_batch(samples: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(samples, *shape), torch.zeros(samples, *shape)

    return make_batch


def _flow_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean flow, summed over the refinements; the true flow is zero."""
    return torch.stack([flow.abs().mean() for flow in module(*batch)]).sum()
