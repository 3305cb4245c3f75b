"""Count what training a Hugging Face model costs, by a walk of its architecture with empty weights; no downloads."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from precision_time.predictor.walking.count_module import count_training, loss_of_output
from precision_time.predictor.workloads.families import find_family
from precision_time.predictor.workloads.walk_cache import CountedModel
from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["KeepLayers", "build_model", "count_config", "spread_evenly"]

#: The heads to try for a configuration without ``architectures``: the first that knows its type.
_HEADS = (
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_CTC_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", "MODEL_MAPPING",
)  # fmt: skip
#: Above this, a number of positions is rounded down to a multiple of 8: RoBERTa lists two more than it takes tokens.
_ROUNDED_ABOVE = 128
_USUAL_LENGTH, _USUAL_SIDE, _USUAL_SECONDS = 1024, 224, 10
_SAMPLES_PER_S = 16_000
#: Fields of configurations that hold the number of positions of a model.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_EVEN_EXPERTS = "precision_time_even"


def spread_evenly(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run experts with an even load: each takes an equal share of the (token, expert) pairs in one batched product.

    hidden_states [tokens, width], top_k_index and top_k_weights [tokens, k]; returns [tokens, width]. The expert of a
    token depends on values, which a walk lacks. The work is that of a balanced router, rounded up to whole rows.
    """
    tokens, choices = top_k_index.shape
    rows = -(-tokens * choices // experts.num_experts)
    order = torch.arange(experts.num_experts * rows, device=hidden_states.device) % (tokens * choices)
    inner = hidden_states[order // choices].reshape(experts.num_experts, rows, -1)

    def project(values: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name)
        product = torch.bmm(values, weight if experts.is_transposed else weight.transpose(1, 2))
        return product + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else product

    if experts.has_gate:
        inner = experts._apply_gate(project(inner, "gate_up_proj"))
    else:
        inner = experts.act_fn(project(inner, "up_proj"))
    outer = project(inner, "down_proj").flatten(0, 1)[: tokens * choices] * top_k_weights.reshape(-1, 1)
    return outer.reshape(tokens, choices, -1).sum(dim=1).to(hidden_states.dtype)


def _read_config(values: Mapping[str, Any], *, name: str) -> PretrainedConfig:
    if "auto_map" in values:
        raise InputError(
            f"the configuration of {name} names code that comes with the model",
            got="auto_map in the configuration",
            expected="an architecture of transformers itself: other code is not run",
            fix="build the module yourself and give it with sample_input",
        )
    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        raise UnknownNameError(
            "model_type of transformers",
            kind,
            CONFIG_MAPPING.keys(),
            fix=f"transformers {transformers.__version__} is installed; another version may know this type",
        )
    try:
        config: PretrainedConfig = CONFIG_MAPPING[kind].from_dict(dict(values))
    except Exception as error:  # each configuration checks its values in its own way
        raise _unusable(name, error) from error
    config.use_cache = False
    # which frames are masked depends on values
    config.apply_spec_augment = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def _unusable(name: str, error: Exception) -> InputError:
    return InputError(
        f"transformers cannot build {name}",
        got=f"{type(error).__name__}: {str(error).strip()[:500]}",
        expected=f"a configuration that transformers {transformers.__version__} accepts",
    )


def _choose_class(config: PretrainedConfig, *, name: str) -> type[PreTrainedModel]:
    for architecture in config.architectures or ():
        model_class = getattr(transformers, str(architecture), None)
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            return model_class
    for head in _HEADS:
        mapping = getattr(modeling_auto, head)
        if type(config) in mapping:
            model_class = mapping[type(config)]
            return model_class[0] if isinstance(model_class, tuple) else model_class  # type: ignore[no-any-return]
    raise InputError(
        f"transformers has no model for the configuration of {name}",
        got=f"architectures {config.architectures}, model_type {config.model_type}",
        expected="an architecture of transformers",
    )


def _expert_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of experts that ``spread_evenly`` can run: transformers marks them by this attribute."""
    return [part for part in model.modules() if hasattr(part, "_is_expert_parallel")]


def build_model(values: Mapping[str, Any], *, name: str) -> PreTrainedModel:
    """Build the architecture of a configuration on the meta device, with torch's fused attention where it has that.

    Raises ``UnknownNameError`` for a ``model_type`` that transformers does not know, ``InputError`` for a model that
    brings its own code (``auto_map``) and for a configuration that no model accepts.
    """
    config = _read_config(values, name=name)
    model_class = _choose_class(config, name=name)
    ALL_EXPERTS_FUNCTIONS.register(_EVEN_EXPERTS, spread_evenly)
    first_error: Exception | None = None
    for attention in ("sdpa", "eager"):
        try:
            with torch.device("meta"):
                make: Any = model_class._from_config
                model: PreTrainedModel = make(config, dtype=torch.float32, attn_implementation=attention)
            model.tie_weights()
            for part in _expert_layers(model):
                part.config._experts_implementation = _EVEN_EXPERTS
            return model
        except Exception as error:  # "does not support sdpa" is a ValueError, an ImportError or a KeyError
            first_error = first_error or error
    assert first_error is not None
    raise _unusable(name, first_error) from first_error


def _first_number(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    for part in (config.get_text_config(), config):
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


class _Inputs:
    """The arguments of a batch, by what the forward pass of a model takes."""

    def __init__(self, model: PreTrainedModel, *, task_input: str) -> None:
        self.config, self.requested = model.config, task_input
        self.accepted = inspect.signature(model.forward).parameters
        self.class_name = type(model).__name__
        self.reasons: list[str] = []
        self.task_input, self.sequence_length = task_input, None  # type: str, int | None
        #: by argument: the shape of one sample, and the number of ids to draw from (0: numbers, not ids)
        self.shapes: dict[str, tuple[tuple[int, ...], int]] = {}
        main_input = model.main_input_name
        if "pixel_values" in self.accepted and (main_input == "pixel_values" or "return_loss" in self.accepted):
            self._add_image()
        if main_input == "input_features":
            self._add_spectrogram()
        if main_input == "input_values":
            self._add_audio()
        if main_input == "input_ids":
            self._add_tokens()
        if not self.shapes:
            raise InputError(
                f"{self.class_name} takes an input of an unknown kind",
                got=f"a main input called {main_input}",
                expected="images, token ids, spectrograms or waveforms",
                fix="give the module itself with sample_input",
            )

    @property
    def _labels(self) -> int:
        return int(self.config.num_labels or 2)

    def _side(self, *, usual: int) -> tuple[int, int]:
        if not self.requested:
            self.reasons.append(f"assumed images with a side of {usual} pixels; task_input= chooses another")
            return usual, usual
        sides = [int(side) if side.isdecimal() else 0 for side in self.requested.split("x")]
        if len(sides) > 2 or min(sides) < 1:
            raise InputError(
                "task_input is not a resolution",
                got=repr(self.requested[:200]),
                expected="pixels such as 224, or 800x1333",
            )
        return sides[0], sides[-1]

    def _add_image(self) -> None:
        vision = getattr(self.config, "vision_config", None) or self.config
        size = getattr(vision, "image_size", None) or _USUAL_SIDE
        height, width = self._side(usual=size if isinstance(size, int) else next(iter(size)))
        self.shapes["pixel_values"] = ((getattr(vision, "num_channels", 3) or 3, height, width), 0)
        self.task_input = str(height) if height == width else f"{height}x{width}"
        if "ImageClassification" in self.class_name and "labels" in self.accepted:
            self.shapes["labels"] = ((), self._labels)

    def _length(self, *, usual: int, inputs: str, unit: str) -> int:
        if not self.requested:
            self.reasons.append(f"assumed {inputs} of {usual} {unit}; task_input= chooses another length")
            return usual
        if not self.requested.isdecimal() or int(self.requested) < 1:
            raise InputError(
                "task_input is not a length", got=repr(self.requested[:200]), expected=f"{unit} such as 512"
            )
        return int(self.requested)

    def _add_tokens(self) -> None:
        vocabulary = _first_number(self.config, ("vocab_size",)) or 1
        positions = _first_number(self.config, _POSITIONS) or _USUAL_LENGTH
        if positions > _ROUNDED_ABOVE:
            positions -= positions % 8
        if "pixel_values" in self.shapes:  # task_input is the size of the image
            length = min(positions, _USUAL_LENGTH)
        else:
            length = self._length(usual=min(positions, _USUAL_LENGTH), inputs="sequences", unit="tokens")
            self.task_input, self.sequence_length = str(length), length
        self.shapes["input_ids"] = ((length,), vocabulary)
        heads = ("LM", "ConditionalGeneration", "PreTraining", "TokenClass")
        per_token = any(head in self.class_name for head in heads)
        labels = self._labels if "TokenClass" in self.class_name else vocabulary
        if "start_positions" in self.accepted:
            self.shapes |= dict.fromkeys(("start_positions", "end_positions"), ((), length))
        elif "labels" in self.accepted and "SequenceClassification" in self.class_name:
            self.shapes["labels"] = ((), self._labels)
        elif "labels" in self.accepted and (per_token or "GPT2Double" in self.class_name):
            self.shapes["labels"] = ((length,), labels)
        if "next_sentence_label" in self.accepted and "PreTraining" in self.class_name:
            self.shapes["next_sentence_label"] = ((), 2)
        if self.config.is_encoder_decoder and "labels" not in self.shapes and "decoder_input_ids" in self.accepted:
            self.shapes["decoder_input_ids"] = ((length,), vocabulary)

    def _add_spectrogram(self) -> None:
        """Log-mel frames for a speech encoder, and the text that it learns to write."""
        frames = 2 * (getattr(self.config, "max_source_positions", None) or 1500)
        frames = self._length(usual=frames, inputs="spectrograms", unit="frames")
        self.task_input = str(frames)
        self.shapes["input_features"] = ((getattr(self.config, "num_mel_bins", 80), frames), 0)
        if "labels" in self.accepted and self.config.is_encoder_decoder:
            length = getattr(self.config, "max_target_positions", 448)
            self.reasons.append(f"assumed texts of {length} tokens")
            self.shapes["labels"] = ((length,), self.config.vocab_size)

    def _add_audio(self) -> None:
        bins, frames = getattr(self.config, "num_mel_bins", None), getattr(self.config, "max_length", None)
        if isinstance(bins, int) and isinstance(frames, int):  # a spectrogram, as the AST takes it
            self.shapes["input_values"] = ((frames, bins), 0)
            self.task_input = str(frames)
        else:
            length = self._length(usual=_USUAL_SECONDS * _SAMPLES_PER_S, inputs="waveforms", unit="samples")
            self.shapes["input_values"] = ((length,), 0)
            self.task_input = str(length)
        if "labels" in self.accepted and "Classification" in self.class_name:
            self.shapes["labels"] = ((), self._labels)

    def make_batch(self, samples: int) -> dict[str, Any]:
        """Arguments of one call, all zeros: numbers, or ids that are in range."""
        batch: dict[str, Any] = {
            name: torch.zeros(samples, *shape, dtype=torch.long if ids else torch.float32)
            for name, (shape, ids) in self.shapes.items()
        }
        if "return_loss" in self.accepted and {"pixel_values", "input_ids"} <= batch.keys():
            batch["return_loss"] = True
        return batch


class KeepLayers(TorchFunctionMode):
    """Give 1 wherever a single random number is drawn: speech models drop a layer when it is below a rate."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.rand and args in (((),), ([],)):
            return 1.0
        return func(*args, **(kwargs or {}))


def _compute_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    with KeepLayers():
        return loss_of_output(model(**batch))


def _kind_of(config: PretrainedConfig, inputs: _Inputs, *, experts: int) -> str:
    if "input_values" in inputs.shapes or "input_features" in inputs.shapes:
        return "speech"
    if "input_ids" not in inputs.shapes:
        return ""
    if "pixel_values" in inputs.shapes:
        return "vision_transformer"
    if experts:
        return "mixture_of_experts"
    if getattr(config, "is_encoder_decoder", False):
        return "sequence_to_sequence"
    is_causal = any(head in inputs.class_name for head in ("CausalLM", "LMHeadModel"))
    return "language_decoder" if is_causal else "language_encoder"


def _count_experts(model: PreTrainedModel) -> tuple[int, int, float]:
    """Experts of a layer, experts that work on one token, and parameters inside all experts."""
    config = model.config.get_text_config()
    inside = sum(parameter.numel() for part in _expert_layers(model) for parameter in part.parameters())
    if not inside:
        return 0, 0, 0.0
    experts = _first_number(model.config, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
    active = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None) or 1
    return experts or 0, min(int(active), experts or 0), float(inside)


def count_config(values: Mapping[str, Any], *, name: str, task_input: str = "") -> CountedModel:
    """Count what training the model of a Hugging Face configuration costs, from a walk of its architecture.

    ``values`` is the parsed ``config.json``. ``task_input`` is a resolution, a sequence length, the frames of a
    spectrogram or the samples of a waveform, by what the model takes. The loss is the model's own where it computes
    one from labels. ``kind`` stays empty for images, where only the counts show it. Raises as ``build_model`` and
    ``count_training``.
    """
    model = build_model(values, name=name)
    inputs = _Inputs(model, task_input=task_input)
    counted = count_training(
        model,
        inputs.make_batch,
        compute_loss=_compute_loss,
        name=name,
        task_input=inputs.task_input,
        sequence_length=inputs.sequence_length,
        content=None,
    )
    config = model.config
    experts, active, inside = _count_experts(model)
    if experts:
        inputs.reasons.append("assumed that the router spreads tokens evenly over the experts")
    params, family = counted.workload.params, find_family(config.model_type)
    workload = replace(
        counted.workload,
        family=family.family if family else "",
        kind=_kind_of(config, inputs, experts=experts),
        layers=_first_number(config, ("num_hidden_layers", "n_layer", "num_layers")),
        hidden_size=_first_number(config, ("hidden_size", "n_embd", "d_model")),
        heads=_first_number(config, ("num_attention_heads", "n_head", "encoder_attention_heads")),
        kv_heads=_first_number(config, ("num_key_value_heads",)),
        ffn_size=_first_number(
            config, (*(("moe_intermediate_size",) if experts else ()), "intermediate_size", "n_inner", "d_ff")
        ),
        vocab=_first_number(config, ("vocab_size",)) if "input_ids" in inputs.shapes else None,
        experts=experts or None,
        active_experts=active or None,
        active_params=math.ceil(params - inside * (1 - active / experts)) if experts else None,
    )
    reasons = (f"built {type(model).__name__} with transformers {transformers.__version__}", *inputs.reasons)
    return CountedModel(
        workload=workload, trainable_share=counted.trainable_share, reasons=(*reasons, *counted.reasons)
    )
