"""Stand-ins of recommenders: DLRM, DCNv2, NCF, wide and deep, VAE-CF. Most of their weights are embedding tables."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.tasks.workloads import Workload
from precision_time.tasks.zoo.stand_ins.optimizers import make_workload

__all__ = ["CRITEO_ROWS", "build_dcnv2", "build_dlrm", "build_ncf", "build_vae_cf", "build_wide_and_deep"]

#: Rows of the 26 tables over Criteo 1TB by their size. Of NVIDIA/DeepLearningExamples: values that occur fewer than 15
#: times (small) or 3 times (large) share a row, none do (xlarge). Of MLPerf: at most 40 million rows, as DLRM
#: (mlperf) and DCNv2 (mlperf_multi_hot) have them.
CRITEO_ROWS: dict[str, tuple[int, ...]] = {
    "small": (
        7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209, 10667, 104, 4, 968,
        15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35,
    ),
    "large": (
        45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209, 11267, 128, 4,
        974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35,
    ),
    "xlarge": (
        227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10, 2209, 11938, 155, 4,
        976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36,
    ),
    "mlperf": (
        39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4,
        976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
    ),
    "mlperf_multi_hot": (
        40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4,
        976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
    ),
}  # fmt: skip

#: Values of one record for each of the 26 tables in MLPerf's multi-hot data.
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
ONE_HOT = (1,) * 26
DENSE, WIDTH = 13, 128


def _perceptron(*widths: int, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class JointTable(nn.Module):
    """All tables in one, as fused lookups keep them; its gradient is sparse and holds only the rows looked up."""

    starts: Tensor

    def __init__(self, rows: tuple[int, ...], *, width: int, hot: tuple[int, ...]) -> None:
        super().__init__()
        self.hot = hot
        self.pooled = any(count > 1 for count in hot)
        if self.pooled:
            self.table: nn.Module = nn.EmbeddingBag(sum(rows), width, mode="sum", sparse=True)
        else:
            self.table = nn.Embedding(sum(rows), width, sparse=True)
        firsts = [0, *itertools.accumulate(rows)][:-1]
        starts = [first for first, count in zip(firsts, hot, strict=True) for _ in range(count)]
        self.register_buffer("starts", torch.tensor(starts), persistent=False)
        self.bags = [0, *itertools.accumulate(hot)][:-1]

    def forward(self, values: Tensor) -> Tensor:
        """values [B, sum(hot)], each counted from the start of its own table -> [B, tables, W]."""
        values = values + self.starts
        if not self.pooled:
            looked_up: Tensor = self.table(values)
            return looked_up
        bags = torch.tensor(self.bags, device=values.device)
        first = torch.arange(len(values), device=values.device)[:, None] * values.shape[1]
        pooled: Tensor = self.table(values.flatten(), (first + bags).flatten())
        return pooled.view(len(values), len(self.bags), -1)


class Dlrm(nn.Module):
    """DLRM: perceptrons around the pairwise products of 26 embeddings.

    Keeps: one joint table looked up by one gather, sparse gradients, products of all pairs, padding to 480 inputs.
    Leaves out: splitting of the tables over GPUs with its all-to-all exchange, and fused kernels.
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/Recommendation/DLRM, whose README gives 4.2 G (small), 22.8 G (large)
    and 113 G (extra large) parameters.
    """

    pairs: Tensor

    def __init__(self, rows: tuple[int, ...], *, hot: tuple[int, ...]) -> None:
        super().__init__()
        self.tables = JointTable(rows, width=WIDTH, hot=hot)
        self.bottom = _perceptron(DENSE, 512, 256, WIDTH, last_relu=True)
        count = len(rows) + 1
        self.top = _perceptron(count * (count - 1) // 2 + WIDTH + 1, 1024, 1024, 512, 256, 1, last_relu=False)
        pairs = [row * count + column for row in range(count) for column in range(row)]
        self.register_buffer("pairs", torch.tensor(pairs), persistent=False)

    def forward(self, dense: Tensor, values: Tensor) -> Tensor:
        """dense [B, 13], values [B, sum(hot)] -> logits [B]."""
        features = self.bottom(dense)
        vectors = torch.cat([features.unsqueeze(1), self.tables(values).to(features.dtype)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        logits: Tensor = self.top(torch.cat([features, products, torch.zeros_like(features[:, :1])], dim=1))
        return logits.squeeze(1)


class CrossLayer(nn.Module):
    """A low-rank cross layer of DCNv2: the input times a projection of the state, plus the state."""

    def __init__(self, width: int, *, rank: int) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, start: Tensor, state: Tensor) -> Tensor:
        changed: Tensor = start * self.outward(self.inward(state)) + state
        return changed


class Dcnv2(nn.Module):
    """DLRM with three low-rank cross layers in place of the products.

    Keeps: cross layers of rank 512, one joint table, multi-hot pooling where chosen, sparse gradients.
    Leaves out: splitting of the tables over GPUs with its all-to-all exchange.
    Sizes: MLPerf Training (mlcommons/training, recommendation_v2): 204 million rows of 128.
    """

    def __init__(self, rows: tuple[int, ...], *, hot: tuple[int, ...]) -> None:
        super().__init__()
        self.tables = JointTable(rows, width=WIDTH, hot=hot)
        self.bottom = _perceptron(DENSE, 512, 256, WIDTH, last_relu=True)
        width = (len(rows) + 1) * WIDTH
        self.cross = nn.ModuleList(CrossLayer(width, rank=512) for _ in range(3))
        self.top = _perceptron(width, 1024, 1024, 512, 256, 1, last_relu=False)

    def forward(self, dense: Tensor, values: Tensor) -> Tensor:
        """dense [B, 13], values [B, sum(hot)] -> logits [B]."""
        features = self.bottom(dense)
        start = state = torch.cat([features.unsqueeze(1), self.tables(values).to(features.dtype)], dim=1).flatten(1)
        for layer in self.cross:
            state = layer(start, state)
        logits: Tensor = self.top(state)
        return logits.squeeze(1)


def _clicks(
    name: str, family: str, module: nn.Module, *, dense: int, rows: tuple[int, ...], hot: tuple[int, ...],
    optimizer: str,
) -> Workload:  # fmt: skip
    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        limits = torch.tensor(
            [size for size, count in zip(rows, hot, strict=True) for _ in range(count)], device=device
        )
        values = (torch.rand(samples, sum(hot), device=device, dtype=torch.float64) * limits).long()
        labels = torch.randint(2, (samples,), device=device).float()
        return torch.rand(samples, dense, device=device), values, labels

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        inputs, values, labels = batch
        return F.binary_cross_entropy_with_logits(module(inputs, values), labels)

    return make_workload(
        name, module, family=family, task_input="1", optimizer=optimizer,
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip


def build_dlrm(size: str) -> Workload:
    """DLRM with the tables ``CRITEO_ROWS[size]``; one sample is a record. Large ones fit on the meta device only."""
    rows = CRITEO_ROWS[size]
    module = Dlrm(rows, hot=ONE_HOT)
    return _clicks("dlrm", "dlrm", module, dense=DENSE, rows=rows, hot=ONE_HOT, optimizer="sgd")


def build_dcnv2(size: str, *, multi_hot: bool = False) -> Workload:
    """DCNv2 with the tables ``CRITEO_ROWS[size]``; one sample is a record, of 214 values where ``multi_hot``."""
    rows, hot = CRITEO_ROWS[size], MULTI_HOT if multi_hot else ONE_HOT
    module = Dcnv2(rows, hot=hot)
    return _clicks("dlrm-dcnv2", "dlrm", module, dense=DENSE, rows=rows, hot=hot, optimizer="adagrad")


class WideAndDeep(nn.Module):
    """Wide and deep: a linear model over categories beside a perceptron.

    Keeps: 13 tables of 19 to 128 columns, five hidden layers of 1,024, a wide weight for every category.
    Leaves out: multi-hot columns, and the second optimizer for the wide part.
    Sizes: NVIDIA/DeepLearningExamples, TensorFlow2/Recommendation/WideAndDeep (Outbrain), which tells no parameter
    count.
    """

    ROWS = (250000, 300000, 4, 100000, 5000, 2500, 4000, 2500, 300, 2000, 1000, 4000, 1000)
    COLUMNS = (128, 128, 19, 128, 128, 64, 64, 64, 64, 64, 64, 64, 64)

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(rows, columns, sparse=True) for rows, columns in zip(self.ROWS, self.COLUMNS, strict=True)
        )
        self.wide = JointTable(self.ROWS, width=1, hot=(1,) * len(self.ROWS))
        self.wide_dense = nn.Linear(DENSE, 1)
        layers: list[nn.Module] = []
        for before in (sum(self.COLUMNS) + DENSE, 1024, 1024, 1024, 1024):
            layers += [nn.Linear(before, 1024), nn.ReLU(), nn.Dropout(0.1)]
        self.deep = nn.Sequential(*layers, nn.Linear(1024, 1))

    def forward(self, dense: Tensor, values: Tensor) -> Tensor:
        """dense [B, 13], values [B, 13] -> logits [B]."""
        columns = [table(values[:, index]) for index, table in enumerate(self.tables)]
        deep = self.deep(torch.cat([*columns, dense], dim=1))
        logits: Tensor = deep + self.wide(values).sum(dim=1) + self.wide_dense(dense)
        return logits.squeeze(1)


def build_wide_and_deep() -> Workload:
    """Wide and deep over Outbrain clicks; one sample is a record."""
    module = WideAndDeep()
    rows = WideAndDeep.ROWS
    return _clicks("wide_and_deep", "wide_and_deep", module, dense=DENSE, rows=rows, hot=(1,) * len(rows),
                   optimizer="adagrad")  # fmt: skip


class NeuMf(nn.Module):
    """NCF (NeuMF) over MovieLens 20M.

    Keeps: two pairs of tables, dense gradients and a dense Adam over them, dropout.
    Leaves out: nothing that is trained.
    Sizes: NVIDIA/DeepLearningExamples, PyTorch/Recommendation/NCF (31.8 M parameters; recalled, not re-checked).
    """

    def __init__(self, *, users: int, items: int, factors: int = 64, widths: tuple[int, ...] = (256, 256, 128, 64)):
        super().__init__()
        self.factors = nn.ModuleList(nn.Embedding(rows, factors) for rows in (users, items))
        self.features = nn.ModuleList(nn.Embedding(rows, widths[0] // 2) for rows in (users, items))
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(0.5)]
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(factors + widths[-1], 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """users [B], items [B] -> logits [B]."""
        product = self.factors[0](users) * self.factors[1](items)
        mixed = self.layers(torch.cat([self.features[0](users), self.features[1](items)], dim=1))
        logits: Tensor = self.output(torch.cat([product, mixed], dim=1))
        return logits.squeeze(1)


def build_ncf() -> Workload:
    """NCF; one sample is a pair of a user and an item, true or sampled."""
    users, items = 138493, 26744

    def make_batch(samples: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        labels = torch.randint(2, (samples,), device=device).float()
        return (
            torch.randint(users, (samples,), device=device),
            torch.randint(items, (samples,), device=device),
            labels,
        )

    def compute_loss(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        viewers, films, labels = batch
        return F.binary_cross_entropy_with_logits(module(viewers, films), labels)

    return make_workload(
        "ncf", NeuMf(users=users, items=items), family="ncf", task_input="1", optimizer="adam",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip


class VaeCf(nn.Module):
    """A variational autoencoder over the films of a user.

    Keeps: 20,108-600-200-600-20,108, dropout on the input. Leaves out: the sparse product of the first layer (dense
    here).
    Sizes: NVIDIA/DeepLearningExamples, TensorFlow/Recommendation/VAE-CF; 24.5 M weights by those sizes.
    """

    def __init__(self, *, items: int = 20108, hidden: int = 600, latent: int = 200) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Dropout(0.5), nn.Linear(items, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent)
        )
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, items))

    def forward(self, films: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """films [B, items] -> logits [B, items], mean and log-variance [B, latent]."""
        mean, variance = self.encoder(F.normalize(films)).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * variance).exp()), mean, variance


def build_vae_cf() -> Workload:
    """VAE-CF over MovieLens 20M; one sample is a user."""
    items = 20108

    def make_batch(samples: int, device: torch.device | str) -> Tensor:
        return (torch.rand(samples, items, device=device) < 0.005).float()

    def compute_loss(module: nn.Module, batch: Tensor) -> Tensor:
        logits, mean, variance = module(batch)
        reconstruction = -(logits.log_softmax(dim=1) * batch).sum(dim=1).mean()
        loss: Tensor = reconstruction - 0.1 * (1 + variance - mean.square() - variance.exp()).sum(dim=1).mean()
        return loss

    return make_workload(
        "vae_cf", VaeCf(items=items), family="vae_cf", task_input=str(items), optimizer="adam",
        make_batch=make_batch, compute_loss=compute_loss,
    )  # fmt: skip
