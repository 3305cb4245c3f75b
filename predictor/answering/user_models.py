"""Models of a user's own: a module, ``module:factory``, a Hugging Face config.json or a card, as WorkloadFeatures."""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

from precision_time.predictor.workloads.cards import Card
from precision_time.predictor.workloads.families import ATTENTION_KINDS, KINDS, guess_kind
from precision_time.predictor.workloads.walk_cache import (
    CountedModel,
    counting_version,
    hash_content,
    recall_count,
    remember_count,
)
from precision_time.predictor.workloads.workload import WorkloadFeatures, describe_card, find_workload
from precision_time.storage.errors import InputError, NotFoundError, UnknownNameError

__all__ = ["CARD_KEYS", "import_factory", "parse_quantity", "resolve_model"]

#: What a card may say; the first two it must.
CARD_KEYS = (
    "params", "forward_flops", "activations", "convolution_share", "attention_share", "name", "kind", "optimizer",
    "parameter_tensors", "layers", "sequence_length", "task_input",
)  # fmt: skip
#: A family of each sort, under whose name ``describe_card`` takes the ratios of convolutions or of attention.
_LIKE = {True: "bert", False: "resnet"}
_ATTENTION_OPTIMIZER, _OTHER_OPTIMIZER = "adamw", "sgd_momentum"
_LARGEST_CONFIG_BYTES = 16_000_000
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(e[+-]?\d{1,2})?\s*([kmgbt]?)", re.IGNORECASE)
_SUFFIXES = {"": 0, "k": 3, "m": 6, "g": 9, "b": 9, "t": 12}


def parse_quantity(name: str, text: str) -> float:
    """A number with an optional suffix (``25.6M``, ``8.2G``, ``7B``, ``1e9``); raises ``InputError``."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise InputError(
            f"{name} is not a number",
            got=repr(text[:100]),
            expected="a number such as 25600000, 2.56e7 or 25.6M (K, M, G or B, T)",
        )
    # as written, so that 8.2G is 8.2e9 to the last bit
    return float(Decimal(found[1] + (found[2] or "")).scaleb(_SUFFIXES[found[3].lower()]))


def import_factory(name: str) -> Any:
    """What ``module:factory`` returns, or the object itself where it cannot be called.

    Modules are found as ``python -m`` finds them, the current folder first. Raises ``InputError`` for what cannot be
    imported and for a factory that fails.
    """
    module_name, _, factory_name = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    expected = f"a function {factory_name or 'factory'}() in a module {module_name or 'module'} of the current folder"
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except Exception as error:  # a module of the user's own may raise anything
        raise InputError(
            f"{name} cannot be imported", got=f"{type(error).__name__}: {error}", expected=expected
        ) from error
    if not callable(factory) or _is_module(factory):
        return factory
    try:
        return factory()
    except Exception as error:
        raise InputError(
            f"{name}() fails",
            got=f"{type(error).__name__}: {error}",
            expected="a function that takes no arguments and returns the model",
        ) from error


def _torch_door() -> ModuleType:
    try:
        return importlib.import_module("precision_time.predictor.walking.count_module")
    except ImportError as error:
        raise InputError(
            "this model has to be walked, which needs torch",
            got=str(error),
            expected="torch in this environment",
            fix="pip install 'precision-time[campaign]', or describe the model by a card of its sizes",
        ) from error


def _is_module(model: object) -> bool:
    """Whether it is a ``torch.nn.Module``; nobody holds one without torch having been imported."""
    torch = sys.modules.get("torch")
    kind = getattr(getattr(torch, "nn", None), "Module", None)
    return isinstance(kind, type) and isinstance(model, kind)


def _is_workload(model: object) -> bool:
    """Whether it has the parts of a ``tasks.workloads.Workload``."""
    return all(hasattr(model, part) for part in ("module", "make_batch", "compute_loss"))


def _label(counted: CountedModel, *, family: str = "", kind: str = "", optimizer: str = "") -> CountedModel:
    """The counted model with a kind, an optimizer, and a network of its own, so that no listed one is taken for it."""
    work, reasons = counted.workload, counted.reasons
    if not kind:
        walk = None if work.walks is None else work.walks["fp32"]
        recurrent = 0.0
        if walk is not None:
            recurrent = walk.total("flops", phase="forward", families=("recurrent",)) / work.forward_flops_per_sample
        kind = guess_kind(
            convolution_share=work.convolution_flops_share,
            attends=work.attention_flops_share > 0 or (walk is not None and walk.scores > 0),
            recurrent_share=recurrent,
            takes_tokens=work.sequence_length is not None,
        )
    if not optimizer:
        attends = kind in ATTENTION_KINDS or work.attention_flops_share > 0
        optimizer = _ATTENTION_OPTIMIZER if attends else _OTHER_OPTIMIZER
        reasons = (*reasons, f"assumed the optimizer {optimizer}")
    work = dataclasses.replace(work, family=family, kind=kind, optimizer=optimizer, network=f"own:{work.name}")
    return dataclasses.replace(counted, workload=work, reasons=reasons)


def _describe_own_card(values: Mapping[str, Any]) -> CountedModel:
    for key in values:
        if key not in CARD_KEYS:
            raise UnknownNameError("key of a model card", str(key), CARD_KEYS)
    name = str(values.get("name") or "my model")

    def number(key: str, *, at_most: float = 1e24, at_least: float = 0.0) -> float | None:
        value = values.get(key)
        if value is None:
            if key in CARD_KEYS[:2]:
                raise InputError(
                    f"the card of {name} lacks {key}",
                    got=", ".join(map(str, values)) or "an empty card",
                    expected="params, and forward_flops of one sample (2 per multiply-add)",
                )
            return None
        if isinstance(value, str):
            value = parse_quantity(key, value)
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not at_least <= found <= at_most or (found == 0 and at_most > 1):
            raise InputError(
                f"{key} of the card of {name} is not usable",
                got=repr(values[key]),
                expected="a number above 0" if at_most > 1 else "a share from 0 to 1",
            )
        return found

    params, flops = number("params"), number("forward_flops")
    assert params is not None
    assert flops is not None
    if params < 1:
        raise InputError(f"params of the card of {name} is not usable", got=repr(params), expected="at least 1")
    convolutions, attention = number("convolution_share", at_most=1.0), number("attention_share", at_most=1.0)
    if (convolutions or 0.0) + (attention or 0.0) > 1:
        raise InputError(
            f"the shares of the card of {name} do not fit",
            got=f"convolution_share {convolutions} and attention_share {attention}",
            expected="shares of the forward FLOPs whose sum is at most 1; the rest is dense products",
        )
    kind = str(values.get("kind") or "")
    if kind and kind not in KINDS:
        raise UnknownNameError("kind of model", kind, KINDS)
    reasons: tuple[str, ...] = (f"{name} is known by a card of its sizes alone: what moves is estimated from them",)
    if not kind:
        told = convolutions is not None or attention is not None
        kind = guess_kind(convolution_share=convolutions or 0.0, attends=bool(attention)) if told else "cnn"
        if not told:
            reasons += ("assumed a network of convolutions: give kind, convolution_share or attention_share",)
    length, tensors, layers = number("sequence_length"), number("parameter_tensors"), number("layers")
    card = Card(
        **{field.name: None for field in dataclasses.fields(Card)}  # type: ignore[arg-type]
        | {
            "model": name,
            "optimizer": "",
            "activations_per_sample": number("activations"),
            "convolution_share": convolutions,
            "attention_share": attention,
            "parameter_tensors": None if tensors is None else round(tensors),
            "layers": None if layers is None else round(layers),
        }
    )
    work = describe_card(
        _LIKE[kind in ATTENTION_KINDS],
        params=round(params),
        forward_flops_per_sample=flops,
        card=card,
        task_input=str(values.get("task_input") or ""),
        sequence_length=None if length is None else round(length),
    )
    work = dataclasses.replace(work, name=name)
    return _label(CountedModel(workload=work, reasons=reasons), kind=kind, optimizer=str(values.get("optimizer") or ""))


def _find_config(model: str | Path) -> Path | None:
    """The file of a Hugging Face configuration that ``model`` names; None where it is no path."""
    text = str(model)
    if not isinstance(model, Path) and not text.endswith(".json") and "/" not in text and os.sep not in text:
        return None
    path = Path(text).expanduser()
    with contextlib.suppress(OSError, ValueError):  # a name too long, or with a null in it, is no file
        if path.is_file():
            return path
        if (path / "config.json").is_file():
            return path / "config.json"
    if isinstance(model, Path) or text.endswith(".json") or text.startswith((".", "/", "~")):
        raise NotFoundError(
            "there is no Hugging Face configuration",
            got=text[:300],
            expected="the path of a config.json, or of a folder that holds one; nothing is downloaded",
        )
    return None


def _count_config(path: Path, *, task_input: str) -> CountedModel:
    data = path.read_bytes() if path.stat().st_size <= _LARGEST_CONFIG_BYTES else b""
    name = path.parent.absolute().name if path.name == "config.json" else path.stem
    key = hash_content(
        ["config", counting_version("torch", "transformers"), name, task_input, data.decode("utf-8", "replace")]
    )
    kept = recall_count(key)
    if kept is not None:
        return kept
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(
            "this configuration cannot be read", got=f"{path.name}: {error}", expected="a Hugging Face config.json"
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InputError(
            "this is no Hugging Face configuration", got=f"{path.name} without model_type",
            expected="a config.json of a transformers model",
        )  # fmt: skip
    _torch_door()
    try:
        huggingface = importlib.import_module("precision_time.predictor.walking.huggingface")
    except ImportError as error:
        raise InputError(
            "a Hugging Face configuration needs transformers to be walked",
            got=str(error),
            expected="transformers in this environment",
            fix="pip install 'precision-time[campaign]'",
        ) from error
    counted: CountedModel = huggingface.count_config(values, name=name, task_input=task_input)
    remember_count(key, counted)
    return counted


def _count_workload(workload: Any, *, name: str) -> CountedModel:
    from precision_time.predictor.workloads.module_content import describe_value

    optimizer = str(getattr(workload, "optimizer_name", ""))
    counted: CountedModel = _torch_door().count_training(
        workload.module,
        lambda samples: workload.make_batch(samples, "cpu"),
        compute_loss=workload.compute_loss,
        name=name,
        task_input=str(getattr(workload, "task_input", "")),
        content=(describe_value(workload.make_batch), describe_value(workload.compute_loss)),
    )
    return _label(counted, family=str(getattr(workload, "family", "")), optimizer=optimizer)


def _count_built(model: Any, *, name: str, sample_input: Any, loss: Callable[[Any], Any] | None) -> CountedModel:
    """A module, or what has the parts of a workload."""
    if not _is_module(model):
        if sample_input is not None or loss is not None:
            raise InputError("a workload has its own batches and loss", got="sample_input or loss beside it",
                             expected="neither")  # fmt: skip
        return _count_workload(model, name=name or str(getattr(model, "name", "my workload")))
    if sample_input is None:
        raise InputError(
            "a module needs a sample of its input",
            got=f"{name or type(model).__name__} without sample_input",
            expected="sample_input= a tensor [batch, ...], a tuple or dict of them, or a shape such as '3x224x224' or "
            "'tokens:512' (on the command line: --sample-input)",
        )
    return _label(_torch_door().count_module(model, sample_input=sample_input, loss=loss, name=name))


def resolve_model(
    model: Any,
    *,
    task_input: str = "",
    sample_input: Any = None,
    loss: Callable[[Any], Any] | None = None,
    measured: Iterable[WorkloadFeatures] = (),
) -> CountedModel:
    """Whatever a user calls a model, as features, with what of it the answer has to say.

    ``model`` is a name, a ``torch.nn.Module`` with ``sample_input``, the text ``module:factory`` (a function without
    arguments that returns a module or a ``tasks.workloads.Workload``), the path of a Hugging Face ``config.json`` or
    of its folder, or a card: a mapping or dataclass with ``CARD_KEYS`` (``forward_flops`` of one sample at 2 per
    multiply-add, ``activations`` in elements). ``task_input`` goes with names and configurations, ``sample_input`` and
    ``loss`` with modules; see ``count_module.count_module``. Torch is imported only to walk what was never walked.

    Raises ``InputError``, ``UnknownNameError`` and ``NotFoundError`` for what cannot be used.
    """
    measured = tuple(measured)
    if isinstance(model, str) and ":" in model and all(work.name != model for work in measured):
        name, model = model, import_factory(model)
        if not _is_module(model) and not _is_workload(model):
            raise InputError(
                f"{name} is of another kind",
                got=type(model).__name__,
                expected="a function returning a torch.nn.Module or a precision_time.tasks.workloads.Workload",
            )
    else:
        name = ""
    built = _is_module(model) or _is_workload(model)
    if built and task_input:
        raise InputError(
            "task_input goes with models that are known by name",
            got=repr(task_input),
            expected="the size of the input in sample_input",
        )
    if built:
        return _count_built(model, name=name, sample_input=sample_input, loss=loss)
    if sample_input is not None or loss is not None:
        raise InputError(
            "sample_input and loss go with a module",
            got=f"a model given as {type(model).__name__}",
            expected="a torch.nn.Module, or module:factory",
            fix="task_input= chooses the resolution or sequence length of a known model",
        )
    if isinstance(model, WorkloadFeatures):
        return CountedModel(workload=model)
    if isinstance(model, Mapping):
        return _describe_own_card(model)
    if dataclasses.is_dataclass(model) and not isinstance(model, type):
        return _describe_own_card({key: value for key, value in dataclasses.asdict(model).items() if value is not None})
    if isinstance(model, str | Path):
        config = _find_config(model)
        if config is not None:
            counted = _count_config(config, task_input=task_input)
            return _label(counted, family=counted.workload.family, kind=counted.workload.kind)
        return CountedModel(workload=_find_named(str(model), task_input=task_input, measured=measured))
    raise InputError(
        "not a model",
        got=repr(model)[:200],
        expected="a name, a torch.nn.Module, module:factory, the path of a config.json, or a card of sizes",
    )


def _find_named(name: str, *, task_input: str, measured: tuple[WorkloadFeatures, ...]) -> WorkloadFeatures:
    try:
        return find_workload(name, task_input=task_input, measured=measured)
    except UnknownNameError:
        if "/" not in name:
            raise
    # the name of a model hub: its last part is what a known name may be near to
    tail = name.rpartition("/")[2]
    try:
        near = [find_workload(tail, measured=measured).name]
    except UnknownNameError as error:
        near = error.nearest
    raise UnknownNameError(
        "model", name, near, fix="nothing is downloaded: give a known name, or the path of the model's config.json"
    )
