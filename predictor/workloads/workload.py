"""WorkloadFeatures: what training a model on one sample costs, from a walk of the module or a card of its sizes."""

import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from precision_time.predictor.shipped import shipped_text
from precision_time.predictor.workloads.cards import Card, find_card, listed_models
from precision_time.predictor.workloads.families import ATTENTION_KINDS, find_family, guess_kind
from precision_time.predictor.workloads.input_sizes import check_input
from precision_time.predictor.workloads.walk import POLICIES, Walk
from precision_time.predictor.workloads.zoo import SIZES, ZooEntry, ZooTable, find_entry, find_name, zoo_names
from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["WorkloadFeatures", "describe_card", "describe_entry", "describe_zoo", "find_workload",
           "known_workloads", "walked_fields"]  # fmt: skip

#: Traffic of the forward pass in fp32 eager execution: bytes per byte of all outputs; where those are not known, per
#: byte of the outputs of products; where those are not known either, per FLOP. Last, the bytes of the backward pass
#: over those of the forward pass. From the walks of the shipped cards: ResNet-18 and -50 (2.17, 7.3, 0.040; 1.4) for
#: convolutions; ViT-B/16, BERT-base and GPT-2 (1.3; 2.9, 4.9 and 3.6; 0.008; 2.1) for attention.
_CONVOLUTION_TRAFFIC = (2.17, 7.3, 0.040, 1.4)
_ATTENTION_TRAFFIC = (1.3, 3.8, 0.008, 2.1)
#: Parameter tensors where a card has no count: ResNet-50 has 161, ViT-B/16 152; BERT-base has 16 a layer, GPT-2 12.
_USUAL_TENSORS = 160
_TENSORS_PER_LAYER = 12
#: Operations of the forward pass for each parameter tensor, and of the backward pass for each of the forward pass:
#: ResNet-50 1.4 and 0.8, the transformers 0.8 and 1.9.
_CONVOLUTION_OPERATIONS = (1.4, 0.8)
_ATTENTION_OPERATIONS = (0.8, 1.9)
#: Share of the operations of a card that launch a kernel (views do not): 0.82 in ResNet-50, 0.61 in ViT-B/16.
_LAUNCHED_SHARE = 0.75
#: Above this many parameters, every source of the public table divides the embedding tables of a recommender over the
#: ranks and updates only the rows that a batch looks up. The other parameters are dense and multiply each sample once.
_SHARDED_TABLE_PARAMS = 1_000_000_000
#: Bytes of fp32 weights and gradients that both passes move for each parameter.
_PASSES_BYTES = 12.0
#: Share of attention in a transformer's forward FLOPs where the card has none (BERT-base at 128 to ViT-B/16).
_ATTENTION_SHARE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFeatures:
    """A model at one input, as the closed forms and the learner describe it.

    FLOPs count 2 per multiply-add. Bytes are those that fp32 eager execution reads and writes: ``*_fixed`` is the part
    that does not grow with the batch (reading weights), ``*_per_sample`` the part that does.
    """

    name: str
    family: str
    task_input: str
    optimizer: str
    params: int
    parameter_tensors: int
    #: forward FLOPs of one sample in matrix products, convolutions and attention
    forward_flops_per_sample: float
    #: backward FLOPs of one sample, as counted (the first layer needs no input gradient)
    backward_flops_per_sample: float
    #: shares of the forward FLOPs in convolutions and in attention; the rest is dense products
    convolution_flops_share: float
    attention_flops_share: float
    forward_bytes_per_sample: float
    forward_bytes_fixed: float
    backward_bytes_per_sample: float
    backward_bytes_fixed: float
    #: dispatched operations, which an eager framework launches
    forward_ops: int
    backward_ops: int
    #: where the numbers come from: ``counted`` by a walk of the module, the ``zoo`` of shipped walks, or a ``card``
    source: str = "counted"
    #: one of ``families.KINDS``; empty where it is not known
    kind: str = ""
    #: one name for all names of one network; empty: ``name`` is the only one
    network: str = ""
    #: elements that convolutions, dense products and fused attention write in the forward pass of one sample
    activations_per_sample: float | None = None
    #: the walk under each of ``walk.POLICIES``; None: never walked
    walks: Mapping[str, Walk] | None = field(default=None, hash=False)
    #: parameters that work on one token; fewer than ``params`` in a mixture of experts; None: all of them
    active_params: int | None = None
    #: sizes of a transformer, None where they are not known or do not apply
    layers: int | None = None
    hidden_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn_size: int | None = None
    vocab: int | None = None
    sequence_length: int | None = None
    experts: int | None = None
    active_experts: int | None = None

    def __post_init__(self) -> None:
        for name in ("params", "forward_flops_per_sample", "forward_ops"):
            if not getattr(self, name) > 0:
                raise InputError(
                    f"{name} of workload {self.name} is not usable",
                    got=getattr(self, name),
                    expected="a positive number",
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return values | {
            "walks": None if self.walks is None else {name: walk.to_columns() for name, walk in self.walks.items()},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "WorkloadFeatures":
        """The inverse of ``to_dict``; raises ``InputError`` for missing or unknown fields."""
        walks = values.get("walks")
        try:
            return cls(
                **{
                    **values,
                    "walks": None if walks is None else {name: Walk.from_columns(walks[name]) for name in POLICIES},
                }
            )
        except (KeyError, TypeError) as error:
            raise InputError(
                "these values are not a workload card",
                got=str(error),
                expected="the fields of WorkloadFeatures",
                fix="count the workload again with this version",
            ) from error


def describe_card(
    name: str,
    *,
    params: int,
    forward_flops_per_sample: float,
    card: Card | None = None,
    task_input: str = "",
    sequence_length: int | None = None,
) -> WorkloadFeatures:
    """The workload of a model whose parameters and forward FLOPs are known; the counts of a walk are estimated.

    ``card`` gives further sizes. The backward pass takes twice the FLOPs of the forward pass; bytes and operations
    follow the ratios above, by whether the network consists of convolutions or of attention. Raises ``InputError`` for
    numbers that are not positive.
    """
    family = find_family(name)
    kind = family.kind if family else ""
    attends = kind in ATTENTION_KINDS
    by_output, by_activation, by_flop, backward_bytes = _ATTENTION_TRAFFIC if attends else _CONVOLUTION_TRAFFIC
    moved = by_flop * forward_flops_per_sample
    if card is not None and card.outputs_per_sample:
        moved = 4 * by_output * card.outputs_per_sample
    elif card is not None and card.activations_per_sample:
        moved = 4 * by_activation * card.activations_per_sample
    layers = card.layers if card is not None else None
    tensors = (card.parameter_tensors if card is not None else None) or (
        _TENSORS_PER_LAYER * layers if layers else _USUAL_TENSORS
    )
    few_kernels = attends or kind in ("speech", "recurrent")
    per_tensor, backward_ops = _ATTENTION_OPERATIONS if few_kernels else _CONVOLUTION_OPERATIONS
    operations = max(1, round(per_tensor * tensors))
    if card is not None and card.forward_operations:
        operations = max(1, round(_LAUNCHED_SHARE * card.forward_operations))
    convolutions = None if card is None else card.convolution_share
    attention = None if card is None else card.attention_share
    sizes: dict[str, Any] = {} if card is None else {size: getattr(card, size) for size in SIZES}
    optimizer = card.optimizer if card is not None else ""
    if kind == "recommendation" and params > _SHARDED_TABLE_PARAMS:
        params = max(1, round(forward_flops_per_sample / 2))
    return WorkloadFeatures(
        name=name,
        family=family.family if family else "",
        kind=kind,
        network=family.canonical if family else "",
        task_input=task_input,
        optimizer=optimizer or ("adamw" if attends else "sgd_momentum"),
        params=params,
        parameter_tensors=tensors,
        forward_flops_per_sample=forward_flops_per_sample,
        backward_flops_per_sample=2 * forward_flops_per_sample,
        convolution_flops_share=convolutions if convolutions is not None else float(not attends),
        attention_flops_share=attention if attention is not None else _ATTENTION_SHARE * attends,
        forward_bytes_per_sample=moved,
        forward_bytes_fixed=4.0 * params,
        backward_bytes_per_sample=backward_bytes * moved,
        backward_bytes_fixed=8.0 * params,
        forward_ops=operations,
        backward_ops=max(1, round(backward_ops * operations)),
        source="card",
        activations_per_sample=None if card is None else card.activations_per_sample,
        **sizes | {"sequence_length": sequence_length},
    )


_CONVOLUTIONS = ("convolution", "grouped", "depthwise")


def walked_fields(walks: Mapping[str, Walk]) -> dict[str, Any]:
    """The fields of ``WorkloadFeatures`` that walks under both policies fill; the counts are those in fp32."""
    walk = walks["fp32"]
    flops = walk.total("flops", phase="forward")
    return {
        "forward_flops_per_sample": flops,
        "backward_flops_per_sample": walk.total("flops", phase="backward"),
        "convolution_flops_share": walk.total("flops", phase="forward", families=_CONVOLUTIONS) / flops,
        "attention_flops_share": walk.total("flops", phase="forward", families=("attention",)) / flops,
        "forward_bytes_per_sample": walk.total("bytes", phase="forward"),
        "forward_bytes_fixed": walk.total("bytes_fixed", phase="forward"),
        "backward_bytes_per_sample": walk.total("bytes", phase="backward"),
        "backward_bytes_fixed": walk.total("bytes_fixed", phase="backward"),
        "forward_ops": max(1, round(walk.total("ops", phase="forward"))),
        "backward_ops": max(1, round(walk.total("ops", phase="backward"))),
        "walks": walks,
    }


@functools.lru_cache(maxsize=4096)
def describe_entry(entry: ZooEntry, *, name: str) -> WorkloadFeatures:
    """The workload of a network of the zoo, under the ``name`` of the question, from its walk.

    Family, kind, the usual optimizer and sizes that the zoo lacks come from the lists of names and cards.
    """
    # a network of torchvision whose name timm has too is listed under its library
    own_name = entry.name.removeprefix("torchvision/")
    family = find_family(name.removeprefix("torchvision/")) or find_family(own_name)
    network = find_family(own_name) or family
    card = find_card(name, entry.task_input) or find_card(entry.name, entry.task_input)
    kind = family.kind if family else _guess_kind(entry)
    params, walks = entry.params, entry.walks
    if kind == "recommendation" and params > _SHARDED_TABLE_PARAMS:
        params = max(1, round(entry.fp32.total("flops", phase="forward") / 2))
        walks = {policy: _keep_dense(walk, params) for policy, walk in walks.items()}
    sizes: dict[str, Any] = {size: entry.sizes.get(size, card and getattr(card, size)) for size in SIZES}
    return WorkloadFeatures(
        name=name,
        family=family.family if family else "",
        kind=kind,
        network=network.canonical if network else entry.name,
        task_input=entry.task_input,
        optimizer=(card.optimizer if card is not None else "")
        or ("adamw" if kind in ATTENTION_KINDS else "sgd_momentum"),
        params=params,
        parameter_tensors=max(1, entry.parameter_tensors),
        source="zoo",
        **walked_fields(walks),
        **sizes,
    )


def describe_zoo(table: ZooTable, cards: Iterable[WorkloadFeatures]) -> tuple[WorkloadFeatures, ...]:
    """Every network of ``table`` at each of its inputs, the usual one last; then ``cards`` with the walks in it."""
    described = [
        describe_entry(table.read_entry(row, network=network), name=network)
        for network, rows in table.rows.items()
        for row in sorted(rows, key=table.usual_row(network).__eq__)
    ]
    for card in cards:
        zoo_name = find_name(card.name)
        entry = table.find_entry(zoo_name, card.task_input) if zoo_name in table.rows else None
        described.append(card if entry is None or card.walks is not None else replace(card, walks=entry.walks))
    return tuple(described)


def _keep_dense(walk: Walk, params: int) -> Walk:
    """``walk`` without tables: both passes read fp32 weights, and the backward pass writes their gradients."""
    dense = walk.keep_weights(min(1.0, _PASSES_BYTES * params / max(1.0, walk.total("bytes_fixed"))))
    return replace(dense, gradient_bytes=min(walk.gradient_bytes, 4.0 * params))


#: A text model without a family is taken for a decoder from this length on: encoders end at 512 tokens.
_DECODER_LENGTH = 1024


def _guess_kind(entry: ZooEntry) -> str:
    if "vocab" in entry.sizes:
        if "experts" in entry.sizes:
            return "mixture_of_experts"
        return "language_decoder" if entry.sizes.get("sequence_length", 0) >= _DECODER_LENGTH else "language_encoder"
    counts = walked_fields(entry.walks)
    return guess_kind(convolution_share=counts["convolution_flops_share"], attends=counts["attention_flops_share"] > 0)


@functools.cache
def known_workloads() -> dict[str, WorkloadFeatures]:
    """The workloads of campaigns by name, as counted in ``predictor/data/workloads.toml``."""
    workloads = {}
    for name, card in tomllib.loads(shipped_text("workloads.toml")).items():
        family = find_family(name)
        labels = {"kind": family.kind, "network": family.canonical} if family else {}
        workloads[name] = WorkloadFeatures.from_dict({"name": name, **labels, **card})
    return workloads


def find_workload(name: str, *, task_input: str = "", measured: Iterable[WorkloadFeatures] = ()) -> WorkloadFeatures:
    """The workload called ``name``: from ``measured`` (those of an artifact), else the zoo, else a card, else counted.

    ``task_input`` asks for another resolution or sequence length than the usual one. Raises ``UnknownNameError`` with
    the nearest three names, also for a model whose work is not known, and ``InputError`` for an input that names no
    size, or to which a model with one known input cannot be scaled.
    """
    if not isinstance(name, str):
        raise InputError("not a model", got=repr(name), expected="a name")
    # An artifact may carry a network at several inputs: the requested one is sorted last, so it stays.
    known = {work.name: work for work in sorted(measured, key=lambda work: task_input in ("", work.task_input))}
    if name not in known and (zoo_name := find_name(name)) in known and known[zoo_name].source == "zoo":
        known[name] = replace(known[zoo_name], name=name)
    if name in known and task_input in ("", known[name].task_input):
        workload = known[name]
        entry = find_entry(name, workload.task_input) if workload.walks is None else None
        return workload if entry is None else replace(workload, walks=entry.walks)
    if task_input:
        check_input(task_input)
    entry = find_entry(name, task_input)
    if entry is not None:
        return describe_entry(entry, name=name)
    card = find_card(name, task_input)
    # Before our own count: the trees learned the networks of the public table from their cards.
    if card is not None and card.params is not None and card.forward_flops_per_sample is not None:
        return describe_card(
            name,
            params=card.params,
            forward_flops_per_sample=card.forward_flops_per_sample,
            card=card,
            task_input=card.task_input,
            sequence_length=card.sequence_length,
        )
    known = known_workloads() | known
    if name not in known and card is not None:
        raise InputError(
            f"the work of {name} is not known",
            got="a card without forward FLOPs",
            expected="a model whose FLOPs are known",
            fix="measure it in a campaign",
        )
    if name not in known:
        raise UnknownNameError(
            "model",
            name,
            known.keys() | listed_models() | zoo_names(),
            fix="name a known model, or measure yours in a campaign first",
        )
    if task_input not in ("", known[name].task_input):
        raise InputError(
            f"{name} is known at one input only", got=repr(task_input), expected=known[name].task_input or "none"
        )
    return known[name]
