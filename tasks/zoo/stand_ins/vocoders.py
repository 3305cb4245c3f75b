"""Stand-ins of the networks that make audio from mel frames: WaveGlow and HiFi-GAN."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from precision_time.tasks.workloads import Workload
from precision_time.tasks.zoo.stand_ins.optimizers import make_workload

__all__ = ["build_hifigan", "build_waveglow"]

#: Audio samples per mel frame in both networks.
HOP = 256


class GatedStack(nn.Module):
    """The network of one coupling step of WaveGlow: dilated convolutions with gates, conditioned on mel frames."""

    def __init__(self, half: int, *, condition: int, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.start = weight_norm(nn.Conv1d(half, width, 1))
        self.end = nn.Conv1d(width, 2 * half, 1)
        self.inputs = nn.ModuleList(
            weight_norm(nn.Conv1d(width, 2 * width, 3, dilation=2**depth, padding=2**depth)) for depth in range(layers)
        )
        self.conditions = nn.ModuleList(weight_norm(nn.Conv1d(condition, 2 * width, 1)) for _ in range(layers))
        self.outputs = nn.ModuleList(
            weight_norm(nn.Conv1d(width, 2 * width if depth < layers - 1 else width, 1)) for depth in range(layers)
        )

    def forward(self, audio: Tensor, mel: Tensor) -> Tensor:
        """audio [B, half, T], mel [B, condition, T] -> [B, 2 half, T]."""
        audio = self.start(audio)
        total = torch.zeros_like(audio)
        for depth, (inward, condition, outward) in enumerate(
            zip(self.inputs, self.conditions, self.outputs, strict=True)
        ):
            gates = inward(audio) + condition(mel)
            passed = outward(gates[:, : self.width].tanh() * gates[:, self.width :].sigmoid())
            if depth < len(self.inputs) - 1:
                audio = audio + passed[:, : self.width]
                passed = passed[:, self.width :]
            total = total + passed
        parameters: Tensor = self.end(total)
        return parameters


class WaveGlow(nn.Module):
    """WaveGlow with 12 coupling steps of 8 layers of 512 channels.

    Keeps: weight norm, the mixing by invertible 1 x 1 convolutions with their log-determinants, the early outputs.
    Leaves out: nothing that is trained; the batch holds the mel frames.
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/SpeechSynthesis/Tacotron2 (268 M parameters; recalled, not re-checked).
    """

    def __init__(self, *, mels: int = 80, group: int = 8, flows: int = 12, width: int = 512) -> None:
        super().__init__()
        self.group = group
        self.upsample = nn.ConvTranspose1d(mels, mels, 4 * HOP, stride=HOP)
        self.channels = [group - 2 * (flow // 4) for flow in range(flows)]
        self.mixers = nn.ParameterList(nn.init.orthogonal_(torch.empty(width, width)) for width in self.channels)
        self.stacks = nn.ModuleList(
            GatedStack(count // 2, condition=mels * group, width=width, layers=8) for count in self.channels
        )

    def forward(self, audio: Tensor, mel: Tensor) -> tuple[Tensor, Tensor]:
        """audio [B, N], mel [B, mels, N / 256] -> latents [B, group, N / group], the log-likelihood's other part []."""
        samples, length = audio.shape
        mel = self.upsample(mel)[:, :, :length].unfold(2, self.group, self.group)
        mel = mel.permute(0, 1, 3, 2).flatten(1, 2)
        signal = audio.unfold(1, self.group, self.group).transpose(1, 2)
        early, logs = [], signal.new_zeros(())
        for flow, (mixer, stack) in enumerate(zip(self.mixers, self.stacks, strict=True)):
            if flow and flow % 4 == 0:
                early.append(signal[:, :2])
                signal = signal[:, 2:]
            signal = F.conv1d(signal, mixer.unsqueeze(2))
            # slogdet takes the absolute value: a random orthogonal matrix may mirror.
            logs = logs + samples * signal.shape[2] * torch.linalg.slogdet(mixer.float())[1]
            passed, changed = signal.chunk(2, dim=1)
            shift, scale = stack(passed, mel).chunk(2, dim=1)
            logs = logs + scale.sum()
            signal = torch.cat([passed, scale.exp() * changed + shift], dim=1)
        return torch.cat([*early, signal], dim=1), logs


def build_waveglow(*, length: int = 8000) -> Workload:
    """WaveGlow; one sample is a segment of ``length`` audio samples (a multiple of 8)."""
    mels = 80

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        mel = torch.randn(samples, mels, math.ceil(length / HOP), device=device)
        return 0.1 * torch.randn(samples, length, device=device), mel

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        latents, logs = module(*batch)
        loss: Tensor = (latents.square().sum() / 2 - logs) / latents.numel()
        return loss

    return make_workload(
        "waveglow", WaveGlow(mels=mels), family="waveglow", task_input=str(length), optimizer="adam",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip


class FieldFusion(nn.Module):
    """The sum of three residual stacks with kernels of 3, 7 and 11, each with dilations 1, 3 and 5."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(
                    nn.LeakyReLU(0.1),
                    weight_norm(nn.Conv1d(channels, channels, kernel, dilation=gap, padding=gap * (kernel - 1) // 2)),
                    nn.LeakyReLU(0.1),
                    weight_norm(nn.Conv1d(channels, channels, kernel, padding=(kernel - 1) // 2)),
                )
                for gap in (1, 3, 5)
            )
            for kernel in (3, 7, 11)
        )

    def forward(self, sound: Tensor) -> Tensor:
        total = torch.zeros_like(sound)
        for stack in self.stacks:
            changed = sound
            for layer in stack:  # type: ignore[attr-defined]
                changed = changed + layer(changed)
            total = total + changed
        return total / len(self.stacks)


def _generator(mels: int) -> nn.Sequential:
    layers: list[nn.Module] = [weight_norm(nn.Conv1d(mels, 512, 7, padding=3))]
    channels = 512
    for stride in (8, 8, 2, 2):
        up = nn.ConvTranspose1d(channels, channels // 2, 2 * stride, stride, padding=stride // 2)
        layers += [nn.LeakyReLU(0.1), weight_norm(up), FieldFusion(channels // 2)]
        channels //= 2
    return nn.Sequential(*layers, nn.LeakyReLU(), weight_norm(nn.Conv1d(channels, 1, 7, padding=3)), nn.Tanh())


class Judge(nn.Module):
    """A discriminator that returns the outputs of all its convolutions; ``period`` folds the audio into columns."""

    def __init__(self, period: int = 0, *, halvings: int = 0) -> None:
        super().__init__()
        self.period, self.halvings = period, halvings
        layers: list[nn.Module] = []
        if period:
            for before, after, stride in ((1, 32, 3), (32, 128, 3), (128, 512, 3), (512, 1024, 3), (1024, 1024, 1)):
                layers.append(nn.Conv2d(before, after, (5, 1), (stride, 1), padding=(2, 0)))
            layers.append(nn.Conv2d(1024, 1, (3, 1), padding=(1, 0)))
        else:
            for before, after, kernel, stride, groups in (
                (1, 128, 15, 1, 1), (128, 128, 41, 2, 4), (128, 256, 41, 2, 16), (256, 512, 41, 4, 16),
                (512, 1024, 41, 4, 16), (1024, 1024, 41, 1, 16), (1024, 1024, 5, 1, 1), (1024, 1, 3, 1, 1),
            ):  # fmt: skip
                layers.append(nn.Conv1d(before, after, kernel, stride, padding=kernel // 2, groups=groups))
        self.layers = nn.ModuleList(weight_norm(layer) for layer in layers)

    def forward(self, audio: Tensor) -> list[Tensor]:
        """audio [B, 1, N] -> the outputs of all layers, the verdict last."""
        for _ in range(self.halvings):
            audio = F.avg_pool1d(audio, 4, 2, padding=2)
        if self.period:
            audio = F.pad(audio, (0, -audio.shape[2] % self.period), "reflect").reshape(len(audio), 1, -1, self.period)
        outputs = []
        for index, layer in enumerate(self.layers):
            audio = layer(audio)
            if index < len(self.layers) - 1:
                audio = F.leaky_relu(audio, 0.1)
            outputs.append(audio)
        return outputs


class HifiGan(nn.Module):
    """HiFi-GAN V1 with its eight discriminators.

    Keeps: the generator once and every discriminator four times a step (true and generated audio, once for each side),
    weight norm, the losses of both sides with matching of features.
    Leaves out: the second optimizer step (one steps the parameters of both sides) and the mel transform in the loss,
    which compares generated and true audio. The first scale discriminator has weight norm, not spectral norm.
    Sizes: the HiFi-GAN paper gives 13.92 M parameters for the generator V1; the discriminators 70.7 M (recalled, not
    re-checked).
    """

    def __init__(self, *, mels: int = 80) -> None:
        super().__init__()
        self.generator = _generator(mels)
        self.judges = nn.ModuleList(
            [Judge(period) for period in (2, 3, 5, 7, 11)] + [Judge(halvings=count) for count in range(3)]
        )

    def forward(self, audio: Tensor, mel: Tensor) -> Tensor:
        """audio [B, 1, N], mel [B, mels, N / 256] -> the loss of both sides []."""
        generated = self.generator(mel)
        loss = 45 * F.l1_loss(generated, audio)
        for judge in self.judges:
            loss = loss + (1 - judge(audio)[-1]).square().mean() + judge(generated.detach())[-1].square().mean()
            true_features, generated_features = judge(audio), judge(generated)
            loss = loss + (1 - generated_features[-1]).square().mean()
            for true, false in zip(true_features[:-1], generated_features[:-1], strict=True):
                loss = loss + 2 * F.l1_loss(false, true)
        return loss


def build_hifigan(*, length: int = 8192) -> Workload:
    """HiFi-GAN; one sample is a segment of ``length`` audio samples (a multiple of 256)."""
    mels = 80

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        mel = torch.randn(samples, mels, length // HOP, device=device)
        return 0.1 * torch.randn(samples, 1, length, device=device), mel

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = module(*batch)
        return loss

    return make_workload(
        "hifigan", HifiGan(mels=mels), family="hifigan", task_input=str(length), optimizer="adamw",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip
