"""A picture of figures: horizontal bars, as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, ROW = 800, 370, 60, 34
#: Torch's red, and this package's blue; the pale blue is for what both have alike.
RED, BLUE, PALE = "#c8503c", "#4a7fb0", "#9db8cf"


@dataclass(frozen=True)
class Bar:
    """One bar: its label, the colour and length of each part, and the text at its end."""

    label: str
    parts: Sequence[tuple[str, float]]
    text: str


def bar_picture(
    heading: str, bars: Sequence[Bar], lines: Sequence[str] = (), key: Sequence[tuple[str, str]] = ()
) -> str:
    """Draw bars of one scale.

    lines: text below. key: what each colour means.
    """
    top = max(sum(length for _, length in bar.parts) for bar in bars)
    height = 50 + ROW * len(bars) + 22 * len(lines) + 16
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{escape(heading)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="10" y="26" fill="#222" font-weight="bold">{escape(heading)}</text>',
    ]
    for number, (colour, meaning) in enumerate(key):
        x = LEFT + 130 * number
        out += [_box(x, 14, 14, 14, colour), _text(x + 20, 26, meaning)]
    for number, bar in enumerate(bars):
        y, x = 44 + ROW * number, float(LEFT)
        out.append(_text(LEFT - 10, y + 17, bar.label, ' text-anchor="end"'))
        for colour, length in bar.parts:
            width = (WIDTH - LEFT - RIGHT) * length / top
            out.append(_box(x, y, width, 24, colour))
            x += width
        out.append(_text(x + 6, y + 17, bar.text))
    out += [_text(10, 64 + ROW * len(bars) + 22 * number, line) for number, line in enumerate(lines)]
    return "\n".join([*out, "</svg>", ""])


def _box(x: float, y: int, width: float, height: int, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: int, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="#222"{more}>{escape(text)}</text>'
