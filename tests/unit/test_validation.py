"""Checks of single values: what passes, and what the error says."""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
import pytest

from tensorforge import validation
from tensorforge.errors import ConfigurationError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


PASSING = [
    (validation.whole_number("n", 3), 3),
    (validation.whole_number("n", 1, least=1, most=1), 1),
    (validation.finite_number("x", 0.5, least=0), 0.5),
    (validation.finite_number("x", 2, above=1), 2),
    (validation.finite_number("x", np.float32(0.5)), 0.5),
    (validation.one_of("way", "up", ("up", "down")), "up"),
    (validation.member("colour", Colour.RED, Colour), Colour.RED),
    (validation.flag("yes", True), True),
]


@pytest.mark.parametrize(("result", "value"), PASSING)
def test_a_value_that_keeps_the_rule_comes_back(result, value):
    assert result == value


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: validation.whole_number("n", 1.0), "n = 1.0: must be a whole number"),
        (lambda: validation.whole_number("n", True), "n = True: must be a whole number"),
        (lambda: validation.whole_number("n", None), "n = None: must be a whole number"),
        (lambda: validation.whole_number("n", 0, least=1), "n = 0: must be at least 1"),
        (lambda: validation.whole_number("n", 9, most=8), "n = 9: must be at most 8"),
        (lambda: validation.finite_number("x", "1"), "x = '1': must be a finite number"),
        (lambda: validation.finite_number("x", True), "x = True: must be a finite number"),
        (lambda: validation.finite_number("x", math.nan), "x = nan: must be a finite number"),
        (lambda: validation.finite_number("x", math.inf), "x = inf: must be a finite number"),
        (lambda: validation.finite_number("x", -1, least=0), "x = -1: must be at least 0"),
        (lambda: validation.finite_number("x", 0, above=0), "x = 0: must be more than 0"),
        (
            lambda: validation.one_of("way", "left", ("up", "down")),
            "way = 'left': must be one of up, down",
        ),
        (
            lambda: validation.member("colour", "red", Colour),
            "colour = 'red': must be one of Colour.RED, Colour.BLUE",
        ),
        (lambda: validation.flag("yes", 1), "yes = 1: must be True or False"),
    ],
)
def test_the_error_names_field_value_and_rule(check, message):
    with pytest.raises(ConfigurationError) as caught:
        check()
    assert str(caught.value) == message


def test_a_long_value_is_shortened_in_the_message_only():
    text = "x" * 10_000
    with pytest.raises(ConfigurationError) as caught:
        validation.flag("yes", text)
    assert len(str(caught.value)) < 300
    assert caught.value.value is text


def test_a_boolean_is_no_number():
    assert validation.is_whole_number(1)
    assert not validation.is_whole_number(True)
    assert not validation.is_whole_number(1.0)
    assert validation.is_number(math.nan)
    assert not validation.is_number(False)
