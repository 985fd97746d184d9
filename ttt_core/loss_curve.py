"""The loss curve of a run as a picture, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def loss_curve(losses: Sequence[float], label: str) -> np.ndarray:
    """Losses along the steps, raw and smoothed, log scale where they span much; (H, W, 3) float32 in 0..1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: it would keep global state inside ComfyUI's process

    figure = Figure(figsize=(5, 3), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axis = figure.subplots()
    values = np.asarray(losses, dtype=np.float64)
    steps = np.arange(1, len(values) + 1)
    axis.plot(steps, values, color="#8a8f98", linewidth=0.8, alpha=0.6)
    if len(values):
        window = max(1, len(values) // 25)
        smooth = np.convolve(values, np.ones(window) / window, mode="valid")
        axis.plot(steps[window - 1 :], smooth, color="#1f77b4", linewidth=1.6)
        if values.min() > 0 and values.max() > 5 * values.min():
            axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel(label)
    axis.spines[["top", "right"]].set_visible(False)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(np.float32) / 255
