"""Parallelism: how the ranks of a job divide a model and its batch, and the words for it."""

import re
from dataclasses import dataclass

from precision_time.storage.errors import InputError

__all__ = ["SHARDINGS", "Parallelism", "Sharding", "parse_parallelism"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What data-parallel ranks divide among themselves, where each would hold it whole under DDP.

    ``spellings`` are words without blanks and punctuation, in lower case; the name itself is one.
    """

    name: str
    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    spellings: tuple[str, ...] = ()


#: To add a kind of sharding, or a spelling of one, add it here; formulas read the three booleans.
SHARDINGS: dict[str, Sharding] = {
    kind.name: kind
    for kind in (
        Sharding(name="none", spellings=("noshard", "zero0")),
        Sharding(name="optimizer", optimizer=True, spellings=("zero1",)),
        Sharding(name="gradients", optimizer=True, gradients=True, spellings=("zero2", "shardgradop")),
        Sharding(name="parameters", optimizer=True, gradients=True, parameters=True,
                 spellings=("zero3", "fsdp", "fsdp2", "hsdp", "fullshard", "hybridshard")),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Degrees of each kind of parallelism; their product without ``expert`` is the world size.

    Expert parallelism divides the experts of a layer over data-parallel ranks, so it adds no ranks. Ranks of one
    tensor group are neighbours, then context, then data, then pipeline, as Megatron-LM lays them.
    ``virtual_stages`` is the number of model chunks per pipeline rank (interleaved schedule). ``sharding`` is a name
    of ``SHARDINGS``. ``single_process`` marks ``nn.DataParallel``: one process scatters the batch and gathers the
    gradients of all devices.

    Raises ``InputError`` for a degree that is not a positive integer, or an unknown sharding.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    virtual_stages: int = 1
    sharding: str = "none"
    single_process: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context", "expert", "virtual_stages"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{name} parallelism is not usable", got=repr(value), expected="an integer of at least 1"
                )
        if self.sharding not in SHARDINGS:
            raise InputError("unknown sharding", got=repr(self.sharding), expected=f"one of {', '.join(SHARDINGS)}")

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def divides(self) -> Sharding:
        """What the data-parallel ranks divide among themselves."""
        return SHARDINGS[self.sharding]


#: Words before a degree, by the field that it sets; ``fsdp`` sets ``data`` and shards the parameters.
_DEGREES = {
    "data": ("dp", "ddp", "data"),
    "fsdp": ("fsdp",),
    "tensor": ("tp", "tensor", "mp"),
    "pipeline": ("pp", "pipeline"),
    "context": ("cp", "context"),
    "expert": ("ep", "expert"),
    "virtual_stages": ("vp", "vpp", "virtual"),
}
_DEGREE_BY_WORD = {word: kind for kind, words in _DEGREES.items() for word in words}
_SHARDING_BY_WORD = {word: kind.name for kind in SHARDINGS.values() for word in (kind.name, *kind.spellings)}

#: Spellings of several words, and the word that replaces each. Embeddings or a last layer split over the ranks, and
#: samples split in space, count as data parallelism: the ranks still divide the batch or the gradients.
_PHRASES = tuple(
    (re.compile(pattern), word)
    for pattern, word in (
        (r"zero[\s_-]*(?:stage[\s_-]*)?([0-3])", r"zero\1"),
        (r"optimi[sz]er[\s_-]*sharding|distributed[\s_-]*optimi[sz]er", "zero1"),
        (r"shard_grad_op", "zero2"),
        (r"(full|hybrid|no)[\s_-]shard", r"\1shard"),
        (r"(torch\.)?nn\.dataparallel|(?<![a-z\s_-])dataparallel", "singleprocess"),
        (r"(distributed[\s_-]*)?data[\s_-]*parallel(ism)?", "ddp"),
        (r"(partial-?fc )?model[\s_-]parallel (embedding|head)", "ddp"),
        (r"\s*([=:])\s*", r"\1"),
    )
)

#: Words that change nothing: plain data parallelism, frameworks, and degrees that do not apply.
_WITHOUT_EFFECT = re.compile(r"ddp|dp|data|horovod|deepspeed|megatron|gpipe|spatial|(ep|vp|cp)n/a|microbatches[0-9]+")

_DEGREE = re.compile(r"(?P<name>[a-z]+?)[=:]?(?P<degree>[0-9]{1,9})")
_EXAMPLES = "ddp, fsdp, zero1, zero2, zero3, nn.DataParallel, or degrees such as tp4-pp8, tp=8,pp=2 or dp2-tp4-zero1"


def parse_parallelism(text: str | Parallelism, *, world_size: int, sharding: str | None = None) -> Parallelism:
    """The layout over ``world_size`` ranks that ``text`` names; a blank text means plain data parallelism.

    Kinds are joined by ``-``, ``+``, ``,`` or blanks; a degree follows its name: ``dp fsdp tp (mp) pp cp ep vp``.
    Without a data degree, the ranks that the other degrees leave are replicas. ``sharding`` (``FULL_SHARD``,
    ``zero2``, ...) counts where the text names none.

    Raises ``InputError`` for a text that is not understood, with examples, and for degrees that do not fill the world.
    """
    if isinstance(text, Parallelism):
        return _check_world(text, world_size, repr(text))
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise InputError("this world size is not usable", got=repr(world_size), expected="an integer of at least 1")
    if not isinstance(text, str):
        raise _not_understood(text)
    degrees: dict[str, int] = {}
    named_sharding: str | None = None
    single_process = False
    folded = text.strip().casefold()
    for phrase, word in _PHRASES:
        folded = phrase.sub(word, folded)
    for word in re.findall(r"[^\s,;+()\-]+", folded):
        degree = _DEGREE.fullmatch(word)
        if word in _SHARDING_BY_WORD:
            named_sharding = _SHARDING_BY_WORD[word]
        elif word == "singleprocess":
            single_process = True
        elif degree and degree["name"] in _DEGREE_BY_WORD:
            kind = _DEGREE_BY_WORD[degree["name"]]
            if degrees.setdefault(kind, int(degree["degree"])) != int(degree["degree"]):
                raise InputError(f"two degrees of {kind} parallelism", got=repr(text[:200]), expected="one of each")
        elif not _WITHOUT_EFFECT.fullmatch(word):
            raise _not_understood(text)
    return _lay_out(
        degrees,
        sharding=named_sharding if named_sharding is not None else _parse_sharding(sharding),
        single_process=single_process,
        world_size=world_size,
        text=text,
    )


def _lay_out(
    degrees: dict[str, int], *, sharding: str | None, single_process: bool, world_size: int, text: str
) -> Parallelism:
    fsdp = degrees.pop("fsdp", None)
    if 0 in degrees.values() or fsdp == 0:
        raise InputError("a degree of parallelism is 0", got=repr(text[:200]), expected="integers of at least 1")
    split = degrees.get("tensor", 1) * degrees.get("pipeline", 1) * degrees.get("context", 1)
    if fsdp is not None:
        degrees["data"] = degrees.get("data", 1) * fsdp
        # Context-parallel ranks hold the same parameters, so FSDP divides over them too.
        if fsdp * degrees.get("context", 1) > 1:
            sharding = "parameters"
    if "data" not in degrees:
        if world_size % split:
            raise _not_divided(text, f"{split} ranks a replica in a world of {world_size}")
        degrees["data"] = world_size // split
    layout = Parallelism(**degrees, sharding=sharding or "none", single_process=single_process)
    return _check_world(layout, world_size, text)


def _check_world(layout: Parallelism, world_size: int, text: str) -> Parallelism:
    if layout.world_size != world_size:
        raise _not_divided(
            text,
            f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} = "
            f"{layout.world_size} ranks in a world of {world_size}",
        )
    if (layout.data * layout.tensor * layout.context) % layout.expert:
        raise _not_divided(
            text, f"{layout.expert} expert groups over {layout.data * layout.tensor * layout.context} ranks of a stage"
        )
    return layout


def _parse_sharding(text: str | None) -> str | None:
    if text is None or not text.strip():
        return None
    folded = re.sub(r"[^a-z0-9]|stage", "", text.casefold())
    if folded not in _SHARDING_BY_WORD:
        raise InputError("unknown sharding", got=repr(text[:200]), expected="none, zero1, zero2, zero3 or FULL_SHARD")
    return _SHARDING_BY_WORD[folded]


def _not_understood(text: object) -> InputError:
    return InputError("this parallelism is not understood", got=repr(text)[:200], expected=_EXAMPLES)


def _not_divided(text: str, numbers: str) -> InputError:
    return InputError(
        "these degrees of parallelism do not fill the world",
        got=f"{text[:200]!r}: {numbers}",
        expected="degrees whose product is the world size",
    )
