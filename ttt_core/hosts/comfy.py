"""TTT on a ComfyUI MODEL, through ComfyUI's own extension points; the MODEL that goes in is never changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...kernels import backends
from ..errors import TTTError
from ..fingerprint import sketch
from ..geometry import PREFIX, Geometry, read_geometry
from ..spec import TTTSpec
from ..weights import TTTWeights
from .comfy_runtime import make_wrapper

KEY = "sd35_ttt"
_MODULE = "diffusion_model."


class TTTStack(nn.Module):
    """All TTT layers of one MODEL as one module, so that ComfyUI's memory management counts and moves them."""

    device = None  # read by ComfyUI's patcher

    def __init__(self, weights: TTTWeights):
        super().__init__()
        self.layers = nn.ModuleDict({f"{a.kind}_{a.block}": layer for a, layer in weights.layers.items()})

    def get_dtype(self) -> torch.dtype:
        return torch.float32


@dataclass(frozen=True)
class Attached:
    """What a TTT MODEL carries: its weights and the backend that was asked for."""

    weights: TTTWeights
    backend: str


def attached(model) -> Attached | None:
    """The TTT weights of a MODEL, or None for a plain one."""
    return model.get_attachment(KEY)


def require_attached(model, node: str) -> Attached:
    found = attached(model)
    if found is None:
        raise TTTError(f"{node}: the connected MODEL has no TTT layers; put TTT Linearize, TTT Load Model or TTT Load Weights before it.")
    return found


def _base_tensors(model) -> dict[str, torch.Tensor]:
    """{name inside the diffusion model: tensor} of the base as loaded from disk, without LoRA that is patched in now."""
    tensors = dict(model.model.diffusion_model.state_dict())
    for name, saved in model.backup.items():
        if name.startswith(_MODULE):
            tensors[name.removeprefix(_MODULE)] = getattr(saved, "weight", saved)
    return tensors


def model_geometry(model) -> Geometry:
    """Geometry of the MODEL. Raises TTTError when it is not an MMDiT (an SD1.5 or Flux MODEL, say)."""
    inner = getattr(model.model, "diffusion_model", None)
    shapes = {n: tuple(t.shape) for n, t in inner.state_dict().items()} if inner is not None else {}
    try:
        return read_geometry(shapes)
    except TTTError as e:
        raise TTTError(f"{e} (The connected MODEL is {type(model.model).__name__}.)") from e


def check_position_table(size: Sequence[int], model) -> None:
    """Raises TTTError for a latent size (h, w) beyond the model's position table."""
    inner = model.model.diffusion_model
    table = getattr(inner, "pos_embed_max_size", None)
    if table is not None and -(-max(size) // inner.patch_size) > table:
        width, height, most = 8 * size[1], 8 * size[0], 8 * inner.patch_size * table
        raise TTTError(f"{width} x {height} is larger than this model's position table, which ends at {most} pixels a side; choose a smaller size.")


def model_sketch(model) -> str:
    return sketch(_base_tensors(model))


def linearize(model, spec: TTTSpec, seed: int = 0, backend: str = "auto"):
    """A clone of MODEL with new, untrained TTT layers (paper initialisation). Raises TTTError for bad input."""
    weights = TTTWeights.new(model_geometry(model), spec, seed=seed, base_sketch=model_sketch(model))
    return attach(model, weights, backend)


def apply_weights(model, weights: TTTWeights, source: str, backend: str = "auto"):
    """(clone of MODEL with these weights, warning or ""). Replaces layers that are there already.

    Raises TTTError when the weights are for another architecture, or when MODEL already carries another kind of layer.
    """
    warning = weights.check_base(model_geometry(model), model_sketch(model), source)
    present = attached(model)
    if present is not None and present.weights.spec.layer_key != weights.spec.layer_key:
        ours, theirs = "/".join(present.weights.spec.layer_key), "/".join(weights.spec.layer_key)
        raise TTTError(
            f"'{source}' holds {theirs} layers, but the connected MODEL already carries {ours} ones; "
            "connect the loader of the base directly, or choose the same settings in TTT Linearize."
        )
    return attach(model, weights, backend), warning


def attach(model, weights: TTTWeights, backend: str = "auto"):
    """A clone of MODEL whose chosen attentions are these TTT layers; without layers, a plain clone.

    The layers become an additional model beside the main one (counted, loaded, offloaded with it), core's save nodes
    write them, and changed base tensors are added as ordinary weight patches, so a LoRA still applies on top.
    """
    import comfy.model_patcher
    import comfy.patcher_extension

    _require_backend(backend)
    model = detach(model)
    if weights.layers:
        wrappers = comfy.patcher_extension.WrappersMP
        # Looked up at call time: newer ComfyUI rebinds CoreModelPatcher at start-up.
        patcher = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
        stack = patcher(TTTStack(weights), load_device=model.load_device, offload_device=model.offload_device)
        model.set_additional_models(KEY, [stack])
        model.add_wrapper_with_key(wrappers.APPLY_MODEL, KEY, make_wrapper(weights.layers, backend))
        _save_with_layers(model, weights)
    model.set_attachments(KEY, Attached(weights, backend))
    _patch_base(model, weights)
    return model


def _require_backend(name: str) -> None:
    """Refuses a backend that cannot run on this machine now, and not in the middle of sampling."""
    row = next((b for b in backends() if b.name == name), None)
    if name != "auto" and (row is None or not row.available):
        why = row.reason if row else "this version does not have it."
        raise TTTError(f"TTT backend '{name}' cannot run here: {why} Choose 'auto' or 'torch'.")


def detach(model):
    """A clone of MODEL without TTT layers, whatever it carried."""
    import comfy.patcher_extension

    before = attached(model)
    model = model.clone()
    if before is None:
        return model
    model.remove_wrappers_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, KEY)
    model.remove_additional_models(KEY)
    model.remove_attachments(KEY)
    original = getattr(model.object_patches.get("state_dict_for_saving"), "ttt_original", None)
    if original is not None:
        model.object_patches.pop("state_dict_for_saving")
    for name in before.weights.base_changes:
        key = name.removeprefix("model.")
        others = [p for p in model.patches.pop(key, []) if not _is_our_patch(p)]
        if others:
            model.patches[key] = others
    model.add_patches({})  # tells ComfyUI that the patches are others than before
    return model


def with_bookkeeping(model, blocks: Iterable[int]):
    """A clone of a plain MODEL that passes these blocks through an empty replacement, for a fair timing."""
    import comfy.patcher_extension

    model = model.clone()
    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, KEY + "_bookkeeping", make_wrapper({}, bookkeeping=blocks))
    return model


def _save_with_layers(model, weights: TTTWeights) -> None:
    """Core's ModelSave and CheckpointSave ask the model for its state dict; this adds the TTT layers to it."""
    original = model.get_model_object("state_dict_for_saving")

    def state_dict_for_saving(*args, **kwargs):  # newer ComfyUI passes the base state dict in, older does not
        return {**original(*args, **kwargs), **{n: t.detach().cpu() for n, t in weights.layer_tensors().items()}}

    state_dict_for_saving.ttt_original = original
    model.add_object_patch("state_dict_for_saving", state_dict_for_saving)


class _BaseChange(tuple):
    """The value of a weight patch that came from a TTT file, told apart from a LoRA's by its type."""


def _is_our_patch(patch) -> bool:
    return isinstance(patch[1], _BaseChange)


def _patch_base(model, weights: TTTWeights) -> None:
    if not weights.base_changes:
        return
    base = _base_tensors(model)
    patches = {}
    for name, tensor in weights.base_changes.items():
        inner = name.removeprefix(PREFIX)
        if inner not in base or tuple(base[inner].shape) != tuple(tensor.shape):
            raise TTTError(f"The TTT file changes {name}, which the connected MODEL does not have in that shape; load the base it was made for.")
        # A difference, not a replacement: patches add up, so a LoRA before or after this node keeps working.
        difference = tensor.float() - base[inner].to("cpu").float()
        patches[_MODULE + inner] = _BaseChange(("diff", (difference,)))
    model.add_patches(patches)
