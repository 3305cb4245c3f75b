"""Flat regression trees: written from an XGBoost model, checked before use, evaluated with numpy alone."""

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.storage.errors import InputError, IntegrityError

__all__ = ["FlatForest", "ForestNodes", "flatten_xgboost", "forests_from_bytes", "forests_to_bytes"]

MAX_NODES = 2_000_000
MAX_TREES = 20_000
MAX_DEPTH = 64
#: Upper bound of the unpacked size of a ``trees.npz``: MAX_NODES nodes of at most 16 bytes, and headers.
MAX_UNPACKED_BYTES = 32 * 2**20
#: Rows times trees that are walked at once: the arrays of a step (8 bytes each) then stay in a 1 MiB cache.
_CHUNK_CELLS = 40_000
_LARGEST_COVER = float(np.finfo(np.float16).max)
_SMALLEST_COVER = float(np.finfo(np.float16).smallest_subnormal)
_COLUMNS: dict[str, tuple[type[np.generic], ...]] = {
    "tree_sizes": (np.int32,),
    "split": (np.uint16, np.uint32),
    "split_feature": (np.uint16,),
    "split_threshold": (np.float32,),
    "split_missing_left": (np.bool_,),
    "value": (np.float32,),
    "cover": (np.float16,),
    "base_score": (np.float32,),
}


def _refuse(problem: str, *, got: object, expected: str) -> IntegrityError:
    return IntegrityError(f"tree arrays: {problem}", got=got, expected=expected, fix="publish the artifact again")


@dataclass(frozen=True, slots=True, eq=False)
class ForestNodes:
    """The nodes of a forest spelled out for walking; arrays over all nodes unless said otherwise.

    A row at node ``i`` goes on to ``child[i] + (cell >= threshold[i])``. A leaf is its own child and its threshold is
    NaN, which no cell reaches, so that rows stay there and all trees take the same number of steps. ``column[i]`` is
    twice the feature of the split, plus one where a missing value goes right: a row holds each feature twice, with
    minus and with plus infinity in place of NaN. ``levels`` holds, for each depth, the inner nodes of all trees, and
    ``width`` says how many features a row needs at least.
    """

    roots: npt.NDArray[np.int64]
    child: npt.NDArray[np.int64]
    column: npt.NDArray[np.int64]
    threshold: npt.NDArray[np.float32]
    value: npt.NDArray[np.float32]
    leaves: npt.NDArray[np.int64]
    levels: tuple[npt.NDArray[np.int64], ...]
    width: int


@dataclass(frozen=True, eq=False)
class FlatForest:
    """A sum of regression trees: the nodes of all trees, each tree breadth first, its children implied.

    ``tree_sizes`` counts the nodes of each tree. ``split`` is 0 at a leaf and else 1 + the row of the split table:
    a row of data goes left when ``row[split_feature] < split_threshold`` (float32), right otherwise, and a missing
    value (NaN) goes left when ``split_missing_left``. The children of the k-th inner node of a tree (from 0) are its
    nodes ``2k + 1`` and ``2k + 2``. ``value`` and ``cover`` are those of the leaves in their order; cover is the sum
    of the weights of the training rows that ended there, or an empty array where covers were left out.
    """

    tree_sizes: npt.NDArray[np.int32]
    split: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    split_feature: npt.NDArray[np.uint16]
    split_threshold: npt.NDArray[np.float32]
    split_missing_left: npt.NDArray[np.bool_]
    value: npt.NDArray[np.float32]
    cover: npt.NDArray[np.float16]
    base_score: npt.NDArray[np.float32]

    def check(self, *, feature_count: int) -> None:
        """Refuse any structure that the evaluator could not walk to its end.

        Raises ``IntegrityError`` for arrays of another type or length, too many trees or nodes, nodes that do not
        close to one binary tree each, a split outside the table, a feature outside ``feature_count``, a threshold or
        value that is not finite, a cover that is not positive, or a tree deeper than ``MAX_DEPTH``.
        """
        for name, kinds in _COLUMNS.items():
            array = getattr(self, name)
            if array.dtype not in [np.dtype(kind) for kind in kinds] or array.ndim != 1:
                raise _refuse(
                    f"{name} has the wrong form",
                    got=f"{array.dtype} with {array.ndim} dimensions",
                    expected=f"one dimension of {' or '.join(str(np.dtype(kind)) for kind in kinds)}",
                )
        count, trees = len(self.split), len(self.tree_sizes)
        if not 0 < count <= MAX_NODES or not 0 < trees <= MAX_TREES:
            raise _refuse(
                "too many or no nodes",
                got=f"{count} nodes in {trees} trees",
                expected=f"1..{MAX_NODES} nodes in 1..{MAX_TREES} trees",
            )
        if len(self.base_score) != 1 or not np.isfinite(self.base_score).all():
            raise _refuse("the base score is not usable", got=self.base_score, expected="one finite number")
        if self.tree_sizes.min() < 1 or self.tree_sizes.sum(dtype=np.int64) != count:
            raise _refuse("tree sizes do not add up", got=self.tree_sizes[:5], expected=f"positive, {count} in all")
        inner = self.split != 0
        leaves = count - int(inner.sum())
        splits = len(self.split_feature)
        lengths = {name: len(getattr(self, name)) for name in ("split_threshold", "split_missing_left")}
        if set(lengths.values()) != {splits}:
            raise _refuse("columns of the split table differ in length", got=lengths, expected=str(splits))
        if len(self.value) != leaves or len(self.cover) not in (0, leaves):
            raise _refuse(
                "the leaf columns differ in length",
                got=f"{len(self.value)} values and {len(self.cover)} covers",
                expected=f"{leaves} values, and as many covers or none",
            )
        if int(self.split.max()) > splits:
            raise _refuse("split index out of range", got=int(self.split.max()), expected=f"0..{splits}")
        if splits and int(self.split_feature.max()) >= feature_count:
            raise _refuse(
                "feature index out of range", got=int(self.split_feature.max()), expected=f"0..{feature_count - 1}"
            )
        if not (np.isfinite(self.split_threshold).all() and np.isfinite(self.value).all()):
            raise _refuse("a threshold or leaf value is not finite", got="NaN or infinity", expected="finite numbers")
        if not (np.isfinite(self.cover) & (self.cover > 0)).all():
            raise _refuse("a cover is not positive", got="zero, negative, NaN or infinity", expected="positive numbers")
        roots, left = self._place_children(inner)
        # A tree of k inner nodes has 2k + 1 nodes, each child named once; parents before children exclude a cycle.
        if (2 * np.add.reduceat(inner, roots, dtype=np.int64) + 1 != self.tree_sizes).any():
            raise _refuse("a tree does not close", got="other node counts", expected="2k + 1 nodes for k inner ones")
        if (left[inner] <= np.flatnonzero(inner)).any():
            raise _refuse("the nodes are out of order", got="a child at or before its parent", expected="breadth first")
        _ = self.nodes  # refuses a tree that is too deep, and the first prediction needs it anyway

    def _place_children(self, inner: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First node of each tree, and the place of the left child of each node if it is an inner one."""
        roots = np.cumsum(self.tree_sizes, dtype=np.int64) - self.tree_sizes
        before = np.cumsum(inner, dtype=np.int64) - inner
        return roots, 2 * before + np.repeat(roots + 1 - 2 * before[roots], self.tree_sizes)

    @cached_property
    def nodes(self) -> ForestNodes:
        """The nodes spelled out. Raises ``IntegrityError`` for a tree deeper than ``MAX_DEPTH``."""
        inner = self.split != 0
        roots, left = self._place_children(inner)
        level = roots
        levels: list[npt.NDArray[np.int64]] = []
        while len(level := level[inner[level]]):
            if len(levels) == MAX_DEPTH:
                raise _refuse("a tree is too deep", got=f"more than {MAX_DEPTH}", expected=f"at most {MAX_DEPTH}")
            levels.append(level)
            level = np.stack([left[level], left[level] + 1], axis=1).ravel()
        leaves = np.flatnonzero(~inner)
        child = np.where(inner, left, np.arange(len(inner)))
        column = np.zeros(len(inner), dtype=np.int64)
        threshold = np.full(len(inner), np.nan, dtype=np.float32)
        value = np.zeros(len(inner), dtype=np.float32)
        row = self.split[inner] - 1
        column[inner] = (2 * self.split_feature.astype(np.int64) + ~self.split_missing_left)[row]
        threshold[inner] = self.split_threshold[row]
        value[leaves] = self.value
        return ForestNodes(
            roots=roots,
            child=child,
            column=column,
            threshold=threshold,
            value=value,
            leaves=leaves,
            levels=tuple(levels),
            width=int(column.max()) // 2 + 1,
        )

    def split_rows(self, rows: npt.ArrayLike) -> Iterator[npt.NDArray[np.float32]]:
        """``rows`` (n, features) as float32 matrices of few rows each, so that a walk stays in cache.

        Raises ``InputError`` for rows that are not a matrix or lack a feature of the trees.
        """
        matrix = np.asarray(rows, dtype=np.float32)
        if matrix.ndim != 2 or matrix.shape[1] < self.nodes.width:
            raise InputError(
                "rows do not fit the trees",
                got=f"shape {matrix.shape}",
                expected=f"(rows, at least {self.nodes.width} features)",
                fix="pass one column for each feature, in the order of training",
            )
        step = max(1, _CHUNK_CELLS // len(self.nodes.roots))
        return (matrix[start : start + step] for start in range(0, len(matrix), step))

    def descend(self, chunk: npt.NDArray[np.float32]) -> Iterator[npt.NDArray[np.int64]]:
        """The node of each row in each tree, shape (rows, trees): first the roots, then level by level to the leaves.

        ``chunk`` comes from ``split_rows``.
        """
        nodes = self.nodes
        missing = np.isnan(chunk)
        cells = np.empty((*chunk.shape, 2), dtype=np.float32)
        cells[..., 0] = np.where(missing, -np.inf, chunk)
        cells[..., 1] = np.where(missing, np.inf, chunk)
        cells = cells.ravel()
        first = (np.arange(len(chunk)) * (2 * chunk.shape[1]))[:, None]
        node = np.broadcast_to(nodes.roots, (len(chunk), len(nodes.roots)))
        yield node
        for _ in nodes.levels:
            cell = nodes.column.take(node)
            cell += first
            goes_right = cells.take(cell) >= nodes.threshold.take(node)
            node = nodes.child.take(node)
            node += goes_right
            yield node

    def find_leaves(self, rows: npt.ArrayLike) -> Iterator[npt.NDArray[np.int64]]:
        """The leaf of each row in each tree, shape (rows of the chunk, trees), for each chunk of ``split_rows``."""
        for chunk in self.split_rows(rows):
            for node in self.descend(chunk):
                leaf = node
            yield leaf

    def leaf_values(self, rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The value of each tree for each row; ``rows`` has shape (n, features), the result (n, trees)."""
        chunks = [self.nodes.value.take(leaf) for leaf in self.find_leaves(rows)]
        return np.concatenate([np.empty((0, len(self.tree_sizes)), dtype=np.float32), *chunks])

    def predict(self, rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The base score plus the sum over all trees for each row, shape (n,).

        Sums run in float32 and in the order of the trees, as XGBoost's CPU predictor does; ``add.accumulate`` keeps
        that order, where ``sum`` adds in pairs.
        """
        totals = [np.empty(0, dtype=np.float32)]
        for leaf in self.find_leaves(rows):
            terms = np.empty((leaf.shape[0], leaf.shape[1] + 1), dtype=np.float32)
            terms[:, 0] = self.base_score[0]
            terms[:, 1:] = self.nodes.value.take(leaf)
            totals.append(np.add.accumulate(terms, axis=1)[:, -1])
        return np.concatenate(totals)

    @cached_property
    def node_cover(self) -> npt.NDArray[np.float64]:
        """Sum of the weights of the training rows that passed each node, shape (nodes,).

        Raises ``InputError`` when the forest was written without covers.
        """
        if not len(self.cover):
            raise InputError(
                "the trees carry no covers",
                got="a forest without training weights",
                expected="the training weight of each leaf",
                fix="write the forest with flatten_xgboost(..., keep_cover=True)",
            )
        cover = np.zeros(len(self.split))
        cover[self.nodes.leaves] = self.cover
        for level in reversed(self.nodes.levels):
            left = self.nodes.child[level]
            cover[level] = cover[left] + cover[left + 1]
        return cover


def flatten_xgboost(model_json: bytes, *, keep_cover: bool = True) -> FlatForest:
    """Flat arrays of an XGBoost model that was saved as JSON (gbtree, numeric splits, one output).

    Nodes are numbered anew, breadth first, so that deleted nodes vanish. The cover of a leaf is XGBoost's
    ``sum_hessian``, for the squared error the sum of row weights, within the range of float16. Raises
    ``IntegrityError`` for boosters, splits or outputs of another kind and for trees deeper than ``MAX_DEPTH``.
    """
    learner = json.loads(model_json)["learner"]
    booster = learner["gradient_booster"]
    if booster["name"] != "gbtree":
        raise _refuse("another kind of booster", got=booster["name"], expected="gbtree")
    if int(learner["learner_model_param"].get("num_class", "0")) > 1:
        raise _refuse("several classes", got=learner["learner_model_param"]["num_class"], expected="a regression")
    trees = booster["model"]["trees"]
    if any(any(tree["split_type"]) or tree["categories"] for tree in trees):
        raise _refuse("another kind of split", got="categorical", expected="numeric splits")

    def column(name: str, kind: type[np.generic]) -> npt.NDArray[Any]:
        return np.concatenate([np.asarray(tree[name], dtype=kind) for tree in trees])

    stored = np.array([len(tree["left_children"]) for tree in trees])
    tree_of, offset = np.repeat(np.arange(len(trees)), stored), np.repeat(np.cumsum(stored) - stored, stored)
    left, right = (column(f"{side}_children", np.int64) for side in ("left", "right"))
    level = np.cumsum(stored) - stored
    levels: list[npt.NDArray[np.int64]] = []
    while len(level):
        if len(levels) > MAX_DEPTH or len(level) > len(left):
            raise _refuse("a cycle, or a tree is too deep", got=f"over {MAX_DEPTH}", expected=f"at most {MAX_DEPTH}")
        levels.append(level)
        level = level[left[level] >= 0]
        level = (np.stack([left[level], right[level]], axis=1) + offset[level, None]).ravel()
    order = np.concatenate(levels)
    order = order[np.argsort(tree_of[order], kind="stable")]
    is_leaf = left[order] < 0
    number = column("split_conditions", np.float32)[order]
    splits = np.stack(
        [column("split_indices", np.float64)[order], number, column("default_left", np.float64)[order]], axis=1
    )[~is_leaf]
    table, row = np.unique(splits, axis=0, return_inverse=True)
    split = np.zeros(len(order), dtype=np.uint32)
    split[~is_leaf] = row.ravel() + 1
    cover = column("sum_hessian", np.float64)[order][is_leaf].clip(_SMALLEST_COVER, _LARGEST_COVER)
    return FlatForest(
        tree_sizes=np.bincount(tree_of[order], minlength=len(trees)).astype(np.int32),
        split=split.astype(np.uint16) if len(table) < 2**16 else split,
        split_feature=table[:, 0].astype(np.uint16),
        split_threshold=table[:, 1].astype(np.float32),
        split_missing_left=table[:, 2] != 0,
        value=number[is_leaf],
        cover=cover.astype(np.float16) if keep_cover else np.empty(0, dtype=np.float16),
        base_score=np.array([float(learner["learner_model_param"]["base_score"].strip("[]"))], dtype=np.float32),
    )


def forests_to_bytes(forests: Mapping[str, FlatForest]) -> bytes:
    """One ``trees.npz`` with the arrays of several forests, named ``<forest>.<column>``."""
    buffer = io.BytesIO()
    arrays = {f"{name}.{column}": getattr(forest, column) for name, forest in forests.items() for column in _COLUMNS}
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def forests_from_bytes(data: bytes, *, feature_counts: Mapping[str, int]) -> dict[str, FlatForest]:
    """The forests of a ``trees.npz``, each checked; exactly those that ``feature_counts`` names.

    Raises ``IntegrityError`` when the file is not such an archive, unpacks to more than ``MAX_UNPACKED_BYTES``, holds
    other arrays, or a forest does not pass ``FlatForest.check``.
    """
    expected = {f"{name}.{column}" for name in feature_counts for column in _COLUMNS}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            names = [entry.filename.removesuffix(".npy") for entry in archive.infolist()]
        if unpacked > MAX_UNPACKED_BYTES:
            raise _refuse("too large when unpacked", got=unpacked, expected=f"at most {MAX_UNPACKED_BYTES} bytes")
        if sorted(names) != sorted(expected):
            raise _refuse("wrong members", got=sorted(set(names) ^ expected)[:5], expected="the arrays of the stages")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            loaded = {key: arrays[key] for key in expected}
        # numpy returns a member that is not an array as its bytes.
        if others := sorted(key for key, array in loaded.items() if not isinstance(array, np.ndarray)):
            raise _refuse("the file cannot be read", got=f"{others[0]} is no array", expected="arrays alone")
    # Readers of zip, deflate and npy raise a dozen kinds of errors for damaged input, and not all are documented.
    except Exception as error:
        if isinstance(error, IntegrityError):
            raise
        raise _refuse("the file cannot be read", got=error, expected="a trees.npz without objects") from error
    forests = {}
    for name, feature_count in feature_counts.items():
        forest = FlatForest(**{column: loaded[f"{name}.{column}"] for column in _COLUMNS})
        forest.check(feature_count=feature_count)
        forests[name] = forest
    return forests
