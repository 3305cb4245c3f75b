"""Stand-ins of the face recognisers of InsightFace: an improved ResNet-100 and MobileFaceNet, with a wide head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.tasks.workloads import Workload
from precision_time.tasks.zoo.stand_ins.optimizers import make_workload

__all__ = ["build_face_mobilenet", "build_face_resnet100"]

#: People in the Emore set (MS1M-ArcFace).
PEOPLE = 85742
#: Margin and scale of ArcFace.
MARGIN, SCALE = 0.5, 64.0


class FaceHead(nn.Module):
    """Cosines between the feature and one direction per person."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.directions = nn.Parameter(0.01 * torch.randn(PEOPLE, width))

    def forward(self, feature: Tensor) -> Tensor:
        return F.linear(F.normalize(feature), F.normalize(self.directions))


class FaceResidual(nn.Module):
    """A residual block: norm first, PReLU between its convolutions, the stride in the second one."""

    def __init__(self, before: int, after: int, *, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(before), nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after),
            nn.PReLU(after), nn.Conv2d(after, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, image: Tensor) -> Tensor:
        changed: Tensor = self.body(image) + self.shortcut(image)
        return changed


def _activated(before: int, after: int, *, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after), nn.PReLU(after))


class DepthBlock(nn.Module):
    """Widens, convolves by depth and narrows; ``shortcut`` adds the input."""

    def __init__(self, before: int, inner: int, after: int, *, stride: int, shortcut: bool) -> None:
        super().__init__()
        self.shortcut = shortcut
        self.body = nn.Sequential(
            _activated(before, inner, kernel=1),
            _activated(inner, inner, kernel=3, stride=stride, groups=inner),
            nn.Conv2d(inner, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, image: Tensor) -> Tensor:
        changed: Tensor = self.body(image)
        return image + changed if self.shortcut else changed


def _recogniser(name: str, family: str, module: nn.Module) -> Workload:
    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        faces = torch.randn(samples, 3, 112, 112, device=device)
        return faces, torch.randint(PEOPLE, (samples,), device=device)

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        faces, people = batch
        cosines = module(faces).float().clamp(-0.999, 0.999)
        true_cosines = cosines.gather(1, people[:, None])
        logits = cosines.scatter(1, people[:, None], (true_cosines.acos() + MARGIN).cos())
        return F.cross_entropy(SCALE * logits, people)

    return make_workload(
        name, module, family=family, task_input="112", optimizer="sgd_momentum",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip


def build_face_resnet100() -> Workload:
    """InsightFace's improved ResNet-100; one sample is a face of 112 x 112 pixels.

    Keeps: the head over all people with the ArcFace margin. Leaves out:
    splitting of the head over GPUs. Sizes: deepinsight/insightface, recognition; 65.2 M parameters without the head
    (recalled, not re-checked).
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.PReLU(64)]
    before = 64
    for count, after in zip((3, 13, 30, 3), (64, 128, 256, 512), strict=True):
        for index in range(count):
            layers.append(FaceResidual(before, after, stride=1 if index else 2))
            before = after
    layers += [nn.BatchNorm2d(512), nn.Dropout(0.4), nn.Flatten(), nn.Linear(512 * 49, 512), nn.BatchNorm1d(512)]
    return _recogniser("insightface_resnet100", "resnet", nn.Sequential(*layers, FaceHead(512)))


def build_face_mobilenet() -> Workload:
    """MobileFaceNet; one sample is a face of 112 x 112 pixels.

    Keeps and leaves out the same as ``build_face_resnet100``. Sizes: the MobileFaceNets paper, which gives 0.99 M
    parameters for its network without the head.
    """
    layers: list[nn.Module] = [_activated(3, 64, kernel=3, stride=2), _activated(64, 64, kernel=3, groups=64)]
    before = 64
    stages = ((128, 64, 4, 128), (256, 128, 6, 256), (512, 128, 2, 256))
    for reducing, after, count, inner in stages:
        layers.append(DepthBlock(before, reducing, after, stride=2, shortcut=False))
        layers += [DepthBlock(after, inner, after, stride=1, shortcut=True) for _ in range(count)]
        before = after
    layers += [
        _activated(128, 512, kernel=1), nn.Conv2d(512, 512, 7, groups=512, bias=False), nn.BatchNorm2d(512),
        nn.Flatten(), nn.Linear(512, 128), nn.BatchNorm1d(128),
    ]  # fmt: skip
    return _recogniser("insightface_mobilefacenet", "mobilenet", nn.Sequential(*layers, FaceHead(128)))
