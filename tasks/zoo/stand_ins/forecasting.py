"""Stand-in of the temporal fusion transformer, which forecasts time series."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.tasks.workloads import Workload
from precision_time.tasks.zoo.stand_ins.optimizers import make_workload

__all__ = ["build_tft"]

#: Quantiles to forecast.
QUANTILES = (0.1, 0.5, 0.9)
#: Inputs that are known at every step, and inputs of the past, which has the target too.
KNOWN, PAST = 3, 4


class Gate(nn.Module):
    """A gated linear unit, a shortcut and a norm."""

    def __init__(self, width: int, after: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, 2 * after), nn.LayerNorm(after)

    def forward(self, values: Tensor, shortcut: Tensor) -> Tensor:
        normed: Tensor = self.norm(F.glu(self.linear(values)) + shortcut)
        return normed


class GatedResidual(nn.Module):
    """Two linear layers, a gate and a norm; a ``context`` may join after the first layer."""

    def __init__(self, before: int, width: int, *, after: int = 0, context: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(before, width), nn.Linear(width, width)
        self.context = nn.Linear(width, width, bias=False) if context else None
        self.gate = Gate(width, after or width)
        self.shortcut: nn.Module = nn.Linear(before, after) if after else nn.Identity()
        self.dropout = nn.Dropout(0.1)

    def forward(self, values: Tensor, context: Tensor | None = None) -> Tensor:
        hidden = self.first(values)
        if context is not None and self.context is not None:
            hidden = hidden + self.context(context).unsqueeze(1)
        gated: Tensor = self.gate(self.dropout(self.second(F.elu(hidden))), self.shortcut(values))
        return gated


class VariableChoice(nn.Module):
    """Weighs the ``count`` inputs of a step by a softmax; each input first passes its own residual network."""

    def __init__(self, width: int, count: int, *, context: bool) -> None:
        super().__init__()
        self.joint = GatedResidual(width * count, width, after=count, context=context)
        self.single = nn.ModuleList(GatedResidual(width, width) for _ in range(count))

    def forward(self, inputs: Tensor, context: Tensor | None = None) -> Tensor:
        """inputs [..., count, W] -> [..., W]."""
        weights = self.joint(inputs.flatten(-2), context).softmax(dim=-1)
        changed = [network(inputs[..., index, :]) for index, network in enumerate(self.single)]
        return torch.matmul(torch.stack(changed, dim=-1), weights.unsqueeze(-1)).squeeze(-1)


class FusionTransformer(nn.Module):
    """The temporal fusion transformer.

    Keeps: choice of variables, two LSTMs over past and future, one layer of attention with shared values, gates.
    Leaves out: nothing that is trained.
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/Forecasting/TFT (hidden 128, 4 heads), which gives no parameter count.
    """

    def __init__(self, *, series: int, past: int, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.past, self.heads, self.head = past, heads, width // heads
        self.series = nn.Embedding(series, width)
        self.scales = nn.Parameter(0.1 * torch.randn(PAST, width))
        self.shifts = nn.Parameter(torch.zeros(PAST, width))
        self.static = VariableChoice(width, 1, context=False)
        self.contexts = nn.ModuleList(GatedResidual(width, width) for _ in range(4))
        self.past_choice = VariableChoice(width, PAST, context=True)
        self.future_choice = VariableChoice(width, KNOWN, context=True)
        self.past_lstm, self.future_lstm = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.input_gate, self.attention_gate, self.output_gate = (Gate(width, width) for _ in range(3))
        self.enrich = GatedResidual(width, width, context=True)
        self.projection = nn.Linear(width, (2 * heads + 1) * self.head, bias=False)
        self.mix = nn.Linear(self.head, width, bias=False)
        self.positions = GatedResidual(width, width)
        self.quantiles = nn.Linear(width, len(QUANTILES))
        self.dropout = nn.Dropout(0.1)

    def attend(self, steps: Tensor) -> Tensor:
        query, key, value = self.projection(steps).split(
            [self.heads * self.head, self.heads * self.head, self.head], dim=-1
        )
        query, key = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key))
        later = torch.ones(2 * [steps.shape[1]], dtype=torch.bool, device=steps.device).triu(1)
        scores = (query @ key.transpose(2, 3) * self.head**-0.5).masked_fill(later, float("-inf"))
        joined: Tensor = self.dropout(self.mix((scores.softmax(dim=-1) @ value.unsqueeze(1)).mean(dim=1)))
        return joined

    def forward(self, series: Tensor, values: Tensor) -> Tensor:
        """series [B], values [B, T, 4] (three known, then the target) -> quantiles [B, future, 3]."""
        static = self.static(self.series(series).unsqueeze(1))
        choice, enrichment, hidden, cell = (network(static) for network in self.contexts)
        inputs = values.unsqueeze(-1) * self.scales + self.shifts
        past = self.past_choice(inputs[:, : self.past], choice)
        future = self.future_choice(inputs[:, self.past :, :KNOWN], choice)
        before, state = self.past_lstm(past, (hidden.unsqueeze(0), cell.unsqueeze(0)))
        after, _ = self.future_lstm(future, state)
        steps = self.input_gate(torch.cat([before, after], dim=1), torch.cat([past, future], dim=1))
        enriched = self.enrich(steps, enrichment)
        attended = self.attend(enriched)[:, self.past :]
        attended = self.positions(self.attention_gate(attended, enriched[:, self.past :]))
        forecast: Tensor = self.quantiles(self.output_gate(attended, steps[:, self.past :]))
        return forecast


def build_tft(*, series: int = 369, past: int = 168, future: int = 24) -> Workload:
    """The fusion transformer over ``series`` series (electricity 369, traffic 963).

    One sample is a window of ``past`` steps of history and ``future`` steps to forecast.
    """

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        values = torch.randn(samples, past + future, PAST, device=device)
        return torch.randint(series, (samples,), device=device), values

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        errors = batch[1][:, past:, -1:] - module(*batch)
        levels = torch.tensor(QUANTILES, device=errors.device)
        return torch.maximum(levels * errors, (levels - 1) * errors).sum(dim=-1).mean()

    return make_workload(
        "tft", FusionTransformer(series=series, past=past),
        family="tft", task_input=f"{past}+{future}", optimizer="adam",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip
