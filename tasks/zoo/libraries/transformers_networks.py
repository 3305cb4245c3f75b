"""Networks of transformers by configuration: sizes stand in TOML, weights are never made."""

import functools
import importlib
import tomllib
from dataclasses import dataclass
from importlib import metadata, resources
from typing import Any

from torch import nn

from precision_time.tasks.zoo.libraries.transformers_batches import BATCHES, compute_loss
from precision_time.tasks.zoo.libraries.transformers_experts import balance_experts, count_active
from precision_time.tasks.zoo.network import Built, Network, build_light

__all__ = ["FILES", "Configuration", "find_transformers", "list_transformers", "network_of", "read_configurations"]

SOURCE = "transformers"

FILES = ("transformers.toml", "decoders.toml", "perception.toml")

#: Layers and frames dropped by chance: which ones, only values tell.
_CHANCES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
#: What keeps CUDA from its fused attention; in a network with fused kernels it is off in training too.
_ATTENTION_DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attn_dropout",
    "attention_dropout_rate",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One line of the files: the classes, the sizes, and the usual input."""

    name: str
    config: str
    model: str
    batch: str
    length: int
    target: int
    options: dict[str, Any]
    #: an output head beside the embedding, where the library ties the two whatever the configuration says
    separate_head: bool
    params: float | None
    note: str

    def at(self, length: int) -> dict[str, Any]:
        """The options of the configuration class for an input of ``length``."""
        options = dict(self.options)
        for positions in ("n_positions", "max_position_embeddings"):
            # 0 marks learned positions that follow the length
            if options.get(positions) == 0:
                options[positions] = length
        return options


@functools.cache
def read_configurations() -> dict[str, Configuration]:
    """Every configuration of the files by name."""
    found: dict[str, Configuration] = {}
    for file in FILES:
        text = resources.files("precision_time.tasks.zoo.libraries").joinpath(file).read_text(encoding="utf-8")
        for family in tomllib.loads(text).values():
            for name, line in family["models"].items():
                own = {key: value for key, value in line.items() if key.startswith("_")}
                found[name] = Configuration(
                    name=name,
                    config=family["config"],
                    model=own.get("_model", family["model"]),
                    batch=own.get("_batch", family["batch"]),
                    length=own.get("_length", family["length"]),
                    target=own.get("_target", family.get("target", 0)),
                    options={**family.get("defaults", {}), **{key: line[key] for key in line if key not in own}},
                    separate_head=own.get("_separate_head", family.get("separate_head", False)),
                    params=own.get("_params"),
                    note=own.get("_note", ""),
                )
    return found


def list_transformers() -> list[Network]:
    """Every configuration at its usual length."""
    found = [find_transformers(name) for name in read_configurations()]
    return [network for network in found if network is not None]


def find_transformers(name: str, length: float | None = None, *, task_input: str = "") -> Network | None:
    """The network called ``name`` for ``length`` tokens, audio samples or pixels (its usual); None without one."""
    known = read_configurations().get(name)
    if known is None:
        return None
    return network_of(known, round(length) if length else known.length, task_input=task_input)


def network_of(known: Configuration, size: int, *, task_input: str = "") -> Network:
    """The network of a configuration for an input of ``size``."""
    options = known.at(size)
    told = ", ".join(f"{key}={value}" for key, value in options.items())
    if known.separate_head:
        told += ", separate head"
    target = f" and {known.target}" if known.target else ""
    return Network(
        name=known.name,
        task_input=task_input or str(size),
        source=SOURCE,
        builds=f"transformers {metadata.version('transformers')} {known.model}({told}) at {size}{target}",
        build=functools.partial(_build, known, size),
        # the count holds for the usual length alone where positions are learned for each
        params=known.params if options == known.at(known.length) else None,
        tolerance=1e-6,
        note=known.note,
    )


def _load() -> Any:
    # Its vision classes import torchvision where there is one.
    if importlib.util.find_spec("torchvision") is not None:
        from precision_time.tasks.zoo.libraries.torchvision_door import load_torchvision

        load_torchvision()
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    return transformers


def _build(known: Configuration, size: int) -> Built:
    transformers = _load()
    config = make_config(known, size)
    model = getattr(transformers, known.model)

    def make() -> Any:
        # Weights are tied, as the constructor's post-initialisation does.
        module = model(config)
        module.tie_weights()
        if known.separate_head:
            vocabulary, width = module.lm_head.weight.shape
            module.lm_head = nn.Linear(width, vocabulary, bias=False)
        return module

    module = build_light(make)
    balance_experts(module)
    return Built(
        module=module,
        make_batch=functools.partial(BATCHES[known.batch], config, size, known.target),
        loss_of=compute_loss,
        sizes=_read_sizes(config, size) | count_active(module),
    )


def make_config(known: Configuration, size: int) -> Any:
    """The configuration object: no cache of keys, no dropout inside attention, fused attention where there is one."""
    options = known.at(size)
    config = getattr(_load(), known.config)(**options)
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
        if part is None:
            continue
        for name in (*_ATTENTION_DROPOUTS, *_CHANCES):
            if hasattr(part, name):
                setattr(part, name, 0.0)
        if hasattr(part, "apply_spec_augment"):
            part.apply_spec_augment = False
        # TOML has no word for nothing
        for name in ("sliding_window", "q_lora_rank"):
            if getattr(part, name, None) == 0:
                setattr(part, name, None)
        if hasattr(part, "use_cache"):
            part.use_cache = False
    return config


#: Our names of sizes, and what configurations call them.
_SIZES = {
    "layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "num_attention_heads"),
    "ffn_size": ("moe_intermediate_size", "intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim"),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok",),
}


def _read_sizes(config: Any, size: int) -> dict[str, float]:
    text = getattr(config, "text_config", None) or config
    sizes: dict[str, float] = {}
    for ours, theirs in _SIZES.items():
        for name in theirs:
            value = getattr(text, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                sizes[ours] = value
                break
    if "experts" not in sizes:
        sizes.pop("active_experts", None)
    if "vocab" in sizes:
        sizes["sequence_length"] = size
    return sizes
