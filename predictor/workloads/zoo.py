"""The zoo: shipped walks of named networks, looked up by name and input without torch."""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from precision_time.predictor.shipped import shipped_bytes, shipped_rows
from precision_time.predictor.workloads.families import find_family, fold_name
from precision_time.predictor.workloads.input_sizes import read_padded_size
from precision_time.predictor.workloads.walk import POLICIES, Walk
from precision_time.storage.columns import ColumnFile, encode_columns
from precision_time.storage.errors import InputError, IntegrityError

__all__ = ["COUNTS", "SIZES", "ZooEntry", "ZooTable", "find_entry", "find_name", "pack_entries", "zoo_names"]

#: Sizes that an entry may have.
SIZES = (
    "layers", "hidden_size", "heads", "kv_heads", "ffn_size", "vocab", "sequence_length", "experts", "active_experts",
    "active_params",
)  # fmt: skip
#: Whole numbers that every entry has.
COUNTS = ("params", "trained_params", "parameter_tensors", "buffer_bytes")

#: Endings of published names that do not change the network.
_ENDINGS = re.compile(r"_(?:hf|chat|instruct|it|pt|base_hf|uncased|v0_[1-9]|yaml|bf16|fp16)$")
#: Columns of text; all others hold numbers.
_TEXTS = ("name", "task_input", "source", "builds", "note")
_COUNT = re.compile("(?:fp32|amp)_(?:forward|backward)_")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooEntry:
    """A network at one input: what was built, its sizes, and its walks in fp32 and under 16-bit autocast (``amp``).

    ``sizes`` holds the known ones of ``SIZES``. ``walked_at`` is the input of the walk; where it differs from
    ``task_input``, the walks are scaled.
    """

    name: str
    task_input: str
    walked_at: str
    source: str
    builds: str
    note: str
    params: int
    trained_params: int
    parameter_tensors: int
    buffer_bytes: int
    sizes: Mapping[str, int] = field(hash=False)
    fp32: Walk = field(hash=False)
    amp: Walk = field(hash=False)

    @property
    def walks(self) -> dict[str, Walk]:
        """Both walks by policy."""
        return {"fp32": self.fp32, "amp": self.amp}


class ZooTable:
    """The rows of one zoo file. Raises ``IntegrityError`` for a damaged file and for one with other columns."""

    def __init__(self, data: bytes, *, name: str) -> None:
        self.name = name
        self._file = ColumnFile(data, name=name)
        try:
            self.names = self._file.text("name")
            self.inputs = self._file.text("task_input")
        except LookupError as error:
            raise self._misfit(error) from error
        #: rows by name, and names by folded spelling
        self.rows: dict[str, list[int]] = {}
        for place, network in enumerate(self.names):
            self.rows.setdefault(network, []).append(place)
        self.folded: dict[str, str] = {}
        for network in self.rows:
            # the folded spelling itself comes before a name with dashes
            if network == (folded := fold_name(network.strip())) or folded not in self.folded:
                self.folded[folded] = network

    @functools.cached_property
    def _texts(self) -> dict[str, list[str]]:
        return {column: self._file.text(column) for column in ("source", "builds", "note")}

    @functools.cached_property
    def _numbers(self) -> dict[str, Any]:
        columns = [*COUNTS, *SIZES, "usual", "same_as"]
        return {column: self._file.numbers(column) for column in columns}

    @functools.cached_property
    def _walks(self) -> dict[str, tuple[list[str], Any]]:
        walks = {}
        for policy in POLICIES:
            columns = [column for column in self._file.names if column.startswith(f"{policy}_")]
            names = [column.removeprefix(f"{policy}_") for column in columns]
            walks[policy] = (names, self._file.numbers(*columns))
        return walks

    def usual_row(self, network: str) -> int:
        """The row of a name at its usual input."""
        rows = self.rows[network]
        return next((row for row in rows if self._numbers["usual"][row]), rows[0])

    def read_entry(self, row: int, *, network: str) -> ZooEntry:
        """The entry of one row under the name ``network``."""
        try:
            walked_row = int(self._numbers["same_as"][row])
            place = row if walked_row < 0 else walked_row
            values = {column: int(self._numbers[column][place]) for column in COUNTS}
            sizes = {column: int(self._numbers[column][place]) for column in SIZES}
            return ZooEntry(
                name=network,
                task_input=self.inputs[row],
                walked_at=self.inputs[row],
                source=self._texts["source"][row],
                builds=self._texts["builds"][place],
                note=self._texts["note"][row],
                **values,
                sizes={name: size for name, size in sizes.items() if size > 0},
                fp32=self._read_walk("fp32", place),
                amp=self._read_walk("amp", place),
            )
        except (LookupError, ValueError, InputError) as error:
            raise self._misfit(error) from error

    def pack(self, networks: Iterable[str]) -> bytes:
        """A file with the rows of ``networks``, names of this table, and the rows that hold their walks."""
        walked_rows = self._numbers["same_as"]
        requested = {row for network in networks for row in self.rows[network]}
        rows = sorted(requested | {int(walked_rows[row]) for row in requested if walked_rows[row] >= 0})
        places = {row: place for place, row in enumerate(rows)}
        columns: dict[str, list[Any]] = {}
        for name in _TEXTS:
            texts = self._file.text(name)
            columns[name] = [texts[row] for row in rows]
        walked = [name for name in self._file.names if name.startswith(("fp32_", "amp_"))]
        for names in ([name for name in self._file.names if name not in (*_TEXTS, *walked)], walked):
            columns |= dict(zip(names, self._file.numbers(*names)[rows].T.tolist(), strict=True))
        columns["same_as"] = [places.get(row, -1) for row in columns["same_as"]]
        # Columns of counts that no network has are left out.
        return encode_columns(
            {name: values for name, values in columns.items() if any(values) or not _COUNT.match(name)}
        )

    def find_entry(self, network: str, task_input: str) -> ZooEntry:
        """The entry of a name of this table at ``task_input``; see the function ``find_entry``."""
        rows = self.rows[network]
        for row in rows:
            if self.inputs[row] == task_input:
                return self.read_entry(row, network=network)
        usual, size = self.usual_row(network), read_padded_size(task_input)
        known_sizes = {row: known for row in rows if (known := read_padded_size(self.inputs[row]))}
        if size is None or not known_sizes:
            return self.read_entry(usual, network=network)
        nearest = min(known_sizes, key=lambda row: (abs(math.log(size / known_sizes[row])), row != usual, row))
        entry, known = self.read_entry(nearest, network=network), known_sizes[nearest]
        return entry if known == size else _resize(entry, size / known, task_input=task_input)

    def _read_walk(self, policy: str, place: int) -> Walk:
        names, table = self._walks[policy]
        values = table[place].tolist()
        if not all(map(math.isfinite, values)):
            raise ValueError(f"row {place} of {policy} holds a value that is not a finite number")
        counts = ("forward_", "backward_")
        return Walk.from_columns(
            {name: value for name, value in zip(names, values, strict=True) if value or not name.startswith(counts)}
        )

    def _misfit(self, error: Exception) -> IntegrityError:
        return IntegrityError(
            f"{self.name} does not have the columns of the zoo",
            got=f"{type(error).__name__}: {error}"[:300],
            expected="the columns that precision_time.tasks.zoo.build writes",
            fix="install the package again, or rebuild the zoo with make zoo",
        )


@functools.cache
def _table() -> ZooTable:
    return ZooTable(shipped_bytes("zoo.parquet"), name="predictor/data/zoo.parquet")


@functools.cache
def _aliases() -> dict[str, str]:
    return {row["alias"]: row["name"] for row in shipped_rows("aliases.csv")}


def zoo_names() -> frozenset[str]:
    """Every name that the zoo lists; ``find_name`` knows other spellings of them."""
    return frozenset(_table().rows)


@functools.lru_cache(maxsize=4096)
def find_name(name: str) -> str | None:
    """The name in the zoo that ``name`` means; None for an unknown name.

    It may be spelt with other case, dots and dashes, be a published name with or without its owner
    (``meta-llama/Llama-2-7b-hf``, ``bert-base-uncased``), carry a tag of timm (``resnet50.a1_in1k``), or be an alias of
    ``data/aliases.csv``.
    """
    table = _table()
    if name in table.rows:
        return name
    folded = fold_name(name.strip())
    bare = folded.rpartition("/")[2]
    spellings = [folded, bare]
    if "." in name and "/" not in name.partition(".")[2]:
        spellings.append(fold_name(name.partition(".")[0].strip()).rpartition("/")[2])
    shorter = bare
    while (cut := _ENDINGS.sub("", shorter)) != shorter:
        spellings.append(shorter := cut)
    # an alias may depend on the owner, so spellings with it come first
    for spelling in spellings:
        if network := _aliases().get(spelling) or table.folded.get(spelling):
            return network if network in table.rows else None
    return None


@functools.lru_cache(maxsize=4096)
def find_entry(name: str, task_input: str = "") -> ZooEntry | None:
    """The network called ``name`` at ``task_input`` (its usual input); None for a name that the zoo does not know.

    At an input without a walk, the walk at the nearest input of the same name is scaled: images by their area and
    attention over all patches by its square, text and sound by their length and attention by its square. Raises
    ``IntegrityError`` for a damaged file.
    """
    network = find_name(name)
    return None if network is None else _table().find_entry(network, task_input)


def pack_entries(names: Iterable[str]) -> bytes | None:
    """A file like the zoo's with all entries of the networks called ``names``; None where it has none of them."""
    networks = {network for name in set(names) if (network := find_name(name)) is not None}
    return _table().pack(networks) if networks else None


def _resize(entry: ZooEntry, ratio: float, *, task_input: str) -> ZooEntry:
    """``entry`` at an input of ``ratio`` times the length or side."""
    family = find_family(entry.name)
    takes_tokens = "vocab" in entry.sizes
    factor = ratio if takes_tokens else ratio**2
    windowed = family is not None and family.kind == "vision_transformer" and family.family != "vit"
    attention = factor if windowed else factor**2
    sizes = dict(entry.sizes)
    if takes_tokens and "sequence_length" in sizes:
        sizes["sequence_length"] = max(1, round(sizes["sequence_length"] * ratio))
    return replace(
        entry,
        task_input=task_input,
        sizes=sizes,
        fp32=entry.fp32.resize(factor, attention_factor=attention),
        amp=entry.amp.resize(factor, attention_factor=attention),
    )
