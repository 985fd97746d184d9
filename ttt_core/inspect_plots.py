"""Pictures of an inspection, drawn with matplotlib: (H, W, 3) float32 in 0..1."""

from __future__ import annotations

import numpy as np

from .inspect import PRETRAINED, RANDOM, Inspection
from .plots import new_figure, to_pixels

_SELF, _JOINT = "#1f77b4", "#e07b39"


def inspection_chart(result: Inspection) -> np.ndarray:
    """Key shift of every attention with the paper's marks; below it fit error and change of the prediction, where known."""
    panels = [("key shift |mean k| / mean |k|", [r.shift for r in result.rows])]
    if any(r.fit is not None for r in result.rows):
        panels.append(("fit error |TTT - softmax|² / |softmax|²", [r.fit for r in result.rows]))
    if any(r.change is not None for r in result.rows):
        panels.append(("change of the prediction, this attention alone TTT", [r.change for r in result.rows]))
    names = [str(r.attention) for r in result.rows]
    colors = [_SELF if r.attention.kind == "self" else _JOINT for r in result.rows]
    figure, canvas = new_figure(max(6, 0.26 * len(names) + 1.5), 2.3 * len(panels) + 0.6)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, values) in zip(axes, panels, strict=True):
        places = [i for i, v in enumerate(values) if v is not None]
        axis.bar(places, [values[i] for i in places], color=[colors[i] for i in places], width=0.7)
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(-0.7, len(names) - 0.3)
    for mark, words in ((PRETRAINED, "pretrained ViTs"), (RANDOM, "random")):
        axes[0].axhline(mark, color="#555555", ls=":", lw=1)
        axes[0].annotate(f"{mark:g} {words} (paper)", (len(names) - 0.4, mark), (0, 2), textcoords="offset points", fontsize=8, ha="right", color="#333333")
    axes[0].set_ylim(0, max(0.6, *(r.shift * 1.15 for r in result.rows)))
    axes[-1].set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    return to_pixels(canvas)


def inspection_maps(result: Inspection) -> np.ndarray:
    """For each drawn attention: softmax's map of the chosen token above, TTT's implicit one below, each on its own scale."""
    figure, canvas = new_figure(2.6 * len(result.maps) + 0.4, 5.8)
    axes = figure.subplots(2, len(result.maps), squeeze=False)
    for column, found in zip(axes.T, result.maps, strict=True):
        for axis, name, field in zip(column, ("softmax", "TTT"), (found.softmax, found.ttt), strict=True):
            axis.set_axis_off()
            if field is None:
                axis.text(0.5, 0.5, "no TTT layer here", ha="center", va="center", fontsize=9)
                continue
            shown = np.log10(np.maximum(field.numpy(), 1e-6))  # a few tokens get nearly all; the rest shows on a log scale
            axis.imshow(shown, cmap="magma", interpolation="nearest")
            axis.plot(found.token[1], found.token[0], marker="o", mfc="none", mec="#00e5ff", ms=9, mew=1.6)
            axis.set_title(f"{found.attention} {name}\nreach {found.reach(field):.1f} tokens", fontsize=9)
    figure.suptitle("what the marked token's output depends on (log scale)", fontsize=10)
    return to_pixels(canvas)
