"""Flat regression trees: written from an XGBoost model, checked before use, evaluated with numpy alone."""

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precision_time.storage.errors import IntegrityError

__all__ = ["FlatForest", "flatten_xgboost", "forests_from_bytes", "forests_to_bytes"]

MAX_NODES = 2_000_000
MAX_TREES = 20_000
MAX_DEPTH = 64
#: Upper bound of the unpacked size of a ``trees.npz``: MAX_NODES nodes of 17 bytes, and headers.
MAX_UNPACKED_BYTES = 64 * 2**20
_LEAF = -1
_COLUMNS: dict[str, type[np.generic]] = {
    "feature": np.int32,
    "threshold": np.float32,
    "left": np.int32,
    "right": np.int32,
    "missing_left": np.bool_,
    "value": np.float32,
    "roots": np.int32,
    "base_score": np.float32,
}


def _refuse(what: str, *, got: object, expected: str) -> IntegrityError:
    return IntegrityError(f"tree arrays: {what}", got=got, expected=expected, fix="publish the artifact again")


@dataclass(frozen=True, slots=True, eq=False)
class FlatForest:
    """A sum of regression trees as flat arrays over all nodes of all trees.

    A node ``i`` with ``left[i] == -1`` is a leaf of value ``value[i]``; any other sends a row to ``left[i]`` when
    ``row[feature[i]] < threshold[i]`` (float32), to ``right[i]`` otherwise, and a missing value (NaN) to the left
    when ``missing_left[i]``. ``roots`` holds the first node of each tree; nodes of a tree follow their parent.
    """

    feature: npt.NDArray[np.int32]
    threshold: npt.NDArray[np.float32]
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    missing_left: npt.NDArray[np.bool_]
    value: npt.NDArray[np.float32]
    roots: npt.NDArray[np.int32]
    base_score: npt.NDArray[np.float32]

    def check(self, *, feature_count: int) -> None:
        """Refuse any structure the evaluator could not walk to an end.

        Raises ``IntegrityError`` for arrays of unequal length or another type, too many trees or nodes, a child
        outside its tree, a cycle or a shared node, a feature outside ``feature_count``, a threshold or value that is
        not finite, or a tree deeper than ``MAX_DEPTH``.
        """
        for name, kind in _COLUMNS.items():
            array = getattr(self, name)
            if array.dtype != np.dtype(kind) or array.ndim != 1:
                raise _refuse(
                    f"{name} has the wrong form",
                    got=f"{array.dtype} with {array.ndim} dimensions",
                    expected=f"one dimension of {np.dtype(kind)}",
                )
        count = len(self.feature)
        lengths = {name: len(getattr(self, name)) for name in _COLUMNS if name not in ("roots", "base_score")}
        if len(set(lengths.values())) != 1:
            raise _refuse("columns differ in length", got=lengths, expected="one length")
        if not 0 < count <= MAX_NODES or not 0 < len(self.roots) <= MAX_TREES:
            raise _refuse(
                "too many or no nodes",
                got=f"{count} nodes in {len(self.roots)} trees",
                expected=f"1..{MAX_NODES} nodes in 1..{MAX_TREES} trees",
            )
        if len(self.base_score) != 1 or not np.isfinite(self.base_score).all():
            raise _refuse("base score", got=self.base_score, expected="one finite number")
        if self.roots[0] != 0 or (np.diff(self.roots) <= 0).any() or self.roots[-1] >= count:
            raise _refuse("roots", got=self.roots[:5], expected="increasing node indices from 0")
        if not (np.isfinite(self.threshold).all() and np.isfinite(self.value).all()):
            raise _refuse("a threshold or leaf value is not finite", got="NaN or infinity", expected="finite numbers")
        leaf = self.left == _LEAF
        if (leaf != (self.right == _LEAF)).any():
            raise _refuse(
                "a node has one child", got=int((leaf != (self.right == _LEAF)).sum()), expected="none or two"
            )
        nodes = np.arange(count, dtype=np.int32)
        inner = nodes[~leaf]
        if ((self.feature[inner] < 0) | (self.feature[inner] >= feature_count)).any():
            raise _refuse(
                "feature index",
                got=f"{self.feature[inner].min()}..{self.feature[inner].max()}",
                expected=f"0..{feature_count - 1}",
            )
        tree = np.searchsorted(self.roots, nodes, side="right")
        children = np.concatenate([self.left[inner], self.right[inner]])
        parents = np.concatenate([inner, inner])
        if ((children < 0) | (children >= count)).any() or (tree[children] != tree[parents]).any():
            raise _refuse("child index", got=f"{children.min()}..{children.max()}", expected="a node of the same tree")
        # A child that follows its parent cannot close a cycle; one parent for each node but the roots makes it a tree.
        if (children <= parents).any() or len(np.unique(children)) != len(children):
            raise _refuse(
                "a cycle or a shared node",
                got="a child at or before its parent, or with two parents",
                expected="each node after its only parent",
            )
        if len(children) + len(self.roots) != count or np.isin(self.roots, children).any():
            raise _refuse("nodes without a parent", got=count - len(children), expected=str(len(self.roots)))
        level = self.roots
        for _ in range(MAX_DEPTH + 1):
            level = level[self.left[level] != _LEAF]
            if not len(level):
                return
            level = np.concatenate([self.left[level], self.right[level]])
        raise _refuse("depth", got=f"more than {MAX_DEPTH}", expected=f"at most {MAX_DEPTH}")

    def leaf_values(self, rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """What each tree adds for each row; ``rows`` has shape (n, features), the result (n, trees)."""
        matrix = np.asarray(rows, dtype=np.float32)
        node = np.broadcast_to(self.roots, (len(matrix), len(self.roots))).copy()
        row_index = np.arange(len(matrix))[:, None]
        while True:
            child = self.left[node]
            inner = child != _LEAF
            if not inner.any():
                return self.value[node]
            cell = matrix[row_index, self.feature[node]]
            goes_left = np.where(np.isnan(cell), self.missing_left[node], cell < self.threshold[node])
            node = np.where(inner, np.where(goes_left, child, self.right[node]), node)

    def predict(self, rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The base score plus the sum over all trees for each row, shape (n,).

        Sums run in float32 and in the order of the trees, as XGBoost's CPU predictor does.
        """
        leaves = self.leaf_values(rows)
        total = np.full(len(leaves), self.base_score[0], dtype=np.float32)
        for tree in range(leaves.shape[1]):
            total += leaves[:, tree]
        return total


def flatten_xgboost(model_json: bytes) -> FlatForest:
    """Flat arrays of an XGBoost model that was saved as JSON (gbtree, numeric splits, one output).

    Nodes are numbered anew, parents first, so that deleted nodes vanish. Raises ``IntegrityError`` for boosters,
    splits or outputs of another kind.
    """
    learner = json.loads(model_json)["learner"]
    booster = learner["gradient_booster"]
    if booster["name"] != "gbtree":
        raise _refuse("booster kind", got=booster["name"], expected="gbtree")
    if int(learner["learner_model_param"].get("num_class", "0")) > 1:
        raise _refuse("number of classes", got=learner["learner_model_param"]["num_class"], expected="a regression")
    columns: dict[str, list[float]] = {name: [] for name in _COLUMNS}
    columns["base_score"] = [float(learner["learner_model_param"]["base_score"].strip("[]"))]
    for tree in booster["model"]["trees"]:
        if any(tree["split_type"]) or tree["categories"]:
            raise _refuse("a split", got="categorical", expected="numeric splits")
        offset = len(columns["feature"])
        columns["roots"].append(offset)
        order = [0]
        for old in order:
            left, right = tree["left_children"][old], tree["right_children"][old]
            is_leaf = left == _LEAF
            columns["left"].append(_LEAF if is_leaf else offset + len(order))
            columns["right"].append(_LEAF if is_leaf else offset + len(order) + 1)
            columns["feature"].append(0 if is_leaf else tree["split_indices"][old])
            columns["threshold"].append(0.0 if is_leaf else tree["split_conditions"][old])
            columns["missing_left"].append(bool(tree["default_left"][old]))
            columns["value"].append(tree["split_conditions"][old] if is_leaf else 0.0)
            if not is_leaf:
                order += [left, right]
    return FlatForest(**{name: np.asarray(columns[name], dtype=kind) for name, kind in _COLUMNS.items()})


def forests_to_bytes(forests: Mapping[str, FlatForest]) -> bytes:
    """One ``trees.npz`` with the arrays of several forests, named ``<forest>.<column>``."""
    buffer = io.BytesIO()
    arrays = {f"{name}.{column}": getattr(forest, column) for name, forest in forests.items() for column in _COLUMNS}
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def forests_from_bytes(data: bytes, *, feature_counts: Mapping[str, int]) -> dict[str, FlatForest]:
    """The forests of a ``trees.npz``, each checked; exactly those that ``feature_counts`` names.

    Raises ``IntegrityError`` when the file is not such an archive, unpacks to more than it may, holds other arrays,
    or a forest does not pass ``FlatForest.check``.
    """
    expected = {f"{name}.{column}" for name in feature_counts for column in _COLUMNS}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            names = [entry.filename.removesuffix(".npy") for entry in archive.infolist()]
        if unpacked > MAX_UNPACKED_BYTES:
            raise _refuse("unpacked size", got=unpacked, expected=f"at most {MAX_UNPACKED_BYTES} bytes")
        if sorted(names) != sorted(expected):
            raise _refuse("members", got=sorted(set(names) ^ expected)[:5], expected="exactly the arrays of the stages")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            loaded = {key: arrays[key] for key in expected}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, MemoryError, KeyError) as error:
        if isinstance(error, IntegrityError):
            raise
        raise _refuse("the file cannot be read", got=error, expected="a trees.npz without objects") from error
    forests = {}
    for name, feature_count in feature_counts.items():
        forest = FlatForest(**{column: loaded[f"{name}.{column}"] for column in _COLUMNS})
        forest.check(feature_count=feature_count)
        forests[name] = forest
    return forests
