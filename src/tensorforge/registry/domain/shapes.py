"""Shapes: how similar those of two models are, and which version bump a change of shapes needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorforge.registry.domain.models import Shape, TensorSpec
from tensorforge.registry.domain.versions import Bump

_SHOWN = 5


def shape_compatibility(
    input_a: Sequence[int], output_a: Sequence[int], input_b: Sequence[int], output_b: Sequence[int]
) -> float:
    """How similar the shapes of two models are, from 0 to 1; the order of the models does not matter.

    The mean over input and output of this share: the axes that are equal, position by position, divided by the
    number of axes of the longer shape. 1.0 exactly if both shapes are equal; two shapes without axes are equal.
    """
    return (_agreement(input_a, input_b) + _agreement(output_a, output_b)) / 2


def _agreement(a: Sequence[int], b: Sequence[int]) -> float:
    longer = max(len(a), len(b))
    if longer == 0:
        return 1.0
    return sum(x == y for x, y in zip(a, b, strict=False)) / longer


@dataclass(frozen=True, slots=True)
class Interface:
    """What users of a model depend on: the shapes of input and output, and the tensors."""

    input_shape: Shape
    output_shape: Shape
    tensors: Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class DueBump:
    """The smallest bump that a change needs, and why."""

    bump: Bump
    reasons: tuple[str, ...]


def due_bump(previous: Interface, current: Interface) -> DueBump:
    """The smallest bump that the change from `previous` to `current` needs.

    Major if the input or output shape changed, or a tensor is gone or has another shape: users of the previous
    version would break. Minor if tensors were added or have another type. Patch otherwise. A shape, or the
    tensors, that one of the two does not declare are not compared.
    """
    breaking = _changed_ends(previous, current)
    widened: list[str] = []
    if previous.tensors and current.tensors:
        breaking += _broken_tensors(previous.tensors, current.tensors)
        widened += _widened_tensors(previous.tensors, current.tensors)
    if breaking:
        return DueBump(Bump.MAJOR, _shorten(breaking))
    if widened:
        return DueBump(Bump.MINOR, _shorten(widened))
    return DueBump(Bump.PATCH, ("all shapes are the same",))


def _changed_ends(previous: Interface, current: Interface) -> list[str]:
    ends = (
        ("input", previous.input_shape, current.input_shape),
        ("output", previous.output_shape, current.output_shape),
    )
    return [
        f"the {end} shape changed from {list(old)} to {list(new)}"
        for end, old, new in ends
        if old and new and old != new
    ]


def _broken_tensors(old: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec]) -> list[str]:
    gone = [f"the tensor {name} is gone" for name in sorted(old.keys() - new.keys())]
    return gone + [
        f"the tensor {name} changed from {list(old[name].shape)} to {list(new[name].shape)}"
        for name in sorted(old.keys() & new.keys())
        if old[name].shape != new[name].shape
    ]


def _widened_tensors(old: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec]) -> list[str]:
    added = [f"the tensor {name} is new" for name in sorted(new.keys() - old.keys())]
    return added + [
        f"the tensor {name} changed from {old[name].dtype} to {new[name].dtype}"
        for name in sorted(old.keys() & new.keys())
        if old[name].dtype != new[name].dtype
    ]


def _shorten(reasons: list[str]) -> tuple[str, ...]:
    if len(reasons) <= _SHOWN:
        return tuple(reasons)
    return (*reasons[:_SHOWN], f"and {len(reasons) - _SHOWN} more")
