"""torchvision's detectors under its own names: their parts over a fixed number of regions (see ``detectors``)."""

import functools
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from precision_time.storage.errors import InputError
from precision_time.tasks.zoo.libraries.detectors import (
    BOX_REGIONS,
    COCO_SIZE,
    MASK_REGIONS,
    SOURCE,
    find_detector,
    name_outputs,
    name_proposals,
    pool_regions,
    sum_losses,
)
from precision_time.tasks.zoo.libraries.torchvision_door import load_torchvision
from precision_time.tasks.zoo.network import Built, Network, build_light

__all__ = ["list_torchvision_detectors"]


def list_torchvision_detectors() -> list[Network]:
    """torchvision's detectors under its own names."""
    version = metadata.version("torchvision").partition("+")[0]
    assembled = {
        "fasterrcnn_resnet50_fpn": "fasterrcnn_r50_fpn",
        "maskrcnn_resnet50_fpn": "maskrcnn_r50_fpn",
        "keypointrcnn_resnet50_fpn": "keypointrcnn_r50_fpn",
        "retinanet_resnet50_fpn": "retinanet_r50_fpn",
        "fcos_resnet50_fpn": "fcos_r50_fpn",
    }
    networks = [find_detector(canonical, called=name) for name, canonical in assembled.items()]
    sizes = {
        "fasterrcnn_mobilenet_v3_large_fpn": COCO_SIZE,
        "fasterrcnn_mobilenet_v3_large_320_fpn": (320, 448),
        "ssd300_vgg16": (300, 300),
        "ssdlite320_mobilenet_v3_large": (320, 320),
        "retinanet_resnet50_fpn_v2": COCO_SIZE,
        "fasterrcnn_resnet50_fpn_v2": COCO_SIZE,
        "maskrcnn_resnet50_fpn_v2": COCO_SIZE,
    }
    networks += [
        Network(
            name=name,
            task_input="~800x1333" if size == COCO_SIZE else f"{size[0]}x{size[1]}",
            source=SOURCE,
            builds=f"parts of torchvision {version} {name} at {size[0]}x{size[1]}, {BOX_REGIONS} box regions an image",
            build=functools.partial(_build_own, name, size),
        )
        for name, size in sizes.items()
    ]
    return [network for network in networks if network is not None]


def _build_own(name: str, size: tuple[int, int]) -> Built:
    torchvision = load_torchvision()
    whole = build_light(lambda: torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=91))
    return Built(
        module=_Parts(whole),
        make_batch=lambda samples: torch.zeros(samples, 3, *size),
        loss_of=sum_losses,
    )


class _Parts(nn.Module):
    """A detector of torchvision without its transform, its anchors and its choice of regions."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.backbone = whole.backbone
        self.rpn_head = whole.rpn.head if hasattr(whole, "rpn") else None
        self.heads = whole.roi_heads if hasattr(whole, "roi_heads") else None
        self.head = getattr(whole, "head", None)

    def forward(self, image: Tensor) -> list[tuple[str, Tensor]]:
        features = self.backbone(image)
        levels = [features] if isinstance(features, Tensor) else list(features.values())
        if self.head is not None:
            return name_outputs(self.head(levels))
        if self.rpn_head is None or self.heads is None:
            raise InputError("the detector has no heads", got=type(self).__name__, expected="a head or region heads")
        outputs = name_proposals(*self.rpn_head(levels))
        scores, boxes = self.heads.box_predictor(self.heads.box_head(pool_regions(levels, BOX_REGIONS, 7)))
        outputs += [("scores", scores), ("boxes", boxes)]
        if self.heads.mask_head is not None:
            masks = self.heads.mask_predictor(self.heads.mask_head(pool_regions(levels, MASK_REGIONS, 14)))
            outputs.append(("logits", masks))
        return outputs
