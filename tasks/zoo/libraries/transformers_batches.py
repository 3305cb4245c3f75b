"""Batches for networks of transformers by kind of input, and one loss for all of their outputs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.storage.errors import InputError

__all__ = ["BATCHES", "compute_loss"]

Batch = dict[str, Tensor]

#: Outputs that are scores [..., classes], or values.
_SCORES = (
    "logits", "prediction_logits", "seq_relationship_logits", "start_logits", "end_logits", "logits_per_image",
    "logits_per_text", "predicted_depth", "pred_boxes",
)  # fmt: skip
#: Outputs to train on where a network returns no scores; the first one counts.
_STATES = ("prediction_outputs", "last_hidden_state", "image_embeds")


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)


def _tokens(config: Any, length: int, target: int, samples: int) -> Batch:
    return {"input_ids": _zeros(samples, length)}


def _pairs(config: Any, length: int, target: int, samples: int) -> Batch:
    return {"input_ids": _zeros(samples, length), "decoder_input_ids": _zeros(samples, target)}


def _images(config: Any, length: int, target: int, samples: int) -> Batch:
    return {"pixel_values": torch.zeros(samples, getattr(config, "num_channels", 3), length, length)}


def _videos(config: Any, length: int, target: int, samples: int) -> Batch:
    return {"pixel_values": torch.zeros(samples, config.num_frames, 3, length, length)}


def _image_text(config: Any, length: int, target: int, samples: int) -> Batch:
    side = config.vision_config.image_size
    return {"input_ids": _zeros(samples, length), "pixel_values": torch.zeros(samples, 3, side, side)}


def _mel(config: Any, length: int, target: int, samples: int) -> Batch:
    features = torch.zeros(samples, config.num_mel_bins, length)
    return {"input_features": features, "decoder_input_ids": _zeros(samples, target)}


def _sound(config: Any, length: int, target: int, samples: int) -> Batch:
    return {"input_values": torch.zeros(samples, length)}


def _spectrogram(config: Any, length: int, target: int, samples: int) -> Batch:
    return {"input_values": torch.zeros(samples, length, config.num_mel_bins)}


def _series(config: Any, length: int, target: int, samples: int) -> Batch:
    return {"past_values": torch.zeros(samples, length, config.num_input_channels)}


#: By kind: ``batch(config, length, target, samples)``.
BATCHES: dict[str, Callable[[Any, int, int, int], Batch]] = {
    "tokens": _tokens,
    "pairs": _pairs,
    "images": _images,
    "videos": _videos,
    "image_text": _image_text,
    "mel": _mel,
    "sound": _sound,
    "spectrogram": _spectrogram,
    "series": _series,
}


def compute_loss(module: nn.Module, batch: Batch) -> Tensor:
    """The loss that the network computes, else the cross-entropy of all its scores, else the mean square of a state.

    Where speech networks train with a CTC loss, every frame is scored instead: the work of CTC is small beside theirs.
    """
    from precision_time.predictor.walking.huggingface import KeepLayers

    with KeepLayers():
        output = module(**batch)
    if getattr(output, "loss", None) is not None:
        loss: Tensor = output.loss
        return loss
    losses = []
    for name in _SCORES:
        scores = getattr(output, name, None)
        if not isinstance(scores, Tensor):
            continue
        if name in ("predicted_depth", "pred_boxes"):
            losses.append(scores.abs().mean())
            continue
        if scores.dim() == 4:  # classes of pixels
            scores = scores.permute(0, 2, 3, 1)
        flat = scores.reshape(-1, scores.shape[-1])
        if flat.shape[-1] == 1:
            losses.append(F.binary_cross_entropy_with_logits(flat, torch.zeros_like(flat)))
        elif name == "logits" and scores.dim() == 2 and scores.shape == next(iter(batch.values())).shape:
            # one binary score for every token
            losses.append(F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores)))
        else:
            losses.append(F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long, device=flat.device)))
    if not losses:
        for name in _STATES:
            state = getattr(output, name, None)
            if isinstance(state, Tensor):
                losses.append(state.square().mean())
                break
    if not losses:
        raise InputError("the network returns no scores", got=str(list(output)), expected="logits or hidden states")
    return torch.stack([loss.float() for loss in losses]).sum()
