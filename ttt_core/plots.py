"""Charts as pictures, drawn with matplotlib: (H, W, 3) float32 in 0..1."""

from __future__ import annotations

import numpy as np

from .compare import Comparison
from .compare_series import Series

COLORS = ("#8a8f98", "#1f77b4", "#e07b39", "#3a9d5d")
_LABEL = {2: 22, 3: 16, 4: 11}  # characters of an arm's name that fit under its bar, by the number of arms


def new_figure(width: float, height: float, dpi: int = 110):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: it would keep global state inside ComfyUI's process

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    return figure, FigureCanvasAgg(figure)


def to_pixels(canvas) -> np.ndarray:
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(np.float32) / 255


def comparison_chart(result: Comparison) -> np.ndarray:
    """Seconds per step, total seconds (whiskers: fastest and slowest run) and memory of every arm at one size."""
    figure, canvas = new_figure(9, 3.8)
    arms = result.arms
    totals = np.array([a.total for a in arms])
    whiskers = np.array([[a.total - min(a.totals) for a in arms], [max(a.totals) - a.total for a in arms]])
    panels = (
        ("seconds per step", np.array([a.per_step for a in arms]), "{:.3f}", None),
        ("seconds in all", totals, "{:.2f}", whiskers),
        (f"MiB, {result.memory_kind}", np.array([a.peak / 2**20 for a in arms]), "{:,.0f}", None),
    )
    places = np.arange(len(arms))
    for axis, (title, values, text, error) in zip(figure.subplots(1, 3), panels, strict=True):
        bars = axis.bar(places, values, color=COLORS[: len(arms)], width=0.6, yerr=error, capsize=3, ecolor="#444444")
        axis.bar_label(bars, [text.format(v) for v in values], padding=2)
        axis.set_xticks(places, [_short(a.label, _LABEL.get(len(arms), 11)) for a in arms], fontsize=9 if len(arms) < 4 else 8)
        axis.set_title(title, fontsize=10)
        least = 1 if title.startswith("MiB") else 1e-6  # less than a MiB is nothing, and should look so
        axis.set_ylim(0, max(float((values if error is None else values + error[1]).max()) * 1.18, least))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result.size}: {_speedups(result)}\n{result.device}", fontsize=11)
    return to_pixels(canvas)


def series_chart(series: Series) -> np.ndarray:
    """For several sizes: seconds per step, speed-up and memory over image tokens; for one size its bars."""
    rows = series.by_tokens()
    if len(rows) == 1:
        return comparison_chart(rows[0])
    figure, canvas = new_figure(11, 4.2)
    tokens = [c.tokens for c in rows]
    seconds, speed, memory = figure.subplots(1, 3)
    for i, arm in enumerate(rows[0].arms):
        style = dict(color=COLORS[i], marker="o", label=_short(arm.label))
        seconds.plot(tokens, [c.arms[i].per_step for c in rows], **style)
        memory.plot(tokens, [c.arms[i].peak / 2**20 for c in rows], **style)
        gains = [c.speedup_of(i) for c in rows]
        speed.plot(tokens, gains, **style, ls="--" if i == 0 else "-")
        if i:
            ranges = np.array([c.speedup_range(i) for c in rows]).T
            speed.fill_between(tokens, *ranges, color=COLORS[i], alpha=0.15, lw=0)
            if (even := series.break_even(i)) is not None:
                speed.axvline(even, color=COLORS[i], ls=":", lw=1.2)
                speed.annotate(f"break-even {even:,.0f}", (even, 0.02), (4, 12 * (i - 1)), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=9, color=COLORS[i])
    for axis, title in ((seconds, "seconds per step"), (speed, f"speed-up over {_short(rows[0].arms[0].label)}"), (memory, f"MiB, {rows[0].memory_kind}")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(tokens, [f"{t:,}" for t in tokens], fontsize=8, rotation=30 if len(tokens) > 3 else 0)
        axis.minorticks_off()
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("image tokens", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    seconds.set_yscale("log")
    memory.set_ylim(bottom=0)
    seconds.legend(frameon=False, fontsize=9)
    figure.suptitle(f"{len(rows)} sizes, {rows[0].device}", fontsize=11)
    return to_pixels(canvas)


def difference_map(first: np.ndarray, others: list[np.ndarray], labels: list[str], what: str) -> np.ndarray:
    """Absolute difference of each of `others` to `first`, averaged over channels, on one colour scale.

    Arrays (H, W, C) of one size; labels: of first and others; what: in which numbers, e.g. 'pixel values, 0 to 1'.
    """
    maps = [np.abs(o - first).mean(axis=-1) for o in others]
    top = max(float(max(m.max() for m in maps)), 1e-6)
    height, width = first.shape[:2]
    figure, canvas = new_figure(4.6 * len(maps) + 0.8, 4.6 * height / width + 1.0)
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, field, label in zip(axes, maps, labels[1:], strict=True):
        shown = axis.imshow(field, vmin=0, vmax=top, cmap="magma", interpolation="nearest")
        axis.set_title(f"|{_short(label)} - {_short(labels[0])}|\nmean {field.mean():.3g}, largest {field.max():.3g}", fontsize=10)
        axis.set_axis_off()
    figure.colorbar(shown, ax=list(axes), shrink=0.8, label=what)
    return to_pixels(canvas)


def _short(label: str, length: int = 24) -> str:
    return label if len(label) <= length else label[: length - 1] + "..."


def _speedups(result: Comparison) -> str:
    gains = [f"{_short(a.label)} {result.speedup_of(i):.2f}x" for i, a in enumerate(result.arms) if i]
    return f"speed-up {result.speedup:.2f}x" if len(gains) == 1 else "speed-up " + ", ".join(gains)
