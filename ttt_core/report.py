"""The text a node shows about a TTT model: what was replaced, what computes it, and whether it is worth looking at."""

from __future__ import annotations

from ..kernels import backends
from .weights import TTTWeights

UNTRAINED = (
    "UNTRAINED: these TTT layers are new, so the picture will be poor. Calibrate (minutes), fine-tune, or load trained TTT weights."
)


def backend_line(asked: str) -> str:
    """What computes the layers and why, e.g. 'backend: auto (torch; triton not available: needs a CUDA GPU)'."""
    rows = backends()
    usable = [b.name for b in rows if b.available]
    why = "; ".join(f"{b.name} not available: {b.reason}" for b in rows if not b.available)
    chosen = usable[0] if asked == "auto" else asked
    return f"backend: {asked} -> {chosen}" + (f" ({why})" if why else "")


def describe_weights(weights: TTTWeights, backend: str, warning: str = "") -> str:
    """Several short lines about a linearized model."""
    spec = weights.spec
    if not weights.layers:
        changed = f"; {len(weights.base_changes)} base tensors changed by fine-tuning" if weights.base_changes else ""
        return f"No attention is TTT: all of them are the model's own softmax{changed}."
    total = len(weights.geometry.attentions)
    count = sum(p.numel() for layer in weights.layers.values() for p in layer.parameters())
    lines = [
        f"{weights.geometry.name}: {len(weights.layers)} of {total} attentions are TTT ({weights.selection})",
        f"inner model {spec.inner_model}, key norm {spec.key_norm}, locality {spec.locality}, {count:,} parameters",
        backend_line(backend),
        f"state: {made_line(weights.made)}" if weights.trained else UNTRAINED,
    ]
    if weights.base_changes:
        lines.append(f"{len(weights.base_changes)} base tensors changed by fine-tuning")
    if warning:
        lines.append(f"WARNING: {warning}")
    return "\n".join(lines)


def made_line(made: dict) -> str:
    """'calibrated, steps 400, seed 0' from the record of how the layers were made."""
    return ", ".join([str(made.get("state", "unknown")), *(f"{k} {v}" for k, v in made.items() if k != "state")])
