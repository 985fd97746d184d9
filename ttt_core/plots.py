"""Charts as pictures, drawn with matplotlib."""

from __future__ import annotations

import numpy as np

from .compare import Comparison

COLORS = ("#8a8f98", "#1f77b4")


def comparison_chart(result: Comparison) -> np.ndarray:
    """Seconds per step, total seconds and memory of both arms; (H, W, 3) float32 in 0..1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: it would keep global state inside ComfyUI's process

    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    labels = [a.label for a in result.arms]
    panels = (
        ("seconds per step", [a.per_step for a in result.arms], "{:.3f}"),
        ("seconds in all", [a.total for a in result.arms], "{:.2f}"),
        (f"MiB, {result.memory_kind}", [a.peak / 2**20 for a in result.arms], "{:,.0f}"),
    )
    for axis, (title, values, text) in zip(figure.subplots(1, 3), panels, strict=True):
        bars = axis.bar(labels, values, color=COLORS, width=0.6)
        axis.bar_label(bars, [text.format(v) for v in values], padding=2)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(0, max(max(values) * 1.18, 1e-6))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result.size}: speed-up {result.speedup:.2f}x\n{result.device}", fontsize=11)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(np.float32) / 255


def side_by_side(pictures: list[np.ndarray], labels: list[str]) -> np.ndarray:
    """Pictures (H, W, 3) in 0..1 of one size, each under its label, as one picture of the same kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height, width = pictures[0].shape[:2]
    figure = Figure(figsize=(3.2 * len(pictures), 3.2 * height / width + 0.4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(pictures), squeeze=False)[0]
    for axis, picture, label in zip(axes, pictures, labels, strict=True):
        axis.imshow(np.clip(picture, 0, 1), interpolation="nearest")
        axis.set_title(label, fontsize=11)
        axis.set_axis_off()
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(np.float32) / 255
