"""Detectors assembled from a backbone, a pyramid and heads over a fixed number of regions.

The libraries choose regions by values (non-maximum suppression, matching with the true boxes), which a walk of shapes
lacks. Here every image has as many regions as the recipe samples; suppression and matching are left out.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.tasks.zoo.libraries.torchvision_door import load_torchvision
from precision_time.tasks.zoo.network import Built, Network, build_light

__all__ = [
    "BOX_REGIONS",
    "COCO_SIZE",
    "MASK_REGIONS",
    "SOURCE",
    "Detector",
    "find_detector",
    "image_size",
    "list_detectors",
    "name_outputs",
    "name_proposals",
    "pool_regions",
    "sum_losses",
]

SOURCE = "assembled detector"

#: The mean COCO image with a short side of 800 pixels and a long side of at most 1333, padded to multiples of 32.
COCO_SIZE = (800, 1088)
#: Regions per image that the box head and the mask head are trained on. The mask head takes positive regions only: at
#: most a quarter of 512, about half of that in a batch.
BOX_REGIONS, MASK_REGIONS = 512, 64

_BACKBONES: dict[str, dict[str, Any]] = {
    "r18": {"layers": (2, 2, 2, 2), "basic": True},
    "r34": {"layers": (3, 4, 6, 3), "basic": True},
    "r50": {"layers": (3, 4, 6, 3)},
    "r101": {"layers": (3, 4, 23, 3)},
    "x50_32x4d": {"layers": (3, 4, 6, 3), "groups": 32, "width": 4},
    "x101_32x8d": {"layers": (3, 4, 23, 3), "groups": 32, "width": 8},
    "x101_64x4d": {"layers": (3, 4, 23, 3), "groups": 64, "width": 4},
    "x152_32x8d": {"layers": (3, 8, 36, 3), "groups": 32, "width": 8},
}
_HEADS = (
    "fasterrcnn", "maskrcnn", "keypointrcnn", "fastrcnn", "fast_maskrcnn", "fast_keypointrcnn", "cascade_maskrcnn",
    "panoptic", "rpn", "retinanet", "fcos",
)  # fmt: skip
_NAME = re.compile(rf"({'|'.join(_HEADS)})_({'|'.join(_BACKBONES)})_(fpn|c4|dc5)(?:_(dconv|gn))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """The parts of a detector; ``size`` is that of the image, [height, width] in pixels."""

    head: str
    backbone: str
    neck: str = "fpn"
    variant: str = ""
    size: tuple[int, int] = COCO_SIZE
    classes: int = 81
    anchors: int = 3


#: Detectors that their name does not describe: RetinaNet of MLPerf (OpenImages, 264 classes), SSD on a pyramid.
_SPECIAL = {
    "retinanet-resnext50": Detector(head="retinanet", backbone="x50_32x4d", size=(800, 800), classes=264, anchors=9),
    "ssd320_resnet50_fpn": Detector(head="retinanet", backbone="r50", size=(320, 320), classes=90, anchors=6),
}


def list_detectors() -> list[Network]:
    """Every assembled detector by its canonical name (``maskrcnn_r50_fpn``)."""
    names = [f"{head}_{backbone}_fpn" for head in _HEADS for backbone in _BACKBONES if backbone not in ("r18", "r34")]
    names += [
        f"{head}_{backbone}_{neck}"
        for head in ("fasterrcnn", "maskrcnn", "fastrcnn", "fast_maskrcnn", "rpn")
        for backbone in ("r50", "r101")
        for neck in ("c4", "dc5")
    ]
    names += ["maskrcnn_r50_fpn_dconv", "maskrcnn_r50_fpn_gn", "cascade_maskrcnn_r50_fpn_gn", *_SPECIAL]
    return [network for name in names if (network := find_detector(name)) is not None]


def find_detector(
    name: str, *, called: str = "", task_input: str = "", size: tuple[int, int] | None = None
) -> Network | None:
    """The detector of the canonical ``name``, listed as ``called``, for images of ``size`` [height, width] pixels."""
    detector = _SPECIAL.get(name)
    if detector is None:
        parts = _NAME.fullmatch(name)
        if parts is None:
            return None
        head, backbone, neck, variant = parts.groups(default="")
        detector = Detector(head=head, backbone=backbone, neck=neck, variant=variant)
        if head in ("retinanet", "fcos"):
            detector = replace(detector, anchors=9 if head == "retinanet" else 1, classes=80)
        if "keypoint" in head:
            detector = replace(detector, classes=2)
    if size is not None:
        detector = replace(detector, size=size)
    height, width = detector.size
    return Network(
        name=called or name,
        task_input=task_input or ("~800x1333" if detector.size == COCO_SIZE else f"{height}x{width}"),
        source=SOURCE,
        builds=f"{name} of torchvision {metadata.version('torchvision').partition('+')[0]} parts at {height}x{width},"
        f" {detector.classes} classes, {BOX_REGIONS} box and {MASK_REGIONS} mask or keypoint regions an image",
        build=functools.partial(build_detector, detector),
    )


def build_detector(detector: Detector) -> Built:
    """Assemble ``detector`` on the meta device."""
    load_torchvision()
    module = build_light(lambda: _Assembled(detector))
    height, width = detector.size

    def make_batch(samples: int) -> Tensor:
        return torch.zeros(samples, 3, height, width)

    return Built(module=module, make_batch=make_batch, loss_of=sum_losses)


def sum_losses(module: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of scores and logits and mean error of boxes, all against zero."""
    losses = []
    for name, scores in module(batch):
        if name == "scores":
            losses.append(F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device)))
        elif name == "logits":
            losses.append(F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores)))
        else:
            losses.append(F.smooth_l1_loss(scores, torch.zeros_like(scores)))
    return torch.stack(losses).sum()


def _resnet(detector: Detector) -> Any:
    """A ResNet as detectors train it: normalisation, stem and first stage are frozen (none of them with group norm)."""
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
    from torchvision.ops.misc import FrozenBatchNorm2d

    sizes = _BACKBONES[detector.backbone]
    norm: Callable[..., nn.Module] = FrozenBatchNorm2d
    if detector.variant == "gn":
        norm = functools.partial(nn.GroupNorm, 32)
    net: Any = ResNet(
        BasicBlock if sizes.get("basic") else Bottleneck,
        list(sizes["layers"]),
        groups=sizes.get("groups", 1),
        width_per_group=sizes.get("width", 64),
        norm_layer=norm,
        replace_stride_with_dilation=[False, False, detector.neck == "dc5"],
    )
    if detector.variant == "dconv":
        for stage in (net.layer2, net.layer3, net.layer4):
            for block in stage:
                block.conv2 = _Offset(block.conv2)
    if detector.variant != "gn":
        for part in (net.conv1, net.layer1):
            part.requires_grad_(False)
    return net


class _Offset(nn.Module):
    """A 3 x 3 convolution and the convolution for its offsets; sampling at the offsets is left out."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution
        self.offsets = nn.Conv2d(convolution.in_channels, 18, 3, stride=convolution.stride[0], padding=1)

    def forward(self, image: Tensor) -> Tensor:
        output: Tensor = self.convolution(image) + 0.0 * self.offsets(image).mean(1, keepdim=True)
        return output


class _Assembled(nn.Module):
    """Backbone, neck and heads; returns outputs, each after its kind: scores, logits or boxes."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        from torchvision.models._utils import IntermediateLayerGetter
        from torchvision.models.detection.fcos import FCOSHead
        from torchvision.models.detection.retinanet import RetinaNetHead
        from torchvision.models.detection.rpn import RPNHead
        from torchvision.ops import FeaturePyramidNetwork
        from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

        self.detector = detector
        head = detector.head
        net = _resnet(detector)
        widths = [256, 512, 1024, 2048]
        stages = {"fpn": (1, 2, 3, 4), "c4": (3,), "dc5": (4,)}[detector.neck]
        single_stage = head in ("retinanet", "fcos")
        if single_stage:
            stages = (2, 3, 4)
        self.last_stage: nn.Module | None = net.layer4 if detector.neck == "c4" else None
        self.body = IntermediateLayerGetter(net, {f"layer{stage}": str(stage) for stage in stages})
        width = widths[stages[-1] - 1]
        self.pyramid: nn.Module | None = None
        if detector.neck == "fpn":
            extra = LastLevelP6P7(256, 256) if single_stage else LastLevelMaxPool()
            self.pyramid = FeaturePyramidNetwork([widths[stage - 1] for stage in stages], 256, extra)
            width = 256
        self.dense: nn.Module | None = None
        if head == "retinanet":
            self.dense = RetinaNetHead(256, detector.anchors, detector.classes)
        elif head == "fcos":
            self.dense = FCOSHead(256, detector.anchors, detector.classes)
        self.proposals: nn.Module | None = None
        if not single_stage and not head.startswith("fast_") and head != "fastrcnn":
            self.proposals = RPNHead(width, detector.anchors if detector.neck == "fpn" else 15)
        self.box_heads = nn.ModuleList()
        self.mask_head: nn.Module | None = None
        self.segmentation: nn.Module | None = None
        if single_stage or head == "rpn":
            return
        rounds = 3 if head.startswith("cascade") else 1
        self.box_heads.extend(_BoxHead(detector, width) for _ in range(rounds))
        if "mask" in head or head == "panoptic":
            self.mask_head = _mask_head(width if detector.neck != "c4" else 2048, detector)
        elif "keypoint" in head:
            self.mask_head = _keypoint_head(width)
        if head == "panoptic":
            self.segmentation = _Segmentation(width)

    def forward(self, image: Tensor) -> list[tuple[str, Tensor]]:
        features = self.body(image)
        if self.pyramid is not None:
            features = self.pyramid(features)
        levels: list[Tensor] = list(features.values())
        if self.dense is not None:
            return name_outputs(self.dense(levels))
        outputs = [] if self.proposals is None else name_proposals(*self.proposals(levels))
        if not self.box_heads:
            return outputs
        if self.segmentation is not None:
            outputs.append(("scores", self.segmentation(levels)))
        side = 14 if self.last_stage is not None else 7
        shared: Tensor | None = None
        for head in self.box_heads:
            regions = pool_regions(levels, BOX_REGIONS, side)
            if self.last_stage is not None:
                shared = regions = self.last_stage(regions)
            scores, boxes = head(regions)
            outputs += [("scores", scores), ("boxes", boxes)]
        if self.mask_head is not None:
            if shared is not None:
                regions = shared[: len(image) * MASK_REGIONS]
            else:
                regions = pool_regions(levels, MASK_REGIONS, 14)
            outputs.append(("logits", self.mask_head(regions)))
        return outputs


def name_outputs(outputs: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The outputs of a dense head, each after its kind."""
    return [("boxes" if "bbox" in name else "logits", value) for name, value in outputs.items()]


def name_proposals(objectness: Sequence[Tensor], deltas: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """The outputs of a region proposal head, each after its kind."""
    return [("logits", value) for value in objectness] + [("boxes", value) for value in deltas]


def pool_regions(levels: Sequence[Tensor], regions: int, side: int) -> Tensor:
    """[B * regions, C, side, side]: one place of the finest level for each cell of each region of an image.

    A stand-in for RoIAlign, which mixes 16 places for a cell, most of them from a cache, and writes as many values.
    """
    finest = levels[0]
    count, channels = finest.shape[:2]
    rows = finest.permute(0, 2, 3, 1).reshape(-1, channels)
    places = torch.zeros(count * regions * side * side, dtype=torch.long, device=finest.device)
    return rows.index_select(0, places).view(-1, side, side, channels).permute(0, 3, 1, 2).contiguous()


class _BoxHead(nn.Module):
    def __init__(self, detector: Detector, width: int) -> None:
        super().__init__()
        from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

        self.pooled = detector.neck == "c4"
        if self.pooled:
            self.layers: nn.Module = nn.Identity()
            self.predictor = FastRCNNPredictor(2048, detector.classes)
            return
        if detector.variant == "gn":
            convolutions = [
                nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(32, width), nn.ReLU())
                for _ in range(4)
            ]
            self.layers = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(width * 49, 1024), nn.ReLU())
        else:
            self.layers = TwoMLPHead(width * 49, 1024)
        self.predictor = FastRCNNPredictor(1024, detector.classes)

    def forward(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        features = regions.mean((2, 3)) if self.pooled else self.layers(regions)
        scores, boxes = self.predictor(features)
        return scores, boxes


def _mask_head(width: int, detector: Detector) -> nn.Module:
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    if detector.neck == "c4":
        predictor: nn.Module = MaskRCNNPredictor(width, 256, detector.classes - 1)
        return predictor
    return nn.Sequential(MaskRCNNHeads(width, (256,) * 4, 1), MaskRCNNPredictor(256, 256, detector.classes - 1))


def _keypoint_head(width: int) -> nn.Module:
    from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor

    return nn.Sequential(KeypointRCNNHeads(width, (512,) * 8), KeypointRCNNPredictor(512, 17))


class _Segmentation(nn.Module):
    """The semantic branch of panoptic pyramids: every level enlarged to a quarter of the image, summed, 54 classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.paths = nn.ModuleList()
        for doublings in range(4):
            layers: list[nn.Module] = []
            for index in range(max(1, doublings)):
                layers += [
                    nn.Conv2d(width if not index else 128, 128, 3, padding=1, bias=False),
                    nn.GroupNorm(32, 128),
                    nn.ReLU(),
                ]
                if doublings:
                    layers.append(nn.Upsample(scale_factor=2.0, mode="bilinear"))
            self.paths.append(nn.Sequential(*layers))
        self.classes = nn.Conv2d(128, 54, 1)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        size = levels[0].shape[-2:]
        total = None
        for path, level in zip(self.paths, levels, strict=False):
            grown = path(level)
            grown = grown[..., : size[0], : size[1]]
            if grown.shape[-2:] != size:
                grown = F.interpolate(grown, size=size)
            total = grown if total is None else total + grown
        scores: Tensor = self.classes(total)
        return scores.permute(0, 2, 3, 1).reshape(-1, 54)


def image_size(task_input: str) -> tuple[int, int] | None:
    """Height and width in a text, rounded up to multiples of 32; None for none, and for COCO's images of many sizes."""
    size = re.search(r"(\d+)x(\d+)", task_input)
    if size is None or "1333" in task_input:
        return None
    return math.ceil(int(size[1]) / 32) * 32, math.ceil(int(size[2]) / 32) * 32
