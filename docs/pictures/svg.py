"""A picture as SVG text: boxes, words and arrows on a white card, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK, SOFT, FAINT = "#1f2933", "#52606d", "#cbd2d9"
BLUE, GREEN, ORANGE, RED, PURPLE = "#1d6fb8", "#23875a", "#b85c00", "#b3263a", "#6b46a8"
TINTS = {
    BLUE: "#e3f0fb",
    GREEN: "#e1f4ea",
    ORANGE: "#fdeedb",
    RED: "#fbe4e7",
    PURPLE: "#ede7f8",
    INK: "#ffffff",
    SOFT: "#f1f4f7",
}
Point = tuple[float, float]


class Drawing:
    """A list of shapes in the order in which they are drawn; later ones cover earlier ones.

    Example:
        drawing = Drawing(200, 100, "One box")
        drawing.box(20, 20, 160, 60, "words", BLUE)
        text = drawing.svg()
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        """Start an empty drawing. title: for screen readers, and shown while the pointer is on the picture."""
        self.width, self.height, self._title = width, height, title
        self._shapes: list[str] = []
        self._heads: dict[str, str] = {}  # arrow heads by colour

    def rect(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none",
             radius: float = 6, dash: str = "", line: float = 1.4) -> None:  # fmt: skip
        """Add a rectangle with round corners."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._shapes.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="{_n(line)}"{dashes}/>'
        )

    def text(self, x: float, y: float, words: str, size: float = 14, colour: str = INK, anchor: str = "middle",
             bold: bool = False, turn: float = 0) -> None:  # fmt: skip
        """Add one line of text whose middle is at height y. turn: degrees clockwise around (x, y)."""
        weight = ' font-weight="bold"' if bold else ""
        turned = f' transform="rotate({_n(turn)} {_n(x)} {_n(y)})"' if turn else ""
        self._shapes.append(
            f'<text x="{_n(x)}" y="{_n(y + 0.35 * size)}" font-size="{_n(size)}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight}{turned}>{escape(words, quote=False)}</text>'
        )

    def lines(self, x: float, y: float, words: Sequence[str], size: float = 13, colour: str = SOFT,
              anchor: str = "middle") -> None:  # fmt: skip
        """Add lines of text one below the other; the first is at height y."""
        for number, line in enumerate(words):
            self.text(x, y + number * 1.35 * size, line, size, colour, anchor)

    def box(self, x: float, y: float, width: float, height: float, words: str | Sequence[str], colour: str = BLUE,
            size: float = 14, dash: str = "") -> None:  # fmt: skip
        """Add a box with a bold first line, and smaller ones below it, in its middle."""
        first, *more = [words] if isinstance(words, str) else words
        self.rect(x, y, width, height, TINTS[colour], colour, dash=dash)
        small = size - 2
        top = y + height / 2 - len(more) * 1.35 * small / 2
        self.text(x + width / 2, top, first, size, bold=True)
        self.lines(x + width / 2, top + 1.3 * small + 2, more, small)

    def line(self, points: Sequence[Point], colour: str = SOFT, width: float = 1.6, dash: str = "",
             arrow: bool = False) -> None:  # fmt: skip
        """Add straight lines from point to point."""
        path = "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self.path(path, colour, width, dash, arrow)

    def arrow(self, points: Sequence[Point], colour: str = SOFT, width: float = 1.6, dash: str = "") -> None:
        """Add straight lines that end in an arrow head."""
        self.line(points, colour, width, dash, arrow=True)

    def curve(self, start: Point, first: Point, second: Point, end: Point, colour: str = SOFT, width: float = 1.6,
              dash: str = "") -> None:  # fmt: skip
        """Add a Bézier curve that ends in an arrow head."""
        points = " ".join(f"{_n(x)} {_n(y)}" for x, y in (first, second, end))
        self.path(f"M{_n(start[0])} {_n(start[1])} C{points}", colour, width, dash, arrow=True)

    def path(self, path: str, colour: str = SOFT, width: float = 1.6, dash: str = "", arrow: bool = False) -> None:
        """Add a path in SVG's path syntax."""
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        if arrow:
            name = self._heads.setdefault(colour, f"head{len(self._heads)}")
            extra += f' marker-end="url(#{name})"'
        self._shapes.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{_n(width)}"{extra}/>')

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        """Add a filled circle."""
        self._shapes.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{colour}"/>')

    def svg(self) -> str:
        """Return the picture as text, the same for the same shapes."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.8 L10 5 L0 9.2 z" fill="{colour}"/></marker>'
            for colour, name in self._heads.items()
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(self.height)}" '
                f'width="{_n(self.width)}" height="{_n(self.height)}" role="img" '
                'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
                f"<title>{escape(self._title, quote=False)}</title>",
                *([f"<defs>{heads}</defs>"] if heads else []),
                f'<rect width="{_n(self.width)}" height="{_n(self.height)}" rx="10" fill="#ffffff"/>',
                *self._shapes,
                "</svg>",
                "",
            ]
        )


def _n(value: float) -> str:
    """Format a number as briefly as possible, with at most two digits after the point."""
    return f"{round(value, 2) + 0.0:g}" if abs(value) < 1e4 else str(round(value))
