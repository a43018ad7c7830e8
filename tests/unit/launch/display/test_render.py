import math

from hypothesis import given
from hypothesis import strategies as st

from tensorforge.launch.display.render import sparkline


def test_a_curve_shows_its_shape():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5], 8) == "▁▁▁"
    assert sparkline([0, 0, 10, 10], 2) == "▁█"
    assert sparkline([], 8) == ""
    assert sparkline([1.0], 0) == ""


def test_what_is_no_number_does_not_stretch_the_scale():
    assert sparkline([0.0, math.nan, 1.0, math.inf], 4) == "▁!█!"
    assert sparkline([math.nan], 4) == "!"


@given(st.lists(st.floats(), max_size=60), st.integers(-1, 30))
def test_a_curve_fits_its_width_whatever_the_values(values, width):
    assert len(sparkline(values, width)) == max(0, min(width, len(values)))
