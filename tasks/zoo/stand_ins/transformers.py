"""Stand-ins of transformers that no library builds as the table's rows train them: Transformer-XL and translation."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.tasks.workloads import Workload
from precision_time.tasks.zoo.stand_ins.optimizers import make_workload

__all__ = ["build_transformer_big", "build_transformer_xl"]

#: The words of WikiText-103, most frequent first: the first word of each of three groups of rare words, their number,
#: and our estimate of the share of tokens in each group. A sample has a token of each, so that every group is computed.
CUTOFFS = (19997, 39997, 199997)
VOCABULARY = 267735
RARE_SHARES = (0.035, 0.033, 0.002)


def make_sinusoids(places: Tensor, *, width: int) -> Tensor:
    """Sines and cosines of ``places`` [T], [T, width]."""
    rates = 1e4 ** (-torch.arange(0, width, 2, device=places.device) / width)
    angles = places[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class RelativeLayer(nn.Module):
    """A layer of Transformer-XL: attention over memory and segment with relative places, norms after."""

    def __init__(self, width: int, *, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        inside = heads * 64
        self.projection = nn.Linear(width, 3 * inside, bias=False)
        self.place, self.mix = nn.Linear(width, inside, bias=False), nn.Linear(inside, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, inner), nn.ReLU(), nn.Dropout(dropout), nn.Linear(inner, width), nn.Dropout(dropout)
        )
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, memory: Tensor, places: Tensor, biases: Tensor, hidden: Tensor) -> Tensor:
        """tokens [B, T, W], memory [B, M, W], places [M + T, W], biases [2, H, 64], hidden [T, M + T] -> [B, T, W]."""
        length, total = tokens.shape[1], memory.shape[1] + tokens.shape[1]
        parts = self.projection(torch.cat([memory, tokens], dim=1)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        query = query[:, -length:]
        distance = self.place(places).unflatten(-1, (self.heads, -1))
        content = torch.einsum("bind,bjnd->bnij", query + biases[0], key)
        place = torch.einsum("bind,jnd->bnij", query + biases[1], distance)
        # This shifts row i left by T - 1 - i, so that column j holds the score of its distance.
        place = F.pad(place, (1, 0)).view(len(tokens), self.heads, total + 1, length)[:, :, 1:].reshape(place.shape)
        scores = ((content + place) / 8.0).masked_fill(hidden, float("-inf"))
        mixed = torch.einsum("bnij,bjnd->bind", scores.softmax(dim=-1), value).flatten(2)
        tokens = self.attention_norm(tokens + self.dropout(self.mix(mixed)))
        normed: Tensor = self.norm(tokens + self.mlp(tokens))
        return normed


class TransformerXl(nn.Module):
    """Transformer-XL over WikiText-103.

    Keeps: attention over a memory as long as the segment, relative places, tied tables, the adaptive softmax with its
    groups of words (for ``divide`` > 1 narrower tables for rarer words), attention made of plain products.
    Leaves out: the varying number of tokens in each group (a fixed share here, at fixed places), the lookup of narrower
    tables only for their own words, and passing the memory on to the next batch (the batch holds it).
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL (base: 192 M parameters; recalled, not
    re-checked; the paper gives 257 M for large, these sizes give 285 M).
    """

    def __init__(self, *, layers: int, width: int, heads: int, inner: int, dropout: float, divide: int) -> None:
        super().__init__()
        edges = (0, *CUTOFFS, VOCABULARY)
        widths = [width // divide**group for group in range(len(edges) - 1)]
        self.width = width
        self.tables = nn.ModuleList(
            nn.Embedding(high - low, narrow) for low, high, narrow in zip(edges[:-1], edges[1:], widths, strict=True)
        )
        for weight in self.tables.parameters():
            nn.init.normal_(weight, std=0.02)
        self.biases = nn.ParameterList(torch.zeros(high - low) for low, high in itertools.pairwise(edges))
        self.narrow = nn.ModuleList(
            nn.Linear(width, narrow, bias=False) if divide > 1 else nn.Identity() for narrow in widths
        )
        self.widen = nn.Linear(width, width, bias=False) if divide > 1 else nn.Identity()
        self.groups = nn.Linear(width, len(CUTOFFS))
        self.place_biases = nn.Parameter(0.02 * torch.randn(2, heads, 64))
        self.layers = nn.ModuleList(
            RelativeLayer(width, heads=heads, inner=inner, dropout=dropout) for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: Tensor, labels: Tensor, memories: Tensor) -> Tensor:
        """words, labels [B, T] (the first places rare, see ``rare_counts``), memories [B, layers, M, W] -> loss []."""
        length, total = words.shape[1], memories.shape[2] + words.shape[1]
        counts = rare_counts(length)
        pieces, first = [], 0
        for group, count in enumerate((*counts, length - sum(counts)), start=1):
            piece = words[:, first : first + count]
            if group > len(counts):
                pieces.append(self.widen(self.tables[0](piece)))
            else:
                vectors = self.tables[group](piece - CUTOFFS[group - 1])
                narrow = self.narrow[group]
                pieces.append(F.linear(vectors, narrow.weight.t()) if isinstance(narrow, nn.Linear) else vectors)
            first += count
        tokens = self.dropout(torch.cat(pieces, dim=1) * math.sqrt(self.width))
        distances = torch.arange(total - 1, -1, -1, device=words.device)
        places = self.dropout(make_sinusoids(distances, width=self.width).to(tokens.dtype))
        hidden = torch.ones(length, total, dtype=torch.bool, device=words.device).triu(1 + total - length)
        for layer, memory in zip(self.layers, memories.unbind(1), strict=True):
            tokens = layer(tokens, memory.to(tokens.dtype), places, self.place_biases, hidden)
        return self.score(self.dropout(tokens), labels, counts)

    def score(self, tokens: Tensor, labels: Tensor, counts: tuple[int, ...]) -> Tensor:
        """The adaptive softmax: all tokens score the frequent words and the groups, a group's tokens also its words."""
        head = F.linear(self.narrow[0](tokens), self.tables[0].weight, self.biases[0])  # type: ignore[arg-type]
        logits = torch.cat([head, self.groups(tokens)], dim=-1)
        kinds = [torch.full_like(labels[:, :count], CUTOFFS[0] + group) for group, count in enumerate(counts)]
        target = torch.cat([*kinds, labels[:, sum(counts) :]], dim=1)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        first = 0
        for group, count in enumerate(counts, start=1):
            piece = self.narrow[group](tokens[:, first : first + count])
            scores = F.linear(piece, self.tables[group].weight, self.biases[group])  # type: ignore[arg-type]
            group_target = labels[:, first : first + count] - CUTOFFS[group - 1]
            loss = loss + F.cross_entropy(scores.flatten(0, 1), group_target.flatten(), reduction="sum")
            first += count
        return loss / labels.numel()


def rare_counts(length: int) -> tuple[int, ...]:
    """Tokens of a segment of ``length`` that fall into each group of rare words; they come first."""
    return tuple(max(1, round(share * length)) for share in RARE_SHARES)


def build_transformer_xl(size: str = "base", *, length: int = 0) -> Workload:
    """Transformer-XL ``base`` or ``large``; one sample is a segment of ``length`` tokens (192; large: 384).

    The memory is as long. The trained code steps with LAMB, which torch lacks: Adam here.
    """
    large = size == "large"
    length = length or (384 if large else 192)
    layers, width = (18, 1024) if large else (16, 512)
    edges = (*CUTOFFS, VOCABULARY)

    def draw(samples: int, device: torch.device | str) -> Tensor:
        counts = rare_counts(length)
        groups = [
            torch.randint(low, high, (samples, count), device=device)
            for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        ]
        return torch.cat([*groups, torch.randint(CUTOFFS[0], (samples, length - sum(counts)), device=device)], dim=1)

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        memories = torch.randn(samples, layers, length, width, device=device)
        return draw(samples, device), draw(samples, device), memories

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        loss: Tensor = module(*batch)
        return loss

    return make_workload(
        f"transformerxl_{size}",
        TransformerXl(
            layers=layers, width=width, heads=width // 64, inner=4 * width, dropout=0.2 if large else 0.1,
            divide=4 if large else 1,
        ),
        family="transformer_xl", task_input=str(length), optimizer="adam",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip


class PlainAttention(nn.Module):
    """Multi-head attention made of plain products, as code before fused kernels has it."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, memory: Tensor, hidden: Tensor | None) -> Tensor:
        """tokens [B, T, W], memory [B, S, W], hidden [T, S] (true = not seen) -> [B, T, W]."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(tokens), self.key(memory), self.value(memory))
        )
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        mixed = (self.dropout(scores.softmax(dim=-1)) @ value).transpose(1, 2).flatten(2)
        joined: Tensor = self.mix(mixed)
        return joined


class TranslationLayer(nn.Module):
    """An encoder layer, or (``reads``) a decoder layer that also attends to the source; norms after."""

    def __init__(self, width: int, *, heads: int, reads: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(PlainAttention(width, heads=heads) for _ in range(1 + reads))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 + reads))
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, source: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        tokens = self.norms[0](tokens + self.dropout(self.attentions[0](tokens, tokens, hidden)))
        if source is not None:
            tokens = self.norms[1](tokens + self.dropout(self.attentions[1](tokens, source, None)))
        normed: Tensor = self.norms[-1](tokens + self.dropout(self.mlp(tokens)))
        return normed


class Translator(nn.Module):
    """The big transformer for translation: 6 + 6 layers of 1,024.

    Keeps: one table for source, target and output, sinusoidal places, norms after, attention made of plain products,
    dropout, label smoothing. Leaves out: padding (all sentences are equally long).
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/Translation/Transformer (vocabulary 33,708); the paper "Attention is all
    you need" gives 213 M parameters, with a larger vocabulary.
    """

    def __init__(self, *, vocabulary: int, width: int = 1024, heads: int = 16, layers: int = 6) -> None:
        super().__init__()
        self.width = width
        self.words = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.words.weight, std=width**-0.5)
        self.encoder, self.decoder = (
            nn.ModuleList(TranslationLayer(width, heads=heads, reads=reads) for _ in range(layers))
            for reads in (False, True)
        )
        self.dropout = nn.Dropout(0.1)

    def embed(self, words: Tensor) -> Tensor:
        places = make_sinusoids(torch.arange(words.shape[1], device=words.device), width=self.width)
        embedded: Tensor = self.dropout(self.words(words) * math.sqrt(self.width) + places)
        return embedded

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source [B, S], target [B, T] -> logits [B, T, vocabulary]."""
        memory, tokens = self.embed(source), self.embed(target)
        for layer in self.encoder:
            memory = layer(memory)
        hidden = torch.ones(2 * [target.shape[1]], dtype=torch.bool, device=target.device).triu(1)
        for layer in self.decoder:
            tokens = layer(tokens, memory, hidden)
        return F.linear(tokens, self.words.weight)


def build_transformer_big(*, length: int = 32) -> Workload:
    """The big translation transformer; one sample is one target token with its source token.

    A batch holds sentences of ``length`` tokens (our estimate of a mean sentence), the last one padded. A batch of
    fewer tokens is one shorter sentence, so count it at multiples of ``length``.
    """
    vocabulary = 33708

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        sentence = min(samples, length)
        count = math.ceil(samples / sentence)
        words = torch.randint(vocabulary, (count, sentence + 1), device=device)
        source = torch.randint(vocabulary, (count, sentence), device=device)
        return source, words[:, :-1].contiguous(), words[:, 1:].contiguous()

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        source, target, labels = batch
        return F.cross_entropy(module(source, target).flatten(0, 1), labels.flatten(), label_smoothing=0.1)

    return make_workload(
        "transformer_big", Translator(vocabulary=vocabulary), family="transformer", task_input="1", optimizer="adam",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip
