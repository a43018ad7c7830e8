"""Charts as SVG. The plots stretch with the page; the labels around them are HTML and keep their size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 1000, 200
UNKNOWN = "\N{EN DASH}"
"""Shown in place of a value that is not known."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the horizontal axis with a text: shown when a person points at it or moves the focus there."""

    x: float
    text: str
    key: str = ""


def number(value: float | None) -> str:
    """A number for people: four significant digits; a dash if it is unknown."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.4g}"


def line_chart(
    title: str,
    points: Sequence[Point],
    *,
    unit: str = "",
    marks: Iterable[Mark] = (),
    over: str = "step",
    is_area: bool = False,
    limit: float | None = None,
    second: Sequence[Point] = (),
    shows_peak: bool = False,
) -> Markup:
    """A figure with one curve (or two); `limit` is a horizontal line. Without points it says so.

    The heading has the last value, or the highest one if `shows_peak`.
    """
    if not points:
        return Markup(
            '<figure class="chart"><figcaption>{}</figcaption>'
            '<p class="empty">No values yet.</p></figure>'
        ).format(title)
    frame = _Frame.around([*points, *second], at_zero=is_area, limit=limit)
    last = points[-1][1]
    label = (
        f"{title} over {over}s: {number(points[0][1])} at first, {number(last)} at last, "
        f"between {number(min(y for _, y in points))} and {number(max(y for _, y in points))}"
    )
    drawn = [frame.grid()]
    if is_area:
        drawn.append(Markup('<path class="area" d="{}"/>').format(frame.area(points)))
    drawn.append(Markup('<path class="line" d="{}"/>').format(frame.path(points)))
    if second:
        drawn.append(Markup('<path class="line second" d="{}"/>').format(frame.path(second)))
    if limit is not None:
        height = frame.y(limit)
        drawn.append(Markup('<path class="limit" d="M0 {0}H1000"/>').format(f"{height:.1f}"))
    drawn += [frame.mark(mark) for mark in marks]
    return Markup(
        '<figure class="chart"><figcaption><span>{title}</span><strong>{last}{unit}</strong></figcaption>'
        '<div class="plot"><div class="y" aria-hidden="true"><span>{high}</span><span>{low}</span></div>'
        '<svg viewBox="0 0 1000 200" preserveAspectRatio="none" role="group" aria-label="{label}">'
        "{body}</svg></div>"
        '<div class="x" aria-hidden="true"><span>{first}</span><span>{over} {end}</span></div></figure>'
    ).format(
        title=title,
        last=f"at most {number(max(y for _, y in points))}" if shows_peak else number(last),
        unit=f" {unit}" if unit else "",
        high=number(frame.high),
        low=number(frame.low),
        label=label,
        body=Markup("").join(drawn),
        first=number(frame.left),
        over=over,
        end=number(frame.right),
    )


def bar_chart(
    title: str, bars: Sequence[tuple[str, float]], *, unit: str, limit: float | None
) -> Markup:
    """Horizontal bars with their names and figures; bars above the limit are drawn as bad."""
    most = max([value for _, value in bars] + ([] if limit is None else [limit]), default=0) or 1
    rows = []
    for name, value in bars:
        width = max(0.0, min(1.0, value / most)) * WIDTH if math.isfinite(value) else 0
        kind = "bar bad" if limit is not None and value > limit else "bar"
        line = ""
        if limit is not None:
            line = Markup('<path class="limit" d="M{0} 0V20"/>').format(
                f"{limit / most * WIDTH:.1f}"
            )
        rows.append(
            Markup(
                '<div class="bar-row"><span>{}</span><svg viewBox="0 0 1000 20" '
                'preserveAspectRatio="none" aria-hidden="true"><rect class="{}" width="{:.1f}" '
                'height="20"/>{}</svg><span class="number">{} {}</span></div>'
            ).format(name, kind, width, line, number(value), unit)
        )
    bound = "" if limit is None else f" (limit {number(limit)} {unit})"
    return Markup('<figure class="bars"><figcaption>{}{}</figcaption>{}</figure>').format(
        title, bound, Markup("").join(rows)
    )


def rectangles(
    title: str,
    boxes: Sequence[tuple[float, float, float, float, str]],
    *,
    width: float,
    height: float,
) -> Markup:
    """A map of boxes (x, y, width, height, text) with y upwards, as the blocks of a pool over time."""
    drawn = []
    for x, y, wide, high, text in boxes:
        drawn.append(
            Markup(
                '<rect class="block c{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}">'
                "<title>{}</title></rect>"
            ).format(
                sum(text.partition(":")[0].encode()) % 6,
                x / width * WIDTH,
                (1 - (y + high) / height) * HEIGHT * 2,
                max(0.5, wide / width * WIDTH),
                max(0.3, high / height * HEIGHT * 2),
                text,
            )
        )
    return Markup(
        '<figure class="chart map"><figcaption>{0}</figcaption><svg viewBox="0 0 1000 400" '
        'preserveAspectRatio="none" role="img" aria-label="{0}">{1}</svg></figure>'
    ).format(title, Markup("").join(drawn))


@dataclass(frozen=True, slots=True)
class _Frame:
    """The part of the plane that a plot shows."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, points: Sequence[Point], *, at_zero: bool, limit: float | None) -> _Frame:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        if limit is not None:
            ys.append(limit)
        low, high = (0.0 if at_zero else min(ys)), max(ys)
        if high <= low:
            low, high = low - (0 if at_zero else 0.5), low + 0.5
        return cls(min(xs), max(xs), low, high)

    def x(self, value: float) -> float:
        span = self.right - self.left
        return (value - self.left) / span * WIDTH if span > 0 else WIDTH / 2

    def y(self, value: float) -> float:
        return 6 + (1 - (value - self.low) / (self.high - self.low)) * (HEIGHT - 12)

    def path(self, points: Iterable[Point]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def area(self, points: Sequence[Point]) -> str:
        ends = f"L{self.x(points[-1][0]):.1f} {HEIGHT}L{self.x(points[0][0]):.1f} {HEIGHT}Z"
        return self.path(points) + ends

    def grid(self) -> Markup:
        lines = "".join(f"M0 {HEIGHT * part / 4:.0f}H{WIDTH}" for part in range(1, 4))
        return Markup('<path class="grid" d="{}"/>').format(lines)

    def mark(self, mark: Mark) -> Markup:
        x = min(max(self.x(mark.x), 0), WIDTH)
        return Markup(
            '<g class="mark" id="{}" tabindex="0" role="img" aria-label="{}"><title>{}</title>'
            '<rect x="{:.1f}" y="0" width="16" height="{}"/><path d="M{:.1f} 0V{}"/></g>'
        ).format(escape(mark.key), mark.text, mark.text, x - 8, HEIGHT, x, HEIGHT)


def steps_of(points: Sequence[Point]) -> list[Point]:
    """A curve that keeps each value until the next point, as the number of workers does."""
    found: list[Point] = []
    for x, y in points:
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y))
    return found
