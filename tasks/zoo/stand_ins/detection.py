"""Stand-ins of the single-shot detectors SSD300 on ResNet-50 and on ResNet-34."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.tasks.workloads import Residual, Workload
from precision_time.tasks.zoo.stand_ins.optimizers import make_workload

__all__ = ["build_ssd300_resnet34", "build_ssd300_resnet50"]

CLASSES = 81
SIDE = 300
#: Sides of the six feature maps, which hold 8,732 boxes in all.
GRIDS = (38, 19, 10, 5, 3, 1)
#: Boxes at each place of the six maps, and the sides of the square boxes in pixels (SSD paper, COCO settings).
BOXES_PER_PLACE = (4, 6, 6, 6, 4, 4)
BOX_SIDES = (21, 45, 99, 153, 207, 261, 315)
#: Negative boxes in the loss for each positive box.
NEGATIVES = 3


def make_anchors(grids: tuple[int, ...]) -> Tensor:
    """The fixed boxes of all maps (SSD paper): [4, boxes], centre x and y, width and height in shares of the image."""
    boxes: list[tuple[float, float, float, float]] = []
    for grid, count, side, larger in zip(grids, BOXES_PER_PLACE, BOX_SIDES[:-1], BOX_SIDES[1:], strict=True):
        small, middle = side / SIDE, (side * larger) ** 0.5 / SIDE
        shapes = [(small, small), (middle, middle)]
        for ratio in (2, 3)[: count // 2 - 1]:
            wide, high = small * ratio**0.5, small / ratio**0.5
            shapes += [(wide, high), (high, wide)]
        for row, column in itertools.product(range(grid), repeat=2):
            boxes += [((column + 0.5) / grid, (row + 0.5) / grid, wide, high) for wide, high in shapes]
    return torch.tensor(boxes).t().contiguous()


class Ssd(nn.Module):
    """SSD300: a ResNet cut after its third stage, kept at 38 x 38, five extra maps, heads on all six.

    Keeps: 8,732 boxes, 81 classes, a convolution for places and one for classes at each map.
    Leaves out: matching of boxes to objects on the host; the batch holds the assignment.
    """

    anchors: Tensor

    def __init__(self, backbone: nn.Module, *, widths: tuple[int, ...], middles: tuple[int, ...], norm: bool) -> None:
        super().__init__()
        self.backbone = backbone
        self.extras = nn.ModuleList()
        for index, (before, middle, after) in enumerate(zip(widths[:-1], middles, widths[1:], strict=True)):
            halved = index < len(middles) - 2
            first = nn.Conv2d(before, middle, 1, bias=not norm)
            second = nn.Conv2d(middle, after, 3, 1 + halved, padding=int(halved), bias=not norm)
            layers: list[nn.Module] = []
            for layer, width in ((first, middle), (second, after)):
                layers += [layer, nn.BatchNorm2d(width), nn.ReLU()] if norm else [layer, nn.ReLU()]
            self.extras.append(nn.Sequential(*layers))
        self.places, self.classes = (
            nn.ModuleList(
                nn.Conv2d(width, count * values, 3, padding=1)
                for width, count in zip(widths, BOXES_PER_PLACE, strict=True)
            )
            for values in (4, CLASSES)
        )
        self.register_buffer("anchors", make_anchors(GRIDS), persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """images [B, 3, 300, 300] -> places [B, 4, boxes], class logits [B, 81, boxes], anchors [4, boxes]."""
        maps = [self.backbone(images)]
        for extra in self.extras:
            maps.append(extra(maps[-1]))
        places, classes = (
            torch.cat([head(level).view(len(images), values, -1) for head, level in zip(heads, maps, strict=True)], 2)
            for heads, values in ((self.places, 4), (self.classes, CLASSES))
        )
        return places, classes, self.anchors


def score_boxes(outputs: tuple[Tensor, Tensor, Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
    """The multibox loss with the hardest negatives, which two sorts find.

    boxes [B, 4, A] and labels [B, A] (0 = background) assign an object to each anchor.
    """
    places, classes, anchors = outputs
    target = torch.cat([10 * (boxes[:, :2] - anchors[:2]) / anchors[2:], 5 * (boxes[:, 2:] / anchors[2:]).log()], dim=1)
    positive = labels > 0
    count = positive.sum(dim=1)
    place_loss = (F.smooth_l1_loss(places, target, reduction="none").sum(dim=1) * positive).sum(dim=1)
    class_loss = F.cross_entropy(classes, labels, reduction="none")
    rank = class_loss.masked_fill(positive, 0.0).sort(dim=1, descending=True)[1].sort(dim=1)[1]
    hard = rank < (NEGATIVES * count).clamp(max=labels.shape[1]).unsqueeze(1)
    total = place_loss + (class_loss * (positive.float() + hard.float())).sum(dim=1)
    return (total / count.clamp(min=1)).mean()


def _cut_resnet(blocks: tuple[int, int, int], *, bottleneck: bool) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]  # fmt: skip
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for index in range(count):
            stride = 2 if stage == 1 and not index else 1
            layers.append(Residual(channels, width, stride=stride, bottleneck=bottleneck))
            channels = 4 * width if bottleneck else width
    return nn.Sequential(*layers)


def _detector(name: str, module: nn.Module) -> Workload:
    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        count = sum(boxes * grid**2 for boxes, grid in zip(BOXES_PER_PLACE, GRIDS, strict=True))
        centres = torch.rand(samples, 2, count, device=device)
        boxes = torch.cat([centres, 0.05 + 0.5 * torch.rand(samples, 2, count, device=device)], dim=1)
        labels = torch.randint(CLASSES, (samples, count), device=device)
        # About one box in a hundred is assigned to an object.
        labels = labels * (torch.rand(samples, count, device=device) < 0.01)
        return torch.randn(samples, 3, SIDE, SIDE, device=device), boxes, labels

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, boxes, labels = batch
        return score_boxes(module(images), boxes, labels)

    return make_workload(
        name, module, family="ssd", task_input=str(SIDE), optimizer="sgd_momentum",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip


def build_ssd300_resnet50() -> Workload:
    """SSD300 on ResNet-50 as NVIDIA/DeepLearningExamples (PyTorch/Detection/SSD) lays it out; one sample is an image.

    Its README gives no parameter count: 22.89 M by counting the network built from torchvision's ResNet-50.
    """
    module = Ssd(
        _cut_resnet((3, 4, 6), bottleneck=True),
        widths=(1024, 512, 512, 256, 256, 256),
        middles=(256, 256, 128, 128, 128),
        norm=True,
    )
    return _detector("ssd300_resnet50", module)


def build_ssd300_resnet34() -> Workload:
    """SSD300 on ResNet-34 as MLPerf Training (mlcommons/training, single_stage_detector) lays it out."""
    module = Ssd(
        _cut_resnet((3, 4, 6), bottleneck=False),
        widths=(256, 512, 512, 256, 256, 256),
        middles=(256, 256, 128, 128, 128),
        norm=False,
    )
    return _detector("ssd-resnet34-300", module)
