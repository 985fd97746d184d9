"""Inspecting a MODEL inside ComfyUI: progress on the node, and cancel."""

from __future__ import annotations

from ..errors import TTTError
from ..inspect import Inspection, InspectSettings, inspect_model, planned_calls
from .comfy import attached
from .comfy_training import ComfyTrainable, clone_entries


def inspect(model, positive: list, latent: dict, settings: InspectSettings) -> Inspection:
    """Inspection of a MODEL (with TTT layers or without) on the first entry of a CONDITIONING, at the latent's size.

    Can be cancelled after each model call. Raises TTTError.
    """
    import comfy.model_management as management
    import comfy.utils
    import torch

    if not positive:
        raise TTTError("TTT Inspect: the prompt is empty; connect a conditioning.")
    found = attached(model)
    weights = found.weights if found and found.weights.layers else None
    trainable = ComfyTrainable(model, backend=found.backend if found else "auto")
    with torch.inference_mode(False):
        (conditioning,) = clone_entries(positive[:1])
    bar = comfy.utils.ProgressBar(planned_calls(weights, settings))

    def on_call() -> None:
        management.throw_exception_if_processing_interrupted()
        bar.update(1)

    return inspect_model(trainable, weights, conditioning, tuple(latent["samples"].shape[-2:]), settings, on_call)
