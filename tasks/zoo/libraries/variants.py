"""Variants of library networks that the public table measures and no library lists, rebuilt from their sizes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.tasks.zoo.libraries.torchvision_door import load_timm, load_torchvision
from precision_time.tasks.zoo.network import CLASSES, Built, build_light, classify, image_batches

__all__ = ["VARIANTS", "Variant", "build_variant"]

#: Classes of Cityscapes; its recipes train on crops of 512 x 1024.
_STREET_CLASSES = 19


class Variant(NamedTuple):
    """The network, the name of its input in the zoo, the images [C, H, W], the published parameters, and the maker."""

    network: str
    task_input: str
    shape: tuple[int, ...]
    params: float | None
    make: Callable[[], nn.Module]


def build_variant(name: str) -> Built:
    """The variant called ``name`` on the meta device."""
    load_torchvision()
    variant = VARIANTS[name]
    return Built(module=build_light(variant.make), make_batch=image_batches(*variant.shape), loss_of=classify)


def _wide_squeeze(name: str) -> nn.Module:
    """EfficientNet whose squeezes keep a quarter of the expanded channels (NVIDIA/DeepLearningExamples, WideSE)."""
    timm = load_timm()
    from timm.layers import SqueezeExcite

    def squeeze(channels: int, rd_ratio: float = 0.25, **options: Any) -> nn.Module:
        options.pop("rd_channels", None)
        layer: nn.Module = SqueezeExcite(channels, rd_channels=max(1, channels // 4), **options)
        return layer

    module: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, se_layer=squeeze)
    return module


def _resnext152() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    module: nn.Module = ResNet(Bottleneck, [3, 8, 36, 3], groups=32, width_per_group=4)
    return module


def _layer(before: int, after: int, *, kernel: int, groups: int = 1) -> nn.Module:
    convolution = nn.Conv2d(before, after, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


class _StreetDecoder(nn.Module):
    """DeepLabv3+ on ResNet-50 with an output stride of 16: a pyramid of dilations, then a decoder at a quarter."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet50
        from torchvision.models._utils import IntermediateLayerGetter
        from torchvision.models.segmentation.deeplabv3 import ASPP

        body = resnet50(replace_stride_with_dilation=[False, False, True])
        self.body = IntermediateLayerGetter(body, {"layer1": "fine", "layer4": "coarse"})
        self.pyramid = ASPP(2048, [6, 12, 18], 256)
        self.fine = _layer(256, 48, kernel=1)
        self.mix = nn.Sequential(
            _layer(304, 304, kernel=3, groups=304),
            _layer(304, 256, kernel=1),
            _layer(256, 256, kernel=3, groups=256),
            _layer(256, 256, kernel=1),
            nn.Conv2d(256, _STREET_CLASSES, 1),
        )

    def forward(self, image: Tensor) -> Tensor:
        features = self.body(image)
        fine = self.fine(features["fine"])
        coarse = F.interpolate(self.pyramid(features["coarse"]), size=fine.shape[-2:], mode="bilinear")
        scores: Tensor = self.mix(torch.cat([coarse, fine], dim=1))
        return F.interpolate(scores, size=image.shape[-2:], mode="bilinear")


class _StreetBranches(nn.Module):
    """HRNet-W18 with a segmentation head on its four branches, joined at a quarter of the crop."""

    def __init__(self) -> None:
        super().__init__()
        self.net = load_timm().create_model("hrnet_w18", pretrained=False)
        for unused in ("incre_modules", "downsamp_modules", "final_layer", "classifier"):
            setattr(self.net, unused, None)
        self.mix = nn.Sequential(_layer(270, 270, kernel=1), nn.Conv2d(270, _STREET_CLASSES, 1))

    def forward(self, image: Tensor) -> Tensor:
        net = self.net
        branches = net.stages(net.act2(net.bn2(net.conv2(net.act1(net.bn1(net.conv1(image)))))))
        size = branches[0].shape[-2:]
        joined = torch.cat([F.interpolate(part, size=size, mode="bilinear") for part in branches], dim=1)
        scores: Tensor = self.mix(joined)
        return F.interpolate(scores, size=image.shape[-2:], mode="bilinear")


VARIANTS: dict[str, Variant] = {
    "efficientnet_widese_b0": Variant(
        "efficientnet_widese_b0", "224", (3, 224, 224), 8_423_848, functools.partial(_wide_squeeze, "efficientnet_b0")
    ),
    "efficientnet_widese_b4": Variant(
        "efficientnet_widese_b4", "380", (3, 380, 380), 34_927_246, functools.partial(_wide_squeeze, "efficientnet_b4")
    ),
    "resnext-152": Variant("resnext152_32x4d", "224", (3, 224, 224), 59_951_400, _resnext152),
    "resnext152_32x4d": Variant("resnext152_32x4d", "224", (3, 224, 224), 59_951_400, _resnext152),
    "deeplabv3p_resnet50": Variant("deeplabv3p_resnet50", "512x1024", (3, 512, 1024), None, _StreetDecoder),
    "hrnet_w18_seg": Variant("hrnet_w18_seg", "512x1024", (3, 512, 1024), None, _StreetBranches),
}
