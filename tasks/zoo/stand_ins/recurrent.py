"""Stand-ins of recurrent networks: GNMT, RNN-T and Tacotron 2, whose decoder runs one frame after another."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.tasks.workloads import Workload
from precision_time.tasks.zoo.stand_ins.optimizers import make_workload

__all__ = ["build_gnmt", "build_rnnt", "build_tacotron2"]

#: A sentence pair has 24.4 token pairs in the mean in the rows of lambdal/deeplearning-benchmark. The nearest whole
#: numbers are 24 source tokens and 25 target tokens, which include the end mark.
GNMT_SOURCE, GNMT_TARGET = 24, 25

#: An utterance of LJSpeech has 565 mel frames and 100 characters in the mean, but a batch is padded to its longest one.
#: In batches of some tens we estimate 860 frames (10 s at 86.13 frames per second) and 160 characters.
TACOTRON_FRAMES, TACOTRON_FRAMES_MEAN, TACOTRON_CHARACTERS, TACOTRON_CHARACTERS_MEAN = 860, 565, 160, 100


class NormedAttention(nn.Module):
    """Additive attention with a normed score vector (Bahdanau), all queries at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score = nn.Parameter(torch.empty(width).uniform_(-0.1, 0.1))
        self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(width))

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        """queries [T, B, W], memory [S, B, W] -> contexts [T, B, W]."""
        memory = memory.transpose(0, 1)
        sums = self.query(queries.transpose(0, 1)).unsqueeze(2) + self.key(memory).unsqueeze(1) + self.bias
        vector = self.score / self.score.norm() * self.scale
        weights = torch.tanh(sums).matmul(vector).softmax(dim=-1)
        return torch.bmm(weights, memory).transpose(0, 1)


class Gnmt(nn.Module):
    """GNMT with 4 + 4 LSTM layers of 1024.

    Keeps: the shared embedding, the bidirectional first layer, shortcuts from the third layer on, attention computed
    from the first decoder layer for all teacher-forced steps at once, dropout, a full softmax with label smoothing.
    Leaves out: packing by length (every sentence has the mean length) and the fused attention kernel.
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/Translation/GNMT (160.7 M parameters; recalled, not re-checked).
    """

    def __init__(self, *, vocabulary: int = 32320, width: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.first = nn.LSTM(width, width, bidirectional=True)
        self.second = nn.LSTM(2 * width, width)
        self.encoder = nn.ModuleList(nn.LSTM(width, width) for _ in range(2))
        self.attending = nn.LSTM(width, width)
        self.attention = NormedAttention(width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width) for _ in range(3))
        self.classifier = nn.Linear(width, vocabulary)
        self.dropout = nn.Dropout(0.2)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source [B, S], target [B, T] -> logits [T, B, vocabulary]."""
        states = self.dropout(self.embedding(source.t()))
        states = self.dropout(self.first(states)[0])
        states = self.second(states)[0]
        for layer in self.encoder:
            states = states + layer(self.dropout(states))[0]
        steps = self.attending(self.dropout(self.embedding(target.t())))[0]
        context = self.attention(steps, states)
        for index, layer in enumerate(self.decoder):
            changed = layer(self.dropout(torch.cat([steps, context], dim=2)))[0]
            steps = changed + steps if index else changed
        logits: Tensor = self.classifier(steps)
        return logits


def build_gnmt(*, source: int = GNMT_SOURCE, target: int = GNMT_TARGET) -> Workload:
    """GNMT; one sample is a sentence pair of ``source`` and ``target`` tokens."""
    vocabulary = 32320

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        words = torch.randint(1, vocabulary, (samples, target + 1), device=device)
        return (
            torch.randint(1, vocabulary, (samples, source), device=device),
            words[:, :-1].contiguous(),
            words[:, 1:].contiguous(),
        )

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        sentence, words, labels = batch
        return F.cross_entropy(
            module(sentence, words).flatten(0, 1), labels.t().flatten(), ignore_index=0, label_smoothing=0.1
        )

    return make_workload(
        "gnmt", Gnmt(vocabulary=vocabulary), family="gnmt", task_input=str(target), optimizer="adam",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip


class RnnT(nn.Module):
    """RNN-T of MLPerf Training.

    Keeps: an encoder of 2 + 3 LSTM layers of 1024 with two frames stacked between them, a prediction network of two
    layers of 512, the joint network over every (frame, token) pair with 1,024 classes.
    Leaves out: the sum over alignments of the transducer loss (one small fused kernel): the log-probabilities are
    computed, and those of the blank and of the label are averaged. The batch holds the features, not audio.
    Sizes: mlcommons/training, rnn_speech_recognition (49 M parameters; recalled, not re-checked).
    """

    def __init__(self, *, classes: int = 1024, features: int = 240, width: int = 1024, joint: int = 512) -> None:
        super().__init__()
        self.before = nn.LSTM(features, width, 2, dropout=0.1, batch_first=True)
        self.after = nn.LSTM(2 * width, width, 3, dropout=0.1, batch_first=True)
        self.words = nn.Embedding(classes - 1, joint)
        self.prediction = nn.LSTM(joint, joint, 2, dropout=0.3, batch_first=True)
        self.of_frame, self.of_word = nn.Linear(width, joint), nn.Linear(joint, joint)
        self.output = nn.Sequential(nn.ReLU(), nn.Dropout(0.3), nn.Linear(joint, classes))

    def forward(self, frames: Tensor, words: Tensor) -> Tensor:
        """frames [B, T, features], words [B, U] -> logits [B, T / 2, U + 1, classes]."""
        states = self.before(frames)[0]
        states = self.after(states.unflatten(1, (-1, 2)).flatten(2))[0]
        start = F.pad(self.words(words), (0, 0, 1, 0))
        predicted = self.prediction(start)[0]
        logits: Tensor = self.output(self.of_frame(states).unsqueeze(2) + self.of_word(predicted).unsqueeze(1))
        return logits


def build_rnnt(*, frames: int = 410, words: int = 64) -> Workload:
    """RNN-T; one sample is an utterance of 12.3 s: ``frames`` stacks of three mel frames, ``words`` word pieces.

    The number of word pieces is our estimate for LibriSpeech; ``frames`` must be even.
    """
    classes, features = 1024, 240

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        return (
            torch.randn(samples, frames, features, device=device),
            torch.randint(classes - 1, (samples, words), device=device),
        )

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        sounds, labels = batch
        scores = module(sounds, labels).log_softmax(dim=-1)
        index = labels[:, None, :, None].expand(-1, scores.shape[1], -1, -1)
        loss: Tensor = -scores[..., -1].mean() - scores[:, :, :-1].gather(-1, index).mean()
        return loss

    return make_workload(
        "rnnt", RnnT(classes=classes, features=features), family="rnnt", task_input=str(frames), optimizer="adamw",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip


def _voice_convolution(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv1d(before, after, 5, padding=2), nn.BatchNorm1d(after)]


class FrameDecoder(nn.Module):
    """The decoder of Tacotron 2: two LSTM cells with location-sensitive attention, one mel frame after another."""

    def __init__(self, *, mels: int, memory: int, cell: int = 1024, prenet: int = 256, attention: int = 128) -> None:
        super().__init__()
        self.mels, self.cell = mels, cell
        self.prenet = nn.Sequential(
            nn.Linear(mels, prenet, bias=False), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(prenet, prenet, bias=False), nn.ReLU(), nn.Dropout(0.5),
        )  # fmt: skip
        self.attending = nn.LSTMCell(prenet + memory, cell)
        self.query, self.key = nn.Linear(cell, attention, bias=False), nn.Linear(memory, attention, bias=False)
        self.places = nn.Conv1d(2, 32, 31, padding=15, bias=False)
        self.place, self.energy = nn.Linear(32, attention, bias=False), nn.Linear(attention, 1, bias=False)
        self.decoding = nn.LSTMCell(cell + memory, cell)
        self.frame, self.gate = nn.Linear(cell + memory, mels), nn.Linear(cell + memory, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, memory: Tensor, hidden: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """memory [B, L, M], hidden [B, L] (true = padding), frames [B, T, mels] -> mels [B, T, mels], stops [B, T]."""
        samples, length, _ = memory.shape
        inputs = self.prenet(F.pad(frames[:, :-1], (0, 0, 1, 0)))
        keys = self.key(memory)
        attended = (memory.new_zeros(samples, self.cell), memory.new_zeros(samples, self.cell))
        decoded = (memory.new_zeros(samples, self.cell), memory.new_zeros(samples, self.cell))
        weights, total = memory.new_zeros(samples, length), memory.new_zeros(samples, length)
        context = memory.new_zeros(samples, memory.shape[2])
        mels, stops = [], []
        for step in inputs.unbind(1):
            attended = self.attending(torch.cat([step, context], dim=1), attended)
            query = self.query(self.dropout(attended[0])).unsqueeze(1)
            places = self.place(self.places(torch.stack([weights, total], dim=1)).transpose(1, 2))
            energies = self.energy(torch.tanh(query + places + keys)).squeeze(2)
            weights = energies.masked_fill(hidden, float("-inf")).softmax(dim=1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            total = total + weights
            decoded = self.decoding(torch.cat([attended[0], context], dim=1), decoded)
            state = torch.cat([self.dropout(decoded[0]), context], dim=1)
            mels.append(self.frame(state))
            stops.append(self.gate(state))
        return torch.stack(mels, dim=1), torch.cat(stops, dim=1)


class Tacotron2(nn.Module):
    """Tacotron 2, from characters to mel frames.

    Keeps: three convolutions and a bidirectional LSTM over the characters, a teacher-forced decoder that runs step
    after step in a loop of LSTM cells, a convolutional postnet, padding to the longest utterance of the batch.
    Leaves out: packing of the characters by length, and dropout on the cell's own recurrence.
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/SpeechSynthesis/Tacotron2 (28.2 M parameters; recalled, not re-checked).
    """

    def __init__(self, *, symbols: int = 148, mels: int = 80, width: int = 512) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [*_voice_convolution(width, width), nn.ReLU(), nn.Dropout(0.5)]
        self.convolutions = nn.Sequential(*layers)
        self.encoder = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.decoder = FrameDecoder(mels=mels, memory=width)
        layers = []
        for before in (mels, width, width, width):
            layers += [*_voice_convolution(before, width), nn.Tanh(), nn.Dropout(0.5)]
        self.postnet = nn.Sequential(*layers, *_voice_convolution(width, mels), nn.Dropout(0.5))

    def forward(self, text: Tensor, characters: Tensor, frames: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """text [B, L], characters [B], frames [B, mels, T], lengths [B] -> two mels [B, mels, T], stops [B, T]."""
        memory = self.encoder(self.convolutions(self.symbols(text).transpose(1, 2)).transpose(1, 2))[0]
        hidden = torch.arange(text.shape[1], device=text.device) >= characters[:, None]
        mels, stops = self.decoder(memory, hidden, frames.transpose(1, 2))
        mels = mels.transpose(1, 2)
        refined = mels + self.postnet(mels)
        late = torch.arange(frames.shape[2], device=text.device) >= lengths[:, None]
        silent = late.unsqueeze(1)
        return mels.masked_fill(silent, 0.0), refined.masked_fill(silent, 0.0), stops.masked_fill(late, 1e3)


def build_tacotron2(*, frames: int = TACOTRON_FRAMES, characters: int = TACOTRON_CHARACTERS) -> Workload:
    """Tacotron 2; one sample is an utterance padded to ``frames`` mel frames and ``characters`` characters.

    The work of a padded frame is that of any other, so throughputs printed in mel frames (565 to an utterance in the
    mean) come from batches that decode ``frames`` steps.
    """
    mels, symbols = 80, 148

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, ...]:
        text = torch.randint(symbols, (samples, characters), device=device)
        text_lengths = torch.full((samples,), min(characters, TACOTRON_CHARACTERS_MEAN), device=device)
        lengths = torch.full((samples,), min(frames, TACOTRON_FRAMES_MEAN), device=device)
        return text, text_lengths, torch.randn(samples, mels, frames, device=device), lengths

    def compute_loss(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        *_, target, lengths = batch
        coarse, refined, stops = module(*batch)
        ended = (torch.arange(stops.shape[1], device=stops.device) >= lengths[:, None] - 1).to(stops.dtype)
        gate = F.binary_cross_entropy_with_logits(stops, ended)
        return F.mse_loss(coarse, target) + F.mse_loss(refined, target) + gate

    return make_workload(
        "tacotron2", Tacotron2(symbols=symbols, mels=mels), family="tacotron", task_input=str(frames), optimizer="adam",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip
