"""Validation of a version: load the registered weights, and measure latency and accuracy of the model."""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensorforge.errors import InvalidInputError, NotFoundError
from tensorforge.registry.domain.models import ModelMetadata, Sla, ValidationResult
from tensorforge.registry.domain.selection import meets_sla
from tensorforge.registry.weights import Progress, describe_weights, require_checksum
from tensorforge.statistics import percentile
from tensorforge.validation import whole_number

Loader = Callable[[dict[str, Any]], Any]
Metric = Callable[[Any, Any], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPlan:
    """What to validate with, and how.

    After `warm_up` requests, `repeats` requests are timed, each with `batch_size` samples. Accuracy is measured
    on all samples of the data. `loader` and `metric` name functions: see `load_callable`.
    """

    weights: Path
    loader: str
    data: Path
    metric: str = ""
    batch_size: int = 1
    warm_up: int = 5
    repeats: int = 100

    def __post_init__(self) -> None:
        for field, least in (("batch_size", 1), ("warm_up", 0), ("repeats", 1)):
            whole_number(field, getattr(self, field), least=least)


def run_validation(
    metadata: ModelMetadata,
    plan: ValidationPlan,
    sla: Sla | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> ValidationResult:
    """Load the model, measure it, and decide whether it passed.

    A mistake of the caller is raised: no such loader, other weights than those that were registered, unreadable
    data. If the model cannot be built or fails on the data, the result did not pass and has the error.
    """
    loader, metric = load_callable(plan.loader), _metric(plan.metric)
    weights = describe_weights(plan.weights)
    require_checksum(weights, metadata.checksum)
    inputs, targets = read_data(plan.data)
    errors: list[str] = []
    latencies: list[float] = []
    accuracy, samples = math.nan, 0
    try:
        model = _build(loader, weights.files)
        latencies = measure_latency(model, inputs, plan, clock=clock, progress=progress)
        accuracy, samples = measure_accuracy(model, inputs, targets, metric)
    except InvalidInputError:
        raise
    except Exception as error:  # noqa: BLE001  an error of the model is part of the result
        errors.append(f"{type(error).__name__}: {error}"[:500])
    result = ValidationResult(
        model_id=metadata.model_id,
        version=metadata.version,
        passed=False,
        latency_p50_ms=percentile(latencies, 50),
        latency_p99_ms=percentile(latencies, 99),
        accuracy_score=accuracy,
        errors=tuple(errors),
        samples=samples or None,
    )
    return _judge(result, sla)


def _judge(result: ValidationResult, sla: Sla | None) -> ValidationResult:
    measured = not (math.isnan(result.latency_p99_ms) or math.isnan(result.accuracy_score))
    fine = sla is None or meets_sla(result, sla.max_latency_ms, sla.min_accuracy)
    return replace(result, passed=not result.errors and measured and fine)


def load_callable(name: str) -> Callable[..., Any]:
    """The function with this name: `package.module:function` or `path/to/file.py:function`."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise InvalidInputError(
            f"{name[:200]!r}: write package.module:function or path/to/file.py:function"
        )
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise NotFoundError(f"{place} has no function {attribute!r}")
    return found  # type: ignore[no-any-return]  # callable was just checked


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotFoundError(f"the module {name!r} cannot be imported: {error}") from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"_tensorforge_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidInputError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_data(path: Path) -> tuple[Any, Any]:
    """The tensors `inputs` and `targets` of a safetensors or .npz file, with one sample per row."""
    import numpy as np
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise NotFoundError(f"there is no data file {path}")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                found: dict[str, Any] = {k: torch.from_numpy(arrays[k]) for k in arrays.files}
        else:
            found = load_file(path)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    if "inputs" not in found or "targets" not in found:
        raise InvalidInputError(f"{path} must have inputs and targets; it has {sorted(found)}")
    inputs, targets = found["inputs"], found["targets"]
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets) or not len(inputs):
        raise InvalidInputError(
            f"{path}: inputs {list(inputs.shape)} and targets {list(targets.shape)} "
            "must have the same number of samples, at least one"
        )
    return inputs, targets


def _build(loader: Loader, files: tuple[Path, ...]) -> Callable[[Any], Any]:
    import torch
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in files:
        tensors |= load_file(file)
    model = loader(tensors)
    if isinstance(model, torch.export.ExportedProgram):
        model = model.module()
    elif isinstance(model, torch.nn.Module):
        model = model.eval()
    if not callable(model):
        raise InvalidInputError(
            f"the loader returned a {type(model).__name__}; "
            "it must return a module, an exported program or a function"
        )
    return model  # type: ignore[no-any-return]  # callable was just checked


def measure_latency(
    model: Callable[[Any], Any],
    inputs: Any,
    plan: ValidationPlan,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> list[float]:
    """The milliseconds of each timed request. The requests go through the data in order, again and again."""
    import torch

    times = []
    with torch.inference_mode():
        for turn in range(plan.warm_up + plan.repeats):
            batch = _batch(inputs, turn * plan.batch_size, plan.batch_size)
            started = clock()
            model(batch)
            if turn >= plan.warm_up:
                times.append((clock() - started) * 1000)
            if progress is not None:
                progress(turn + 1, plan.warm_up + plan.repeats)
    return times


def _batch(inputs: Any, start: int, size: int) -> Any:
    import torch

    indices = torch.arange(start, start + size) % len(inputs)
    return inputs[indices]


def measure_accuracy(
    model: Callable[[Any], Any], inputs: Any, targets: Any, metric: Metric | None, chunk: int = 256
) -> tuple[float, int]:
    """The score on all samples, and their number."""
    import torch

    with torch.inference_mode():
        outputs = [
            _main_output(model(inputs[start : start + chunk]))
            for start in range(0, len(inputs), chunk)
        ]
    answer = torch.cat(outputs)
    if answer.is_floating_point() and not bool(torch.isfinite(answer).all()):
        raise ArithmeticError("the model's output is not finite")
    score = accuracy(answer, targets) if metric is None else float(metric(answer, targets))
    return score, len(inputs)


def _main_output(output: Any) -> Any:
    if isinstance(output, dict):
        output = output.get("logits", next(iter(output.values()), None))
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, (tuple, list)):
        output = output[0]
    return output


def accuracy(outputs: Any, targets: Any) -> float:
    """The share of samples whose highest output is at the index of the target."""
    if targets.is_floating_point():
        raise InvalidInputError(
            "the targets are not class numbers; name a metric: package.module:function"
        )
    guesses = outputs.argmax(-1) if outputs.ndim > targets.ndim else outputs
    return float((guesses == targets).double().mean())


def _metric(name: str) -> Metric | None:
    return load_callable(name) if name else None
