"""Models that a user may pass: a name, module, ``module:factory``, Hugging Face config.json or card, as a workload."""

import contextlib
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from precision_time.predictor.answering.user_cards import describe_user_card
from precision_time.predictor.workloads.families import ATTENTION_KINDS, guess_kind
from precision_time.predictor.workloads.walk_cache import (
    CountedModel,
    counting_version,
    hash_content,
    recall_count,
    remember_count,
)
from precision_time.predictor.workloads.workload import WorkloadFeatures, find_workload
from precision_time.storage.errors import InputError, NotFoundError, UnknownNameError

__all__ = ["import_factory", "resolve_model"]

_ATTENTION_OPTIMIZER, _OTHER_OPTIMIZER = "adamw", "sgd_momentum"
_LARGEST_CONFIG_BYTES = 16_000_000


def resolve_model(
    model: Any,
    *,
    task_input: str = "",
    sample_input: Any = None,
    loss: Callable[[Any], Any] | None = None,
    measured: Iterable[WorkloadFeatures] = (),
) -> CountedModel:
    """The workload of any model that a user may pass, and what was assumed about it.

    Args:
        model: the name of a known model, a ``torch.nn.Module`` (with ``sample_input``), the text ``module:factory`` (a
            function without arguments that returns a module or a ``tasks.workloads.Workload``), the path of a Hugging
            Face ``config.json`` or of its folder, a card (a mapping or dataclass with ``user_cards.CARD_KEYS``:
            ``forward_flops`` of one sample at 2 per multiply-add, ``activations`` in elements), or a
            ``WorkloadFeatures``.
        task_input: for names and configurations: another resolution or sequence length than the usual one.
        sample_input: for modules: a sample, see ``count_module.count_module``.
        loss: for modules: a function from the output to a scalar.
        measured: workloads that are found by name before the shipped ones.

    Returns:
        The counted model; torch is imported only for a model that has not been walked before.

    Raises:
        InputError, UnknownNameError, NotFoundError: a model that cannot be used.
    """
    measured = tuple(measured)
    name = ""
    if isinstance(model, str) and ":" in model and all(workload.name != model for workload in measured):
        name, model = model, import_factory(model)
        if not _is_module(model) and not _is_workload(model):
            raise InputError(
                f"{name} does not return a model",
                got=type(model).__name__,
                expected="a function returning a torch.nn.Module or a precision_time.tasks.workloads.Workload",
            )
    if _is_module(model) or _is_workload(model):
        if task_input:
            raise InputError(
                "task_input goes with models that are given by name",
                got=repr(task_input),
                expected="the size of the input in sample_input",
            )
        count = _count_module if _is_module(model) else _count_workload
        return _complete(count(model, name=name, sample_input=sample_input, loss=loss))
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
        return _complete(describe_user_card(model))
    if dataclasses.is_dataclass(model) and not isinstance(model, type):
        values = dataclasses.asdict(model)
        return _complete(describe_user_card({key: value for key, value in values.items() if value is not None}))
    if isinstance(model, str | Path):
        config = _find_config(model)
        if config is not None:
            return _complete(_count_config(config, task_input=task_input))
        return CountedModel(workload=_find_named(str(model), task_input=task_input, measured=measured))
    raise InputError(
        "not a model",
        got=repr(model)[:200],
        expected="a name, a torch.nn.Module, module:factory, the path of a config.json, or a card of sizes",
    )


def _complete(counted: CountedModel) -> CountedModel:
    """The model with a kind and an optimizer, and with its own network, so that it is not taken for a shipped one."""
    workload, reasons = counted.workload, counted.reasons
    kind, optimizer = workload.kind, workload.optimizer
    if not kind:
        walk = None if workload.walks is None else workload.walks["fp32"]
        recurrent_flops = 0.0 if walk is None else walk.total("flops", phase="forward", families=("recurrent",))
        kind = guess_kind(
            convolution_share=workload.convolution_flops_share,
            attends=workload.attention_flops_share > 0 or (walk is not None and walk.scores > 0),
            recurrent_share=recurrent_flops / workload.forward_flops_per_sample,
            takes_tokens=workload.sequence_length is not None,
        )
    if not optimizer:
        attends = kind in ATTENTION_KINDS or workload.attention_flops_share > 0
        optimizer = _ATTENTION_OPTIMIZER if attends else _OTHER_OPTIMIZER
        reasons = (*reasons, f"assumed the optimizer {optimizer}")
    workload = dataclasses.replace(workload, kind=kind, optimizer=optimizer, network=f"own:{workload.name}")
    return dataclasses.replace(counted, workload=workload, reasons=reasons)


def import_factory(name: str) -> Any:
    """What ``module:factory`` returns, or the object itself where it cannot be called.

    Modules are found as ``python -m`` finds them, the current folder first. Raises ``InputError`` for a factory that
    cannot be imported or that fails.
    """
    module_name, _, factory_name = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    expected = f"a function {factory_name or 'factory'}() in a module {module_name or 'module'} of the current folder"
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except Exception as error:  # a user's module may raise anything
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


def _is_module(model: object) -> bool:
    """Whether it is a ``torch.nn.Module``, which it cannot be before torch is imported."""
    torch = sys.modules.get("torch")
    module_class = getattr(getattr(torch, "nn", None), "Module", None)
    return isinstance(module_class, type) and isinstance(model, module_class)


def _is_workload(model: object) -> bool:
    """Whether it has the parts of a ``tasks.workloads.Workload``."""
    return all(hasattr(model, part) for part in ("module", "make_batch", "compute_loss"))


def _import_walking() -> ModuleType:
    try:
        return importlib.import_module("precision_time.predictor.walking.count_module")
    except ImportError as error:
        raise InputError(
            "this model has to be walked, which needs torch",
            got=str(error),
            expected="torch in this environment",
            fix="pip install 'precision-time[campaign]', or describe the model by a card of its sizes",
        ) from error


def _count_module(module: Any, *, name: str, sample_input: Any, loss: Callable[[Any], Any] | None) -> CountedModel:
    if sample_input is None:
        raise InputError(
            "a module needs a sample of its input",
            got=f"{name or type(module).__name__} without sample_input",
            expected="sample_input= a tensor [batch, ...], a tuple or dict of them, or a shape such as '3x224x224' or "
            "'tokens:512' (on the command line: --sample-input)",
        )
    counted: CountedModel = _import_walking().count_module(module, sample_input=sample_input, loss=loss, name=name)
    return counted


def _count_workload(workload: Any, *, name: str, sample_input: Any, loss: Callable[[Any], Any] | None) -> CountedModel:
    from precision_time.predictor.workloads.module_content import describe_value

    if sample_input is not None or loss is not None:
        raise InputError("a workload has its own batches and loss", got="sample_input or loss beside it",
                         expected="neither")  # fmt: skip
    counted: CountedModel = _import_walking().count_training(
        workload.module,
        lambda samples: workload.make_batch(samples, "cpu"),
        compute_loss=workload.compute_loss,
        name=name or str(getattr(workload, "name", "my workload")),
        task_input=str(getattr(workload, "task_input", "")),
        content=(describe_value(workload.make_batch), describe_value(workload.compute_loss)),
    )
    described = dataclasses.replace(
        counted.workload,
        family=str(getattr(workload, "family", "")),
        optimizer=str(getattr(workload, "optimizer_name", "")),
    )
    return dataclasses.replace(counted, workload=described)


def _find_config(model: str | Path) -> Path | None:
    """The Hugging Face configuration that ``model`` is the path of; None where it is no path."""
    text = str(model)
    if not isinstance(model, Path) and not text.endswith(".json") and "/" not in text and os.sep not in text:
        return None
    path = Path(text).expanduser()
    with contextlib.suppress(OSError, ValueError):  # a name that is too long or holds a null is no file
        if path.is_file():
            return path
        if (path / "config.json").is_file():
            return path / "config.json"
    if isinstance(model, Path) or text.endswith(".json") or text.startswith((".", "/", "~")):
        raise NotFoundError(
            "there is no Hugging Face configuration at this path",
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
    cached = recall_count(key)
    if cached is not None:
        return cached
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(
            "this configuration cannot be read", got=f"{path.name}: {error}", expected="a Hugging Face config.json"
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InputError(
            "this is not a Hugging Face configuration", got=f"{path.name} without model_type",
            expected="a config.json of a transformers model",
        )  # fmt: skip
    _import_walking()
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


def _find_named(name: str, *, task_input: str, measured: tuple[WorkloadFeatures, ...]) -> WorkloadFeatures:
    try:
        return find_workload(name, task_input=task_input, measured=measured)
    except UnknownNameError:
        if "/" not in name:
            raise
    # The last part of a name on a model hub may be near to a known name.
    last_part = name.rpartition("/")[2]
    try:
        nearest = [find_workload(last_part, measured=measured).name]
    except UnknownNameError as error:
        nearest = error.nearest
    raise UnknownNameError(
        "model", name, nearest, fix="nothing is downloaded: give a known name, or the path of the model's config.json"
    )
