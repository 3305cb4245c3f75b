"""Stand-ins of segmentation networks over images and volumes: the U-Nets, nnU-Net and V-Net."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.tasks.workloads import Workload
from precision_time.tasks.zoo.stand_ins.optimizers import make_workload

__all__ = [
    "build_nnunet_2d",
    "build_nnunet_3d",
    "build_unet_3d",
    "build_unet_industrial",
    "build_unet_medical",
    "build_vnet",
]

CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
INSTANCE_NORMS = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def _normed_pair(before: int, after: int, *, dimensions: int, stride: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, step in ((before, stride), (after, 1)):
        layers += [
            CONVOLUTIONS[dimensions](width, after, 3, step, padding=1, bias=False),
            INSTANCE_NORMS[dimensions](after, affine=True),
            nn.LeakyReLU(0.01),
        ]
    return nn.Sequential(*layers)


class NnUnet(nn.Module):
    """The U-Net of nnU-Net in 2 or 3 dimensions.

    Keeps: strided pairs of 3-wide convolutions with instance norm and leaky ReLU, transposed convolutions, full skips.
    Leaves out: deep supervision (outputs below the full size).
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/Segmentation/nnUNet; the same 3-D network is MLPerf's U-Net 3D and
    TensorFlow/Segmentation/UNet_3D_Medical's. About 31.2 M parameters in 3-D (recalled, not re-checked).
    """

    def __init__(self, filters: tuple[int, ...], *, inputs: int, classes: int, dimensions: int) -> None:
        super().__init__()
        widths = (inputs, *filters)
        self.down = nn.ModuleList(
            _normed_pair(before, after, dimensions=dimensions, stride=2 if index else 1)
            for index, (before, after) in enumerate(itertools.pairwise(widths))
        )
        pairs = list(zip(filters[::-1][:-1], filters[::-1][1:], strict=True))
        self.up = nn.ModuleList(TRANSPOSED[dimensions](before, after, 2, 2) for before, after in pairs)
        self.mix = nn.ModuleList(_normed_pair(2 * after, after, dimensions=dimensions, stride=1) for _, after in pairs)
        self.output = CONVOLUTIONS[dimensions](filters[0], classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            image = layer(image)
            skips.append(image)
        for up, mix, skip in zip(self.up, self.mix, skips[-2::-1], strict=True):
            image = mix(torch.cat([up(image), skip], dim=1))
        logits: Tensor = self.output(image)
        return logits


def score_regions(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy plus one minus the Dice overlap of each class. logits [B, C, ...], labels [B, ...] -> []."""
    classes = torch.arange(logits.shape[1], device=labels.device).view(-1, *[1] * (labels.dim() - 1))
    target = (labels.unsqueeze(1) == classes).to(logits.dtype)
    shares = logits.softmax(dim=1)
    places = tuple(range(2, logits.dim()))
    overlap = (shares * target).sum(dim=places)
    total = shares.sum(dim=places) + target.sum(dim=places)
    return F.cross_entropy(logits, labels) + 1 - ((2 * overlap + 1e-6) / (total + 1e-6)).mean()


def _segmenter(
    name: str,
    family: str,
    module: nn.Module,
    *,
    shape: tuple[int, ...],
    labels: tuple[int, ...],
    classes: int,
    optimizer: str,
    loss: Callable[[Tensor, Tensor], Tensor] = score_regions,
) -> Workload:
    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        image = torch.randn(samples, *shape, device=device)
        return image, torch.randint(classes, (samples, *labels), device=device)

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        image, labels = batch
        return loss(module(image), labels)

    return make_workload(
        name, module, family=family, task_input="x".join(map(str, shape[1:])), optimizer=optimizer,
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip


def build_nnunet_2d(*, sides: tuple[int, int] = (192, 160)) -> Workload:
    """nnU-Net over slices of brain tumours (4 modalities, 4 classes); one sample is a slice of ``sides``."""
    module = NnUnet((32, 64, 128, 256, 512, 512), inputs=4, classes=4, dimensions=2)
    return _segmenter("nnunet_2d", "unet", module, shape=(4, *sides), labels=sides, classes=4, optimizer="adam")


def build_nnunet_3d(*, side: int = 128) -> Workload:
    """nnU-Net over volumes of brain tumours (4 modalities, 4 classes); one sample is a cube of ``side`` voxels."""
    module = NnUnet((32, 64, 128, 256, 320, 320), inputs=4, classes=4, dimensions=3)
    return _segmenter("nnunet_3d", "unet", module, shape=(4, *[side] * 3), labels=(side,) * 3, classes=4,
                      optimizer="adam")  # fmt: skip


def build_unet_3d(*, inputs: int, classes: int, optimizer: str, side: int = 128) -> Workload:
    """U-Net 3D; one sample is a cube of ``side`` voxels with ``inputs`` modalities.

    KiTS19 has 1 modality and 3 classes, BraTS 4 and 4.
    """
    module = NnUnet((32, 64, 128, 256, 320, 320), inputs=inputs, classes=classes, dimensions=3)
    return _segmenter("unet3d", "unet", module, shape=(inputs, *[side] * 3), labels=(side,) * 3, classes=classes,
                      optimizer=optimizer)  # fmt: skip


def _plain_pair(before: int, after: int, *, padding: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=padding), nn.ReLU(), nn.Conv2d(after, after, 3, padding=padding), nn.ReLU()
    )


class MedicalUnet(nn.Module):
    """The U-Net of 2015: no norm, no padding, 572 pixels in and 388 out.

    Keeps: five levels of 64 to 1,024 channels, cropped skips. Leaves out: dropout.
    Sizes: NVIDIA/DeepLearningExamples, TensorFlow2/Segmentation/UNet_Medical; the U-Net paper's network has 31.0 M
    parameters with 2-wide transposed convolutions (recalled, not re-checked), these are 3-wide.
    """

    def __init__(self, *, filters: tuple[int, ...] = (64, 128, 256, 512, 1024), classes: int = 2) -> None:
        super().__init__()
        widths = (1, *filters)
        self.down = nn.ModuleList(_plain_pair(before, after, padding=0) for before, after in itertools.pairwise(widths))
        pairs = list(zip(filters[::-1][:-1], filters[::-1][1:], strict=True))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(before, after, 3, 2, padding=1, output_padding=1) for before, after in pairs
        )
        self.mix = nn.ModuleList(_plain_pair(2 * after, after, padding=0) for _, after in pairs)
        self.output = nn.Conv2d(filters[0], classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = []
        for index, layer in enumerate(self.down):
            image = layer(F.max_pool2d(image, 2) if index else image)
            skips.append(image)
        for up, mix, skip in zip(self.up, self.mix, skips[-2::-1], strict=True):
            image = up(image)
            edge = (skip.shape[2] - image.shape[2]) // 2
            image = mix(torch.cat([image, skip[:, :, edge : edge + image.shape[2], edge : edge + image.shape[3]]], 1))
        logits: Tensor = self.output(image)
        return logits


def build_unet_medical() -> Workload:
    """U-Net (2015); one sample is a grey image of 572 x 572 pixels, of which 388 x 388 are labelled."""
    return _segmenter("unet2d_medical", "unet", MedicalUnet(), shape=(1, 572, 572), labels=(388, 388), classes=2,
                      optimizer="adam")  # fmt: skip


class IndustrialUnet(nn.Module):
    """A small U-Net that finds faults on surfaces.

    Keeps: four levels of 32 to 256 channels, a sigmoid output. Leaves out: augmentation.
    Sizes: the tiny U-Net of NVIDIA/DeepLearningExamples, TensorFlow/Segmentation/UNet_Industrial, whose README gives
    1,824,945 parameters (this one: 1.4 % more).
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            _plain_pair(before, after, padding=1) for before, after in ((1, 32), (32, 32), (32, 64), (64, 128))
        )
        self.bottom = nn.Sequential(*_plain_pair(128, 256, padding=1), nn.ConvTranspose2d(256, 128, 2, 2), nn.ReLU())
        self.up = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(),
                nn.Conv2d(width, width // 2, 3, padding=1), nn.ReLU(),
                nn.ConvTranspose2d(width // 2, width // 2, 2, 2), nn.ReLU(),
            )
            for width in (128, 64, 32)
        )  # fmt: skip
        self.output = nn.Sequential(_plain_pair(48, 32, padding=1), nn.Conv2d(32, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            image = layer(image)
            skips.append(image)
            image = F.max_pool2d(image, 2)
        image = self.bottom(image)
        for layer in self.up:
            image = layer(torch.cat([image, skips.pop()], dim=1))
        logits: Tensor = self.output(torch.cat([image, skips.pop()], dim=1))
        return logits


def _score_faults(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.to(logits.dtype))


def build_unet_industrial() -> Workload:
    """The industrial U-Net; one sample is a grey image of 512 x 512 pixels."""
    return _segmenter("unet_industrial", "unet", IndustrialUnet(), shape=(1, 512, 512), labels=(512, 512), classes=2,
                      optimizer="rmsprop", loss=_score_faults)  # fmt: skip


def _volume_layer(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(before, after, 3, padding=1), nn.BatchNorm3d(after), nn.ReLU())


class VolumeResidual(nn.Module):
    """``count`` 3-D convolutions with a shortcut around them all."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(_volume_layer(width, width) for _ in range(count)))

    def forward(self, volume: Tensor) -> Tensor:
        changed: Tensor = self.body(volume) + volume
        return changed


class Vnet(nn.Module):
    """V-Net with three levels down and two residual levels up.

    Keeps: residual blocks, strided and transposed convolutions with batch norm. Leaves out: nothing that is trained.
    Sizes: defaults of NVIDIA/DeepLearningExamples, TensorFlow/Segmentation/VNet, which gives no parameter count.
    """

    def __init__(self, *, down: tuple[int, ...] = (3, 3, 3), up: tuple[int, ...] = (3, 3), classes: int = 3) -> None:
        super().__init__()
        self.first = _volume_layer(1, 16)
        width = 16
        self.down = nn.ModuleList()
        for count in down:
            half = nn.Sequential(nn.Conv3d(width, 2 * width, 2, 2), nn.BatchNorm3d(2 * width), nn.ReLU())
            self.down.append(nn.Sequential(half, VolumeResidual(2 * width, count)))
            width *= 2
        self.up, self.mix = nn.ModuleList(), nn.ModuleList()
        for index, count in enumerate(up):
            skip = 16 * 2 ** (len(down) - 1 - index)
            self.up.append(nn.Sequential(nn.ConvTranspose3d(width, skip, 2, 2), nn.BatchNorm3d(skip), nn.ReLU()))
            self.mix.append(VolumeResidual(2 * skip, count))
            width = 2 * skip
        self.output = nn.Sequential(
            nn.ConvTranspose3d(width, 16, 2, 2), nn.BatchNorm3d(16), nn.ReLU(), nn.Conv3d(16, classes, 3, padding=1)
        )

    def forward(self, volume: Tensor) -> Tensor:
        volume = self.first(volume) + volume
        skips = [volume]
        for layer in self.down:
            volume = layer(volume)
            skips.append(volume)
        for up, mix, skip in zip(self.up, self.mix, skips[-2::-1], strict=False):
            volume = mix(torch.cat([up(volume), skip], dim=1))
        logits: Tensor = self.output(volume)
        return logits


def build_vnet(*, side: int = 32) -> Workload:
    """V-Net; one sample is a cube of ``side`` voxels."""
    return _segmenter("vnet", "vnet", Vnet(), shape=(1, *[side] * 3), labels=(side,) * 3, classes=3,
                      optimizer="rmsprop")  # fmt: skip
