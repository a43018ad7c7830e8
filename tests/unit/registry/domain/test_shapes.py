import pytest

from tensorforge.registry import Bump, TensorSpec, due_bump, shape_compatibility
from tensorforge.registry.domain.shapes import Interface


@pytest.mark.parametrize(
    ("a", "b", "score"),
    [
        (((3, 224, 224), (1000,)), ((3, 224, 224), (1000,)), 1.0),
        (((3, 224, 224), (1000,)), ((3, 224, 224), (10,)), 0.5),
        (((3, 224, 224), (1000,)), ((1, 28, 28), (10,)), 0.0),
        (((4,), (2,)), ((4, 4), (2,)), 0.75),
        (((), ()), ((), ()), 1.0),
        (((), ()), ((1,), (1,)), 0.0),
        (((), (5,)), ((1,), (5,)), 0.5),
    ],
)
def test_the_score_is_the_share_of_axes_that_agree(a, b, score):
    assert shape_compatibility(*a, *b) == score
    assert shape_compatibility(*b, *a) == score


BASE = Interface((4,), (2,), {"w": TensorSpec("F32", (2, 4)), "b": TensorSpec("F32", (2,))})


@pytest.mark.parametrize(
    ("changed", "bump", "reason"),
    [
        (BASE, Bump.PATCH, "all shapes are the same"),
        (Interface((5,), (2,), BASE.tensors), Bump.MAJOR, "input shape changed from [4] to [5]"),
        (Interface((4,), (3,), BASE.tensors), Bump.MAJOR, "output shape changed"),
        (Interface((4,), (2,), {"w": TensorSpec("F32", (2, 4))}), Bump.MAJOR, "b is gone"),
        (
            Interface((4,), (2,), {**BASE.tensors, "w": TensorSpec("F32", (2, 5))}),
            Bump.MAJOR,
            "w changed from [2, 4] to [2, 5]",
        ),
        (
            Interface((4,), (2,), {**BASE.tensors, "new": TensorSpec("F32", (1,))}),
            Bump.MINOR,
            "new is new",
        ),
        (
            Interface((4,), (2,), {**BASE.tensors, "b": TensorSpec("BF16", (2,))}),
            Bump.MINOR,
            "F32 to BF16",
        ),
        (Interface((), (), {}), Bump.PATCH, "all shapes are the same"),
    ],
)
def test_the_bump_that_is_due_comes_with_its_reason(changed, bump, reason):
    due = due_bump(BASE, changed)
    assert due.bump is bump
    assert any(reason in text for text in due.reasons)


def test_many_reasons_are_shortened():
    old = Interface((), (), {f"t{i:02}": TensorSpec("F32", (i,)) for i in range(20)})
    new = Interface((), (), {f"t{i:02}": TensorSpec("F32", (i + 1,)) for i in range(20)})
    reasons = due_bump(old, new).reasons
    assert len(reasons) == 6
    assert reasons[-1] == "and 15 more"
