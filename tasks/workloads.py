"""The workloads that ranks train: a module with random weights, a synthetic batch, its loss and its optimizer."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.predictor.answering.user_models import import_factory
from precision_time.predictor.walking.walk_module import count_workload
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["BUILDERS", "OPTIMIZERS", "Workload", "build_workload", "count_card"]

#: Share of the tokens that a masked language model has to guess; the loss leaves out the others.
MASKED_SHARE = 0.15
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training workload. Yours is returned by a function without arguments, named ``module:factory`` in a campaign.

    A step takes ``compute_loss(module, make_batch(samples, device))``, its gradients, and a step of the optimizer. All
    fields are required:

    ``name``: any name of the network; tables have the name that the campaign gives.
    ``family``: its architecture family, such as ``resnet`` or ``bert``; empty for none.
    ``task_input``: size of one sample, as text: image side in pixels, sequence length in tokens, or vector length.
    ``module``: the network with random float32 weights on the CPU; ranks move it to their device and cast it.
    ``make_batch(samples, device)``: synthetic inputs, a tensor or nested tensors of shape ``(samples, ...)`` on
    ``device``; ranks cast floating tensors to the format of the weights.
    ``compute_loss(module, batch)``: the loss, a finite scalar tensor of shape ``()``; it calls ``module``, which is the
    network behind DDP.
    ``make_optimizer(parameters)``: the optimizer of these parameters, e.g. one of ``OPTIMIZERS``.
    ``optimizer_name``: its name on the feature card: ``sgd``, ``sgd_momentum``, ``adam``, ``adamw``, ...

    >>> workload = Workload(
    ...     name="small",
    ...     family="mlp",
    ...     task_input="8",
    ...     module=nn.Linear(8, 4),
    ...     make_batch=lambda samples, device: torch.randn(samples, 8, device=device),
    ...     compute_loss=lambda module, batch: module(batch).square().mean(),
    ...     make_optimizer=OPTIMIZERS["adamw"],
    ...     optimizer_name="adamw",
    ... )
    >>> batch = workload.make_batch(2, "cpu")
    >>> batch.shape, workload.compute_loss(workload.module, batch).shape
    (torch.Size([2, 8]), torch.Size([]))
    """

    name: str
    family: str
    task_input: str
    module: nn.Module
    make_batch: Callable[[int, torch.device | str], Any]
    compute_loss: Callable[[nn.Module, Any], Tensor]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    optimizer_name: str


class Residual(nn.Module):
    """A residual block of ResNet; a ``bottleneck`` strides in its 3 x 3 convolution, as in most trained ResNets."""

    def __init__(self, channels: int, width: int, *, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = 4 * width if bottleneck else width
        shapes = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        if not bottleneck:
            shapes = [(channels, width, 3, stride), (width, width, 3, 1)]
        layers: list[nn.Module] = []
        for before, after, kernel, step in shapes:
            layers += [_convolution(before, after, kernel=kernel, stride=step), nn.BatchNorm2d(after), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(_convolution(channels, out, kernel=1, stride=stride), nn.BatchNorm2d(out))

    def forward(self, image: Tensor) -> Tensor:
        return F.relu(self.body(image) + self.shortcut(image))


def _convolution(before: int, after: int, *, kernel: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return layer


def _resnet(name: str, *, blocks: tuple[int, ...], bottleneck: bool) -> Workload:
    stem = [_convolution(3, 64, kernel=7, stride=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    stages: list[nn.Module] = []
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            stages.append(Residual(channels, width, stride=stride, bottleneck=bottleneck))
            channels = 4 * width if bottleneck else width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    module = nn.Sequential(*stem, *stages, *head)
    return _classifier(
        name, family="resnet", module=module, shape=(3, 224, 224), classes=1000, optimizer="sgd_momentum"
    )


class Block(nn.Module):
    """A transformer layer: attention and a two-layer perceptron, each with a norm before (or after) and a shortcut.

    No dropout: in attention it would prevent the fused kernels of torch.
    """

    def __init__(
        self, width: int, heads: int, *, causal: bool, norm_first: bool, fused_projection: bool, tanh_gelu: bool
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.norm_first = heads, causal, norm_first
        self.fused_projection = fused_projection
        parts = [3 * width] if fused_projection else [width] * 3
        self.projections = nn.ModuleList(nn.Linear(width, part) for part in parts)
        self.mix = nn.Linear(width, width)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        gelu = nn.GELU("tanh" if tanh_gelu else "none")
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))

    def attend(self, tokens: Tensor) -> Tensor:
        if self.fused_projection:
            parts = self.projections[0](tokens).chunk(3, dim=-1)
        else:
            parts = [projection(tokens) for projection in self.projections]
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        projected: Tensor = self.mix(mixed.transpose(1, 2).flatten(2))
        return projected

    def forward(self, tokens: Tensor) -> Tensor:
        if self.norm_first:
            tokens = tokens + self.attend(self.attention_norm(tokens))
            changed: Tensor = tokens + self.mlp(self.mlp_norm(tokens))
            return changed
        tokens = self.attention_norm(tokens + self.attend(tokens))
        normed: Tensor = self.mlp_norm(tokens + self.mlp(tokens))
        return normed


class VisionTransformer(nn.Module):
    """ViT: square patches, a class token, pre-norm blocks, 1000 classes."""

    def __init__(self, *, side: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(
            *(
                Block(width, heads, causal=False, norm_first=True, fused_projection=True, tanh_gelu=False)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.patches(image).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


class LanguageModel(nn.Module):
    """BERT with its masked-token head, or (``causal``) GPT-2; the output shares the weights of the token embedding."""

    def __init__(self, *, vocabulary: int, positions: int, width: int, layers: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        for table in (self.words, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(
            *(
                Block(width, heads, causal=causal, norm_first=causal, fused_projection=causal, tanh_gelu=causal)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        if not causal:
            self.segments = nn.Embedding(2, width)
            self.guess = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
            self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, words: Tensor) -> Tensor:
        tokens = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        if self.causal:
            return F.linear(self.norm(self.blocks(tokens)), self.words.weight)
        tokens = self.norm(tokens + self.segments(torch.zeros_like(words)))
        return F.linear(self.guess(self.blocks(tokens)), self.words.weight, self.bias)


def _vit(name: str, *, side: int, width: int, layers: int, heads: int) -> Workload:
    module = VisionTransformer(side=side, patch=16, width=width, layers=layers, heads=heads)
    return _classifier(name, family="vit", module=module, shape=(3, side, side), classes=1000, optimizer="adamw")


def _language(
    name: str, *, family: str, length: int, vocabulary: int, positions: int, width: int, layers: int, heads: int
) -> Workload:
    causal = family == "gpt2"
    module = LanguageModel(
        vocabulary=vocabulary, positions=positions, width=width, layers=layers, heads=heads, causal=causal
    )

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        words = torch.randint(vocabulary, (samples, length + 1))
        if causal:
            return words[:, :-1].contiguous().to(device), words[:, 1:].contiguous().to(device)
        labels = torch.where(torch.rand(samples, length) < MASKED_SHARE, words[:, 1:], IGNORED_LABEL)
        return words[:, 1:].contiguous().to(device), labels.to(device)

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        words, labels = batch
        return F.cross_entropy(module(words).flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)

    return Workload(
        name=name,
        family=family,
        task_input=str(length),
        module=module,
        make_batch=make_batch,
        compute_loss=compute_loss,
        make_optimizer=OPTIMIZERS["adamw"],
        optimizer_name="adamw",
    )


def _mlp(name: str) -> Workload:
    width, classes = 1024, 10
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    module = nn.Sequential(*hidden, nn.Linear(width, classes))
    return _classifier(name, family="mlp", module=module, shape=(width,), classes=classes, optimizer="sgd_momentum")


def _classifier(
    name: str, *, family: str, module: nn.Module, shape: tuple[int, ...], classes: int, optimizer: str
) -> Workload:
    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, *shape).to(device), torch.randint(classes, (samples,)).to(device)

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(module(inputs), labels)

    return Workload(
        name=name,
        family=family,
        task_input=str(shape[-1]),
        module=module,
        make_batch=make_batch,
        compute_loss=compute_loss,
        make_optimizer=OPTIMIZERS[optimizer],
        optimizer_name=optimizer,
    )


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    parameters = list(parameters)
    # In fp16 the usual 1e-8 is zero, and a gradient whose square is also zero makes the weights NaN.
    eps = 1e-4 if any(parameter.dtype == torch.float16 for parameter in parameters) else 1e-8
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, eps=eps)


#: Learning rates are small: labels are random, and with a diverging loss infinities would be timed.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    "adamw": _adamw,
}

BUILDERS: dict[str, Callable[[], Workload]] = {
    "resnet18": lambda: _resnet("resnet18", blocks=(2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: _resnet("resnet50", blocks=(3, 4, 6, 3), bottleneck=True),
    "vit_b16": lambda: _vit("vit_b16", side=224, width=768, layers=12, heads=12),
    "vit_tiny": lambda: _vit("vit_tiny", side=64, width=192, layers=12, heads=3),
    "bert_base": lambda: _language(
        "bert_base", family="bert", length=128, vocabulary=30522, positions=512, width=768, layers=12, heads=12
    ),
    "bert_mini": lambda: _language(
        "bert_mini", family="bert", length=64, vocabulary=8192, positions=512, width=256, layers=4, heads=4
    ),
    "gpt2": lambda: _language(
        "gpt2", family="gpt2", length=1024, vocabulary=50257, positions=1024, width=768, layers=12, heads=12
    ),
    "gpt2_mini": lambda: _language(
        "gpt2_mini", family="gpt2", length=128, vocabulary=8192, positions=256, width=192, layers=6, heads=6
    ),
    "mlp": lambda: _mlp("mlp"),
}


def build_workload(name: str) -> Workload:
    """The workload called ``name``: one of ``BUILDERS``, or the return value of the factory ``module:factory``.

    Modules are found as by ``python -m``, the current folder first. Raises ``UnknownNameError`` for an unknown name and
    ``InputError`` for a factory that cannot be imported or returns something else.
    """
    if ":" not in name:
        if name not in BUILDERS:
            raise UnknownNameError("model", name, BUILDERS, fix="or name your own as module:factory")
        return BUILDERS[name]()
    workload = import_factory(name)
    if not isinstance(workload, Workload):
        raise InputError(
            f"{name} returns no workload",
            got=type(workload).__name__,
            expected="a function returning precision_time.tasks.workloads.Workload",
        )
    return workload


def count_card(workload: Workload, *, name: str) -> WorkloadFeatures:
    """The feature card of ``workload`` under the name that campaigns give it; see ``walk_module.count_workload``."""
    return count_workload(
        workload.module,
        lambda samples: workload.make_batch(samples, "cpu"),
        loss_of=workload.compute_loss,
        name=name,
        family=workload.family,
        task_input=workload.task_input,
        optimizer=workload.optimizer_name,
    )


def _print_cards() -> None:
    """Print predictor/data/workloads.toml: the cards of all named workloads, counted now."""
    print("# What one sample of each named workload costs. Made by: python -m precision_time.tasks.workloads --cards")
    for name in BUILDERS:
        card = count_card(build_workload(name), name=name).to_dict()
        print(f"\n[{name}]")
        for key, value in card.items():
            if key not in ("name", "walks") and value is not None:
                print(f"{key} = {value if isinstance(value, int | float) else repr(value).replace(chr(39), chr(34))}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--cards"]:
        sys.exit("usage: python -m precision_time.tasks.workloads --cards")
    _print_cards()
