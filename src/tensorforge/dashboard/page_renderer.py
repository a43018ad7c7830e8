"""Fills the templates. Every value is escaped unless it is markup that `charts` made."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tensorforge.dashboard.charts import UNKNOWN, number


def make_environment() -> Environment:
    """The templates of this package, with escaping on and errors for unknown names."""
    environment = Environment(
        loader=PackageLoader("tensorforge.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "size": show_size,
        "ago": show_age,
        "moment": show_moment,
        "segment": lambda text: quote(str(text), safe=""),
        "milliseconds": show_milliseconds,
    }
    return environment


class PageRenderer:
    """Renders whole pages and parts of them."""

    def __init__(self) -> None:
        self._environment = make_environment()
        for name in self._environment.list_templates():
            self._environment.get_template(name)  # compiled now, not when somebody waits

    def render(self, template: str, /, **values: Any) -> str:
        """The text of a template with these values."""
        return self._environment.get_template(template).render(**values)


def stylesheet() -> Markup:
    """The style of the pages, for a page that is one file."""
    return Markup(  # noqa: S704  a file of this package
        (files("tensorforge.dashboard") / "static" / "dashboard.css").read_text(encoding="utf-8")
    )


def show_size(count: float | None) -> str:
    """A number of bytes with a unit."""
    if count is None or math.isnan(count):
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def show_age(seconds_since_1970: float, now: float | None = None) -> str:
    """How long ago a moment was, in its largest unit."""
    age = max(0.0, (time.time() if now is None else now) - seconds_since_1970)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age >= size:
            return f"{age / size:.0f} {unit} ago"
    return "now" if age < 5 else f"{age // 5 * 5:.0f} s ago"


def show_moment(moment: datetime | None) -> str:
    """A moment in UTC, to the second."""
    return UNKNOWN if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def show_milliseconds(value: float | None) -> str:
    """Milliseconds without decimals; a dash for a phase that was not reached."""
    return UNKNOWN if value is None else f"{value:,.0f}"
