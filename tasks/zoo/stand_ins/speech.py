"""Stand-ins of convolutional and attentional speech networks: Jasper, QuartzNet, FastPitch."""

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.tasks.workloads import Workload
from precision_time.tasks.zoo.stand_ins.optimizers import make_workload
from precision_time.tasks.zoo.stand_ins.recurrent import TACOTRON_CHARACTERS, TACOTRON_FRAMES

__all__ = ["build_fastpitch", "build_jasper", "build_quartznet"]

#: 12.3 s, the mean utterance of LibriSpeech, at 100 mel frames per second.
LIBRISPEECH_FRAMES = 1230


class MaskedConvolution(nn.Module):
    """A 1-D convolution over masked sound, then a batch norm; ``separable`` convolves by depth and by point."""

    def __init__(
        self, before: int, after: int, *, kernel: int, stride: int = 1, dilation: int = 1, separable: bool = False
    ) -> None:
        super().__init__()
        padding = dilation * (kernel - 1) // 2
        convolve = partial(nn.Conv1d, stride=stride, padding=padding, dilation=dilation, bias=False)
        layers = [convolve(before, after, kernel)]
        if separable:
            layers = [convolve(before, before, kernel, groups=before), nn.Conv1d(before, after, 1, bias=False)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.BatchNorm1d(after)

    def forward(self, sound: Tensor, ends: Tensor) -> Tensor:
        """sound [B, C, T], ends [B] as shares of T -> [B, C', T']."""
        for layer in self.layers:
            places = torch.arange(sound.shape[2], device=sound.device)
            sound = layer(sound.masked_fill(places >= (ends * sound.shape[2])[:, None, None], 0.0))
        normed: Tensor = self.norm(sound)
        return normed


class SoundBlock(nn.Module):
    """Repeated convolutions; the last one adds shortcuts from ``sources`` (earlier widths) before its ReLU."""

    def __init__(
        self, before: int, after: int, *, repeat: int, kernel: int, sources: list[int], dropout: float, separable: bool
    ) -> None:
        super().__init__()
        widths = [before] + [after] * repeat
        self.convolutions = nn.ModuleList(
            MaskedConvolution(narrow, wide, kernel=kernel, separable=separable)
            for narrow, wide in itertools.pairwise(widths)
        )
        self.shortcuts = nn.ModuleList(MaskedConvolution(source, after, kernel=1) for source in sources)
        self.dropout = nn.Dropout(dropout)

    def forward(self, earlier: list[Tensor], ends: Tensor) -> Tensor:
        sound = earlier[-1]
        for convolution in self.convolutions[:-1]:
            sound = self.dropout(F.relu(convolution(sound, ends)))
        sound = self.convolutions[-1](sound, ends)
        for source, shortcut in zip(earlier[-len(self.shortcuts) :], self.shortcuts, strict=True):
            sound = sound + shortcut(source, ends)
        mixed: Tensor = self.dropout(F.relu(sound))
        return mixed


class Jasper(nn.Module):
    """Jasper 10x5 with dense shortcuts, or (``separable``) QuartzNet 15x5.

    Keeps: every convolution with its mask and batch norm, dropout, the shortcuts (Jasper: from all earlier blocks).
    Leaves out: the CTC loss, which the meta device lacks (each frame is scored against one given character instead),
    and the computation of mel features with their augmentation.
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/SpeechRecognition/{Jasper,QuartzNet}; its README gives 333 M parameters
    for Jasper, and osmr/imgclsmob's tests 332,632,349; QuartzNet's paper gives 18.9 M.
    """

    def __init__(
        self, *, blocks: list[tuple[int, int, float]], first: int, last: tuple[int, int], separable: bool
    ) -> None:
        super().__init__()
        dense = not separable
        self.first = MaskedConvolution(64, 256, kernel=first, stride=2, separable=separable)
        widths = [256]
        self.blocks = nn.ModuleList()
        for width, kernel, dropout in blocks:
            sources = widths if dense else widths[-1:]
            self.blocks.append(
                SoundBlock(
                    widths[-1], width, repeat=5, kernel=kernel, sources=sources, dropout=dropout, separable=separable
                )
            )
            widths.append(width)
        self.wide = MaskedConvolution(widths[-1], last[0], kernel=last[1], dilation=2, separable=separable)
        self.narrow = MaskedConvolution(last[0], 1024, kernel=1)
        self.classifier = nn.Conv1d(1024, 29, 1)
        rate = 0.2 if dense else 0.0
        self.early, self.late = nn.Dropout(rate), nn.Dropout(2 * rate)

    def forward(self, sound: Tensor, ends: Tensor) -> Tensor:
        """sound [B, 64, T], ends [B] as shares of T -> logits [B, 29, T / 2]."""
        earlier = [self.early(F.relu(self.first(sound, ends)))]
        for block in self.blocks:
            earlier.append(block(earlier, ends))
        sound = self.late(F.relu(self.wide(earlier[-1], ends)))
        logits: Tensor = self.classifier(self.late(F.relu(self.narrow(sound, ends))))
        return logits


def _listener(name: str, module: nn.Module, *, frames: int) -> Workload:
    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        labels = torch.randint(29, (samples, (frames + 1) // 2), device=device)
        return torch.randn(samples, 64, frames, device=device), torch.ones(samples, device=device), labels

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        sound, ends, labels = batch
        return F.cross_entropy(module(sound, ends), labels)

    return make_workload(
        name, module, family="jasper", task_input=str(frames), optimizer="adamw",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip


def build_jasper(*, frames: int = LIBRISPEECH_FRAMES) -> Workload:
    """Jasper 10x5 (dense shortcuts); one sample is an utterance of ``frames`` mel frames of 10 ms.

    The trained code steps with NovoGrad, which torch lacks: AdamW here.
    """
    pairs = [(256, 11, 0.2), (384, 13, 0.2), (512, 17, 0.2), (640, 21, 0.3), (768, 25, 0.3)]
    blocks = [block for block in pairs for _ in range(2)]
    return _listener("jasper10x5", Jasper(blocks=blocks, first=11, last=(896, 29), separable=False), frames=frames)


def build_quartznet(*, frames: int = LIBRISPEECH_FRAMES) -> Workload:
    """QuartzNet 15x5; one sample is an utterance of ``frames`` mel frames of 10 ms. AdamW in place of NovoGrad."""
    triples = [(256, 33, 0.0), (256, 39, 0.0), (512, 51, 0.0), (512, 63, 0.0), (512, 75, 0.0)]
    blocks = [block for block in triples for _ in range(3)]
    return _listener("quartznet15x5", Jasper(blocks=blocks, first=33, last=(512, 87), separable=True), frames=frames)


class VoiceLayer(nn.Module):
    """A feed-forward transformer layer: attention of ``heads`` heads, then two 1-D convolutions; norms after."""

    def __init__(self, width: int, *, heads: int, head: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.projection, self.mix = nn.Linear(width, 3 * heads * head), nn.Linear(heads * head, width, bias=False)
        self.convolutions = nn.Sequential(
            nn.Conv1d(width, inner, 3, padding=1), nn.ReLU(), nn.Conv1d(inner, width, 3, padding=1), nn.Dropout(0.1)
        )
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """tokens [B, T, W], hidden [B, T] (true = padding) -> [B, T, W]."""
        parts = self.projection(tokens).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden[:, None, None, :], float("-inf")).softmax(dim=-1)
        mixed = (self.dropout(weights) @ value).transpose(1, 2).flatten(2)
        tokens = self.attention_norm(tokens + self.dropout(self.mix(mixed)))
        normed: Tensor = self.norm(tokens + self.convolutions(tokens.transpose(1, 2)).transpose(1, 2))
        return normed.masked_fill(hidden.unsqueeze(2), 0.0)


class TokenPredictor(nn.Module):
    """One value per token (duration, pitch or energy) from two 1-D convolutions."""

    def __init__(self, width: int, *, inner: int = 256) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(before, inner, 3, padding=1) for before in (width, inner))
        self.norms = nn.ModuleList(nn.LayerNorm(inner) for _ in range(2))
        self.value, self.dropout = nn.Linear(inner, 1), nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            tokens = self.dropout(norm(F.relu(convolution(tokens.transpose(1, 2))).transpose(1, 2)))
        values: Tensor = self.value(tokens).squeeze(2)
        return values


class FastPitch(nn.Module):
    """FastPitch 1.1, from characters to mel frames.

    Keeps: six layers over the characters and six over the frames, the predictors of duration, pitch and energy, the
    aligner that scores every (frame, character) pair, spreading of the characters over the frames by a matrix product.
    Leaves out: the CTC loss of the aligner (its scores are averaged instead) and the search for the best path on the
    CPU (the batch holds the durations).
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/SpeechSynthesis/FastPitch (version 1.0, without aligner and energy:
    45 M parameters; recalled, not re-checked).
    """

    def __init__(self, *, symbols: int = 148, mels: int = 80, width: int = 384) -> None:
        super().__init__()
        self.width = width
        self.symbols = nn.Embedding(symbols, width)
        self.encoder, self.decoder = (
            nn.ModuleList(VoiceLayer(width, heads=1, head=64, inner=1536) for _ in range(6)) for _ in range(2)
        )
        self.duration, self.pitch, self.energy = (TokenPredictor(width) for _ in range(3))
        self.pitch_embedding, self.energy_embedding = (nn.Conv1d(1, width, 3, padding=1) for _ in range(2))
        self.frame = nn.Linear(width, mels)
        self.key = nn.Sequential(nn.Conv1d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.Conv1d(2 * width, mels, 1))
        self.query = nn.Sequential(
            nn.Conv1d(mels, 2 * mels, 3, padding=1), nn.ReLU(),
            nn.Conv1d(2 * mels, mels, 1), nn.ReLU(), nn.Conv1d(mels, mels, 1),
        )  # fmt: skip

    def add_places(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        rates = 1e4 ** (-torch.arange(0, self.width, 2, device=tokens.device) / self.width)
        return tokens + torch.cat([(places * rates).sin(), (places * rates).cos()], dim=1).to(tokens.dtype)

    def forward(self, text: Tensor, frames: Tensor, spread: Tensor, traits: Tensor) -> tuple[Tensor, ...]:
        """text [B, L], frames [B, mels, T], spread [B, T, L], traits [B, 2, L] (pitch, energy).

        Returns mels [B, T, mels], durations [B, L], pitches and energies [B, L], log-scores of the aligner [B, T, L].
        """
        words = self.symbols(text)
        tokens, hidden = self.add_places(words), text < 0
        for layer in self.encoder:
            tokens = layer(tokens, hidden)
        gaps = self.query(frames).unsqueeze(3) - self.key(words.transpose(1, 2)).unsqueeze(2)
        aligned = (-5e-4 * gaps.square().sum(dim=1)).log_softmax(dim=2)
        durations, pitches = self.duration(tokens), self.pitch(tokens)
        tokens = tokens + self.pitch_embedding(traits[:, :1]).transpose(1, 2)
        energies = self.energy(tokens)
        tokens = tokens + self.energy_embedding(traits[:, 1:]).transpose(1, 2)
        mels = self.add_places(torch.bmm(spread, tokens))
        late = spread[:, :, 0] < 0
        for layer in self.decoder:
            mels = layer(mels, late)
        return self.frame(mels), durations, pitches, energies, aligned


def build_fastpitch(*, frames: int = TACOTRON_FRAMES, characters: int = TACOTRON_CHARACTERS) -> Workload:
    """FastPitch; one sample is an utterance padded to ``frames`` mel frames and ``characters`` characters.

    The trained code steps with LAMB, which torch lacks: Adam here.
    """
    mels, symbols = 80, 148

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, ...]:
        text = torch.randint(symbols, (samples, characters), device=device)
        owner = torch.arange(frames, device=device)[:, None] * characters // frames
        spread = (owner == torch.arange(characters, device=device)).float().expand(samples, -1, -1).contiguous()
        sounds = torch.randn(samples, mels, frames, device=device)
        return text, sounds, spread, torch.randn(samples, 2, characters, device=device)

    def compute_loss(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        _, sounds, spread, traits = batch
        mels, durations, pitches, energies, aligned = module(*batch)
        traits_loss = F.mse_loss(durations, spread.sum(dim=1).log1p())
        traits_loss = traits_loss + F.mse_loss(pitches, traits[:, 0]) + F.mse_loss(energies, traits[:, 1])
        alignment = (aligned * spread).sum(dim=2).mean()
        loss: Tensor = F.mse_loss(mels, sounds.transpose(1, 2)) + 0.1 * traits_loss - alignment
        return loss

    return make_workload(
        "fastpitch", FastPitch(symbols=symbols, mels=mels),
        family="fastspeech", task_input=str(frames), optimizer="adam",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip
