"""Draws docs/architecture.svg from the code: packages as boxes, in the layers that the import rules name.

An arrow means "imports". An arrow is left out if it follows from others, as catalog → storage does from
catalog → checkpoint → storage. What is drawn is read from the sources and from pyproject.toml; only the
column and the purpose of each package are written here.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

import grimp

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tensorforge"

PACKAGES = {
    "cli": (1, "one file per command"),
    "dashboard": (1, "pages: runs, checkpoints, models, memory"),
    "launch": (2, "starts, watches and restarts the workers"),
    "registry": (0, "models, their evidence and their audit"),
    "train": (1, "the run: steps, gradients, group, healing"),
    "catalog": (0, "which checkpoints there are and are kept"),
    "elastic": (2, "who is in the cluster, and since when"),
    "checkpoint": (0, "state to files and back, on any ranks"),
    "data": (1, "each sample once; shards and their transfer"),
    "storage": (0, "blobs and the metadata database"),
    "memory": (1, "one arena, lent out block by block"),
    "cluster": (2, "worker, topology, configuration, events"),
}
"""The column and the purpose of each package. `testing` is above all of them and not drawn."""

COLUMNS = 3
BOX_WIDTH, BOX_HEIGHT = 290, 84
GAP_X, GAP_Y = 46, 44
MARGIN = 30
TITLE = 40
FOUNDATION_HEIGHT = 64
FONT = 'font-family="Helvetica, Arial, sans-serif"'
HEADING = "TensorForge: an arrow means “imports”; imports point down"
SUBTITLE = (
    "Arrows that follow from others are left out. What is green is pure: "
    "it reads no clock, socket, thread or random source."
)
PURE, BLACK, GREY = "#2b7a2f", "#1d2329", "#5b6770"
COLOURS = ("#b4472f", "#2f6fb4", "#3d8b40", "#8a4fb0", "#b07d1a", "#1f8a8a", "#a33b74", "#5b6770")


@dataclass(frozen=True)
class Architecture:
    """What is drawn: rows of packages from the top down, arrows, folders, pure modules, root modules."""

    rows: tuple[tuple[str, ...], ...]
    arrows: tuple[tuple[str, str], ...]
    folders: dict[str, tuple[str, ...]]
    pure: frozenset[str]
    foundations: tuple[str, ...]


def read_architecture() -> Architecture:
    """The architecture as the sources and the import rules have it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers, pure = _rules(contracts["contracts"])
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")} - {"testing"}
    if packages != set(PACKAGES):
        raise SystemExit(
            f"PACKAGES does not name {sorted(packages ^ set(PACKAGES))} as the code does"
        )
    rows = tuple(tuple(name for name in row if name in packages) for row in layers)
    foundations = tuple(name for row in layers for name in row if (SOURCE / f"{name}.py").exists())
    return Architecture(
        rows=tuple(row for row in rows if row),
        arrows=_reduced(_imports(packages)),
        folders={name: _folders(name, pure) for name in packages},
        pure=frozenset(pure),
        foundations=foundations,
    )


def _rules(contracts: list[dict]) -> tuple[list[list[str]], list[str]]:
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    pure = next(
        contract["source_modules"] for contract in contracts if contract["name"].startswith("Pure")
    )
    return [[name.strip() for name in layer.split("|")] for layer in layers], pure


def _imports(packages: set[str]) -> set[tuple[str, str]]:
    graph = grimp.build_graph("tensorforge", cache_dir=None)
    found = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            ends = tuple(name.split(".")[1] for name in (module, imported) if "." in name)
            if len(ends) == 2 and ends[0] != ends[1] and set(ends) <= packages:
                found.add(ends)
    return found


def _reduced(arrows: set[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The arrows from which all others follow."""
    below = defaultdict(set)
    for source, target in arrows:
        below[source].add(target)

    def reaches(source: str, target: str) -> bool:
        return target in below[source] or any(reaches(step, target) for step in below[source])

    return tuple(
        sorted(
            (source, target)
            for source, target in arrows
            if not any(reaches(step, target) for step in below[source] - {target})
        )
    )


def _folders(package: str, pure: list[str]) -> tuple[str, ...]:
    """The folders of a package; of those inside its folders only the pure ones."""
    base = SOURCE / package
    names = [path.parent.relative_to(base) for path in base.rglob("*/__init__.py")]
    return tuple(
        name.as_posix()
        for name in sorted(names)
        if len(name.parts) == 1 or ".".join(("tensorforge", package, *name.parts)) in pure
    )


@dataclass(frozen=True)
class Layout:
    """Where everything is: rows by package, and the places at which an arrow may cross a row."""

    architecture: Architecture

    def row(self, package: str) -> int:
        """The row of a package, from the top."""
        return next(n for n, row in enumerate(self.architecture.rows) if package in row)

    def left(self, package: str) -> float:
        """The left edge of its box."""
        return MARGIN + PACKAGES[package][0] * (BOX_WIDTH + GAP_X)

    def top(self, row: int) -> float:
        """The upper edge of a row's boxes."""
        return TITLE + MARGIN + row * (BOX_HEIGHT + GAP_Y)

    @property
    def width(self) -> float:
        """The width of the picture."""
        return 2 * MARGIN + COLUMNS * BOX_WIDTH + (COLUMNS - 1) * GAP_X

    @property
    def height(self) -> float:
        """The height of the picture."""
        return self.top(len(self.architecture.rows)) + FOUNDATION_HEIGHT + MARGIN

    def crossings(self, row: int) -> list[float]:
        """Where an arrow may pass a row: beside the boxes, and through the places without one."""
        taken = {PACKAGES[name][0] for name in self.architecture.rows[row]}
        step = BOX_WIDTH + GAP_X
        gaps = [MARGIN + BOX_WIDTH + GAP_X / 2 + column * step for column in range(COLUMNS - 1)]
        free = [MARGIN + BOX_WIDTH / 2 + c * step for c in range(COLUMNS) if c not in taken]
        return [*gaps, *free, MARGIN / 2, self.width - MARGIN / 2]

    def paths(self) -> dict[tuple[str, str], list[tuple[float, float]]]:
        """For each arrow its points: an end at each box, and two for each row that it passes."""
        starts, ends = self._ports(0), self._ports(1)
        paths, used = {}, defaultdict(int)
        for arrow in self.architecture.arrows:
            source, target = arrow
            rows = range(self.row(source) + 1, self.row(target))
            points = [(starts[arrow], self.top(self.row(source)) + BOX_HEIGHT)]
            for row in rows:
                x = self._lane(row, points[-1][0], ends[arrow])
                used[row, x] += 1
                spread = (used[row, x] // 2) * 9 * (-1) ** used[row, x]
                points += [(x + spread, self.top(row)), (x + spread, self.top(row) + BOX_HEIGHT)]
            points.append((ends[arrow], self.top(self.row(target))))
            paths[arrow] = points
        return paths

    def _lane(self, row: int, x: float, goal: float) -> float:
        return min(self.crossings(row), key=lambda lane: abs(lane - x) + abs(lane - goal) * 1.01)

    def _ports(self, end: int) -> dict[tuple[str, str], float]:
        """The places at a box's lower (0) or upper (1) edge where its arrows begin or end."""
        ports = {}
        for package in PACKAGES:
            here = [arrow for arrow in self.architecture.arrows if arrow[end] == package]
            here.sort(key=lambda arrow: (self.left(arrow[1 - end]), -self.row(arrow[1 - end])))
            for number, arrow in enumerate(here, start=1):
                ports[arrow] = self.left(package) + BOX_WIDTH * number / (len(here) + 1)
        return ports


def draw(architecture: Architecture) -> str:
    """The picture as SVG."""
    layout = Layout(architecture)
    sources = sorted({source for source, _ in architecture.arrows}, key=list(PACKAGES).index)
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(sources)}
    width, height = f"{layout.width:g}", f"{layout.height:g}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>',
        "<title>The packages of TensorForge and their imports</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(MARGIN, 30, HEADING, 17, bold=True),
        _text(MARGIN, 50, SUBTITLE, 12, fill="#3b444d"),
        *[_marker(colour) for colour in dict.fromkeys(colours.values())],
        *[_arrow(points, colours[arrow[0]]) for arrow, points in layout.paths().items()],
        *[_box(layout, name, colours.get(name, GREY)) for name in PACKAGES],
        _foundations(layout),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(
    x: float, y: float, text: str, size: int, *, bold: bool = False, fill: str = BLACK
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{weight}>{escape(text)}</text>'
    )


def _marker(colour: str) -> str:
    return (
        f'<defs><marker id="head-{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0,0.5 L8,4 L0,7.5 z" fill="{colour}"/></marker></defs>'
    )


def _arrow(points: list[tuple[float, float]], colour: str) -> str:
    """A smooth line: curves between the rows, straight lines past them."""
    x, y = points[0]
    path = f"M{x:.1f},{y:.1f}"
    for number, ((x0, y0), (x1, y1)) in enumerate(pairwise(points)):
        if number % 2:
            path += f" L{x1:.1f},{y1:.1f}"
        else:
            middle = (y0 + y1) / 2
            path += f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8" '
        f'marker-end="url(#head-{colour[1:]})"/>'
    )


def _frame(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="1.8"/>'
    )


def _box(layout: Layout, package: str, colour: str) -> str:
    x, y = layout.left(package), layout.top(layout.row(package))
    lines = [
        _frame(x, y, BOX_WIDTH, BOX_HEIGHT, "#f6f8fa", colour),
        _text(x + 12, y + 22, package, 16, bold=True, fill=_colour(layout.architecture, package)),
        _text(x + 12, y + 40, PACKAGES[package][1], 12, fill="#3b444d"),
    ]
    for number, line in enumerate(_wrapped(layout.architecture.folders[package])):
        spans = "".join(
            f'<tspan fill="{_colour(layout.architecture, package, folder)}">{folder} </tspan>'
            for folder in line
        )
        height = y + 58 + 16 * number
        lines.append(f'<text x="{x + 12:g}" y="{height:g}" font-size="12">{spans}</text>')
    return "\n".join(lines)


def _colour(architecture: Architecture, package: str, folder: str = "") -> str:
    module = ".".join(("tensorforge", package, *folder.split("/"))).rstrip(".")
    if module in architecture.pure:
        return PURE
    return GREY if folder else BLACK


def _wrapped(words: tuple[str, ...], most: int = 38) -> list[list[str]]:
    lines: list[list[str]] = []
    for word in words:
        if not lines or sum(map(len, lines[-1])) + len(lines[-1]) + len(word) > most:
            lines.append([])
        lines[-1].append(word)
    return lines


def _foundations(layout: Layout) -> str:
    x, y = MARGIN, layout.top(len(layout.architecture.rows))
    width = layout.width - 2 * MARGIN
    purpose = "modules of tensorforge itself; every package uses them"
    lines = [
        _frame(x, y, width, FOUNDATION_HEIGHT, "#eef1f4", GREY),
        _text(x + 12, y + 22, "foundations", 16, bold=True),
        _text(x + 130, y + 22, purpose, 12, fill="#3b444d"),
    ]
    for number, line in enumerate(_wrapped(layout.architecture.foundations, 118)):
        lines.append(_text(x + 12, y + 46 + 20 * number, " · ".join(line), 13, fill="#3b444d"))
    return "\n".join(lines)
