"""The picture of the demonstration's figures, as SVG."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, ROW = 800, 330, 90, 34
COLOURS = {"torch": "#c8503c", "torch_dpflow": "#4a7fb0"}


def picture(bars: Sequence[tuple[str, str, float]], lines: Sequence[str]) -> str:
    """Draw images a second.

    bars: what was done, by which side, and its images a second. lines: text below.
    """
    top = max(rate for _, _, rate in bars)
    height = 50 + ROW * len(bars) + 22 * len(lines) + 16
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        "<title>Images a second of each side</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<text x="10" y="26" fill="#222" font-weight="bold">Images a second, on this machine</text>',
    ]
    for number, (label, side, rate) in enumerate(bars):
        y = 44 + ROW * number
        width = (WIDTH - LEFT - RIGHT) * rate / top
        out += [
            f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end" fill="#222">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="24" fill="{COLOURS[side]}"/>',
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 17}" fill="#222">{rate:,.0f}</text>',
        ]
    for number, line in enumerate(lines):
        y = 44 + ROW * len(bars) + 22 * number + 20
        out.append(f'<text x="10" y="{y}" fill="#222">{escape(line)}</text>')
    return "\n".join([*out, "</svg>", ""])
