"""Three kinds of picture: curves over capacity, grouped bars over scenarios, adjusted p values."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

Values = NDArray[np.float64]

#: colour-blind safe (Okabe and Ito), in the order of first use
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B8A800")
#: bounds are drawn in black: nothing measured lies above them
BOUND: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.3}
BOUND_STYLES = ("--", ":")
MARKERS = "osD^vP*X"
#: a figure stays readable where a bound runs through it
LABEL_BOX = {"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none"}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Hit rates in percent over capacities in percent of the data set."""

    capacities: Sequence[float]
    rates: Sequence[float]
    #: standard deviation over seeds, percentage points
    spreads: Sequence[float]
    is_bound: bool = False


def curves(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Curve]],
    *,
    marks: Mapping[float, str] | None = None,
) -> None:
    """Write one panel of curves for each entry of `panels`, side by side on one scale.

    `marks`: capacities in percent that get a vertical line, and what to write beside it.
    """
    figure, axes = _panels(len(panels), width=6.4 if len(panels) > 1 else 9.0, height=4.6)
    for axis, (heading, series) in zip(axes, panels.items()):
        measured = [name for name, curve in series.items() if not curve.is_bound]
        bounds = [name for name, curve in series.items() if curve.is_bound]
        for k, name in enumerate(measured):
            curve = series[name]
            axis.errorbar(curve.capacities, curve.rates, yerr=curve.spreads, label=name, **_line_style(k))
        for k, name in enumerate(bounds):
            style = BOUND | {"linestyle": BOUND_STYLES[k % 2], "zorder": 5}
            axis.plot(series[name].capacities, series[name].rates, label=name, **style)
        axis.set(xlabel="cache capacity (% of the data set)", title=heading)
        axis.set_ylim(bottom=0)
        for capacity, text in (marks or {}).items():
            axis.axvline(capacity, color="grey", linewidth=0.9, zorder=0)
            axis.annotate(text, (capacity, 2), xytext=(4, 0), textcoords="offset points", color="grey")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("hit rate (% of accesses)")
    _legend(axes[-1], bounds)
    _write(figure, path, title)


def bars(
    path: Path,
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float]]],
    bounds: Sequence[float],
    *,
    bound_label: str = "upper bound",
) -> None:
    """Write grouped bars: for every name in `series` one (rate, spread) in percent for each group.

    `bounds` has one figure for each group, drawn as a dashed line across it.
    """
    figure, (axis,) = _panels(1, width=max(10.0, 0.36 * len(groups) * (len(series) + 1)), height=4.8)
    width = 0.84 / len(series)
    for k, (name, values) in enumerate(series.items()):
        places = np.arange(len(groups)) + (k - (len(series) - 1) / 2) * width
        rates, spreads = zip(*values)
        colour = COLOURS[k % len(COLOURS)]
        drawn = axis.bar(places, rates, width * 0.92, yerr=spreads, label=name, color=colour, capsize=2)
        axis.bar_label(drawn, fmt="%.0f", fontsize=7.5, padding=2, bbox=LABEL_BOX, zorder=4)
    for k, bound in enumerate(bounds):
        label = bound_label if k == 0 else None
        axis.hlines(bound, k - 0.45, k + 0.45, label=label, colors="black", linestyles="--", linewidth=1.3)
    axis.set_xticks(range(len(groups)), groups, fontsize=9)
    axis.set_ylabel("hit rate (% of accesses)")
    axis.set_ylim(0, max([*bounds, *(rate for values in series.values() for rate, _ in values)]) * 1.12)
    axis.grid(axis="y", alpha=0.25)
    _legend(axis, [bound_label])
    _write(figure, path, title)


def p_values(path: Path, title: str, panels: Mapping[str, Mapping[str, Values]], *, level: float) -> None:
    """Write one panel for each scenario: each sampler's adjusted p values in rising order."""
    figure, axes = _panels(len(panels), width=3.6, height=4.4)
    for axis, (heading, series) in zip(axes, panels.items()):
        for k, (name, p) in enumerate(series.items()):
            share = np.linspace(0, 100, len(p))
            axis.plot(share, np.sort(np.maximum(p, 1e-12)), label=name, color=COLOURS[k % len(COLOURS)])
        axis.axhline(level, **BOUND)
        axis.set(xlabel="positions (%, by p value)", title=heading, yscale="log", ylim=(5e-13, 2))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel(f"adjusted p value (dashed: {level})")
    _legend(axes[-1], [])
    _write(figure, path, title)


def _panels(count: int, *, width: float, height: float) -> tuple[Figure, list[Any]]:
    figure, axes = plt.subplots(1, count, figsize=(width * count, height), sharey=True, squeeze=False)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def _legend(axis: Any, last: Sequence[str]) -> None:
    """To the right of the last panel, where it hides nothing; the entries named in `last` at the end."""
    handles, labels = axis.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda place: labels[place] in last)
    entries = [handles[place] for place in order], [labels[place] for place in order]
    axis.legend(*entries, frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _line_style(k: int) -> dict[str, Any]:
    marker = MARKERS[k % len(MARKERS)]
    colour = COLOURS[k % len(COLOURS)]
    # Hollow markers: curves that coincide stay visible.
    look = {"marker": marker, "markersize": 6, "markerfacecolor": "none", "linewidth": 1.4, "capsize": 2}
    return {"color": colour, **look}


def _write(figure: Figure, path: Path, title: str) -> None:
    width = 11 * figure.get_figwidth()
    figure.suptitle(textwrap.fill(title, round(width)), fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
