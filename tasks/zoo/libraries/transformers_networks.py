"""Networks of transformers by configuration, from the sizes in the TOML files of this folder, without weights."""

import functools
import importlib
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from precision_time.tasks.zoo.libraries.transformers_batches import BATCHES, compute_loss
from precision_time.tasks.zoo.libraries.transformers_experts import balance_experts, count_active
from precision_time.tasks.zoo.network import Built, Network, build_light

__all__ = ["FILES", "Configuration", "find_transformers", "list_transformers", "network_of", "read_configurations"]

SOURCE = "transformers"

FILES = ("transformers.toml", "decoders.toml", "perception.toml")

#: Rates at which layers are dropped at random: which ones depends on values.
_CHANCES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
#: Rates that keep CUDA from its fused attention. Networks that train with fused kernels set them to 0.
_ATTENTION_DROPOUTS = (
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout", "attention_dropout_rate",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One network of the files: its classes of transformers, its sizes, and its usual input."""

    name: str
    config: str
    model: str
    batch: str
    length: int
    target: int
    options: dict[str, Any]
    #: whether the output head has weights of its own, although the library always ties them to the embedding
    separate_head: bool
    params: float | None
    note: str

    def at(self, length: int) -> dict[str, Any]:
        """The arguments of the configuration class for an input of ``length``."""
        options = dict(self.options)
        for positions in ("n_positions", "max_position_embeddings"):
            # 0 marks learned positions, as many as the input has
            if options.get(positions) == 0:
                options[positions] = length
        return options


@functools.cache
def read_configurations() -> dict[str, Configuration]:
    """Every configuration of the files by name."""
    configurations: dict[str, Configuration] = {}
    for file in FILES:
        text = Path(__file__).with_name(file).read_text(encoding="utf-8")
        for family in tomllib.loads(text).values():
            for name, line in family["models"].items():
                options = {key: value for key, value in line.items() if not key.startswith("_")}
                configurations[name] = Configuration(
                    name=name,
                    config=family["config"],
                    model=line.get("_model", family["model"]),
                    batch=line.get("_batch", family["batch"]),
                    length=line.get("_length", family["length"]),
                    target=line.get("_target", family.get("target", 0)),
                    options={**family.get("defaults", {}), **options},
                    separate_head=line.get("_separate_head", family.get("separate_head", False)),
                    params=line.get("_params"),
                    note=line.get("_note", ""),
                )
    return configurations


def list_transformers() -> list[Network]:
    """Every configuration at its usual length."""
    return [network_of(configuration, configuration.length) for configuration in read_configurations().values()]


def find_transformers(name: str, length: float | None = None, *, task_input: str = "") -> Network | None:
    """The network called ``name`` for ``length`` tokens, audio samples or pixels (its usual); None if unknown."""
    configuration = read_configurations().get(name)
    if configuration is None:
        return None
    return network_of(configuration, round(length) if length else configuration.length, task_input=task_input)


def network_of(configuration: Configuration, size: int, *, task_input: str = "") -> Network:
    """The network of a configuration for an input of ``size``."""
    options = configuration.at(size)
    arguments = ", ".join(f"{key}={value}" for key, value in options.items())
    if configuration.separate_head:
        arguments += ", separate head"
    target = f" and {configuration.target}" if configuration.target else ""
    return Network(
        name=configuration.name,
        task_input=task_input or str(size),
        source=SOURCE,
        builds=f"transformers {metadata.version('transformers')} {configuration.model}({arguments}) at {size}{target}",
        build=functools.partial(_build, configuration, size),
        # where positions are learned, the count holds for the usual length alone
        params=configuration.params if options == configuration.at(configuration.length) else None,
        tolerance=1e-6,
        note=configuration.note,
    )


def _load() -> Any:
    # The vision classes of transformers import torchvision where it is installed.
    if importlib.util.find_spec("torchvision") is not None:
        from precision_time.tasks.zoo.libraries.torchvision_door import load_torchvision

        load_torchvision()
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    return transformers


def _build(configuration: Configuration, size: int) -> Built:
    transformers = _load()
    config = make_config(configuration, size)
    model = getattr(transformers, configuration.model)

    def make() -> Any:
        # Without initialisation, weights have to be tied here.
        module = model(config)
        module.tie_weights()
        if configuration.separate_head:
            vocabulary, width = module.lm_head.weight.shape
            module.lm_head = nn.Linear(width, vocabulary, bias=False)
        return module

    module = build_light(make)
    balance_experts(module)
    return Built(
        module=module,
        make_batch=functools.partial(BATCHES[configuration.batch], config, size, configuration.target),
        loss_of=compute_loss,
        sizes=_read_sizes(config, size) | count_active(module),
    )


def make_config(configuration: Configuration, size: int) -> Any:
    """The configuration object without a cache of keys, dropout inside attention, or layers dropped at random."""
    options = configuration.at(size)
    config = getattr(_load(), configuration.config)(**options)
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
        if part is None:
            continue
        for name in (*_ATTENTION_DROPOUTS, *_CHANCES):
            if hasattr(part, name):
                setattr(part, name, 0.0)
        if hasattr(part, "apply_spec_augment"):
            part.apply_spec_augment = False
        # TOML has no None: 0 stands for it
        for name in ("sliding_window", "q_lora_rank"):
            if getattr(part, name, None) == 0:
                setattr(part, name, None)
        if hasattr(part, "use_cache"):
            part.use_cache = False
    return config


#: Sizes by our name, and the fields of configurations that hold them.
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
