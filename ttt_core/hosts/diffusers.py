"""TTT layers in diffusers' SD3Transformer2DModel: no UI, no ComfyUI.

    transformer = load_transformer("sd3.5_medium.safetensors", dtype=torch.bfloat16)
    attachment = attach(transformer, TTTWeights.load("ttt.safetensors").layers)
    ...                      # use it, alone or in StableDiffusion3Pipeline
    attachment.detach()      # softmax again, bit for bit

Works through diffusers' attention-processor extension point and one forward
pre-hook (for the token grid of each call). diffusers is imported when a model is
loaded, not with this module.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import TTTError
from ..files import explain_unreadable
from ..geometry import AttentionId, read_geometry
from ..layer import TTTAttention
from ..weights import TTTWeights, is_ttt_name, split_full_model
from .diffusers_names import PREFIX, to_diffusers


def transformer_config(shapes: Mapping[str, tuple[int, ...]]) -> dict:
    """SD3Transformer2DModel's arguments from {original tensor name without prefix: shape}.

    Raises TTTError when the names are not an MMDiT's or a tensor every SD3 file has is missing.
    """
    geometry = read_geometry(shapes)
    try:
        hidden, in_channels, patch, _ = shapes["x_embedder.proj.weight"]
        positions = math.isqrt(shapes["pos_embed"][1])
        return {
            "sample_size": min(128, positions * patch),
            "patch_size": patch,
            "in_channels": in_channels,
            "out_channels": shapes["final_layer.linear.weight"][0] // patch**2,
            "num_layers": geometry.blocks,
            "attention_head_dim": geometry.head_dim,
            "num_attention_heads": geometry.heads,
            "joint_attention_dim": shapes["context_embedder.weight"][1],
            "caption_projection_dim": hidden,
            "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
            "pos_embed_max_size": positions,
            "dual_attention_layers": geometry.self_blocks,
            "qk_norm": "rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in shapes else None,
        }
    except KeyError as e:
        raise TTTError(f"The model has no tensor {e.args[0]}, so it is not a whole SD3.5 transformer; load a complete file.") from e


def load_transformer(path: str | os.PathLike, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"):
    """An SD3Transformer2DModel from a file in SD3.5's own layout (diffusion model alone, or a whole checkpoint).

    dtype: of the parameters, None keeps the file's. Raises TTTError for an unreadable file, another architecture, or
    a file that holds TTT layers, which would be lost here: `load_linearized` reads those.
    """
    tensors = _read(path, device)
    if any(is_ttt_name(n) for n in tensors):
        raise TTTError(f"'{Path(path).name}' is a converted model with TTT layers; load it with load_linearized.")
    return _build(tensors, path, dtype)


def load_linearized(
    path: str | os.PathLike, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", backend: str = "auto"
):
    """(transformer with its TTT layers attached, Attachment) from a full converted model. Raises TTTError."""
    tensors = _read(path, device)
    weights = TTTWeights.from_tensors(split_full_model(tensors), Path(path).name)
    transformer = _build(tensors, path, dtype)
    return transformer, attach(transformer, weights.layers, backend=backend)


def attach(
    transformer,
    layers: Mapping[AttentionId, TTTAttention],
    *,
    base_changes: Mapping[str, Tensor] | None = None,
    backend: str = "auto",
) -> Attachment:
    """Makes the chosen attentions of an SD3Transformer2DModel linear, in place, until `Attachment.detach`.

    layers: {AttentionId: TTTAttention}, as TTTWeights.layers. base_changes: fine-tuned base tensors under their
    original names, as TTTWeights.base_changes. backend: auto, triton or torch. Raises TTTError, before anything is
    changed, when the transformer lacks an attention, sizes differ, or TTT layers are attached already.
    """
    attentions = {}
    for attention, layer in layers.items():
        module = _find(transformer, attention)
        if isinstance(module.processor, _TTTProcessor):
            raise TTTError(f"{attention} has a TTT layer already; detach the other attachment first.")
        size, want = (module.heads, module.inner_dim // module.heads), (layer.num_heads, layer.head_dim)
        if size != want:
            raise TTTError(f"{attention} has {size[0]} heads of {size[1]}, the TTT layer {want[0]} of {want[1]}; it is for another model.")
        attentions[attention] = module
    return Attachment(transformer, attentions, layers, _changed(transformer, base_changes or {}), backend)


class Attachment:
    """TTT layers at work inside one transformer. ``layers``: {AttentionId: TTTAttention}; `detach` takes them out."""

    def __init__(self, transformer, attentions, layers, changes, backend):
        self.layers = dict(layers)
        self.grid: tuple[int, int] | None = None  # image tokens (h, w) of the call in progress
        patch = transformer.config.patch_size

        def note_grid(module, args, kwargs):
            latent = args[0] if args else kwargs["hidden_states"]
            self.grid = latent.shape[-2] // patch, latent.shape[-1] // patch

        self._hook = transformer.register_forward_pre_hook(note_grid, with_kwargs=True)
        self._processors = {}
        for attention, module in attentions.items():
            self._processors[module] = module.processor
            module.set_processor(_TTTProcessor(self, self.layers[attention], backend))
        self._originals = {parameter: parameter.data for parameter in changes}
        for parameter, changed in changes.items():
            parameter.data = changed

    def detach(self) -> None:
        """Gives every attention its former processor and every changed tensor its former values back. Twice is harmless."""
        self._hook.remove()
        for module, processor in self._processors.items():
            module.set_processor(processor)
        for parameter, original in self._originals.items():
            parameter.data = original
        self._processors, self._originals = {}, {}


class _TTTProcessor:
    """What diffusers calls in place of softmax; its projections and norms stay those of the attention module."""

    def __init__(self, attachment: Attachment, layer: TTTAttention, backend: str):
        self.attachment, self.layer, self.backend = attachment, layer, backend

    def __call__(self, attn, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
                 attention_mask: Tensor | None = None):
        """hidden_states (B, h*w, C), encoder_hidden_states (B, text, C) or None -> the same shapes, as diffusers expects."""
        if attention_mask is not None:
            raise TTTError("A TTT layer sums over all tokens and cannot take an attention mask; detach it to use masks.")

        def split(projected: Tensor, norm) -> Tensor:
            if norm is None:
                return projected
            return norm(projected.unflatten(-1, (attn.heads, -1))).flatten(-2)  # per head, over its channels

        q = split(attn.to_q(hidden_states), attn.norm_q)
        k = split(attn.to_k(hidden_states), attn.norm_k)
        v = attn.to_v(hidden_states)
        text = 0
        if encoder_hidden_states is not None:
            text = encoder_hidden_states.shape[1]
            # The layer wants text first; diffusers' own processor has it last, which softmax does not mind.
            q = torch.cat([split(attn.add_q_proj(encoder_hidden_states), attn.norm_added_q), q], dim=1)
            k = torch.cat([split(attn.add_k_proj(encoder_hidden_states), attn.norm_added_k), k], dim=1)
            v = torch.cat([attn.add_v_proj(encoder_hidden_states), v], dim=1)

        out = self.layer(q, k, v, grid=self.attachment.grid, text_tokens=text, backend=self.backend)
        image = attn.to_out[1](attn.to_out[0](out[:, text:]))  # projection, then diffusers' dropout of 0
        if encoder_hidden_states is None:
            return image
        context = out[:, :text]
        return image, context if attn.context_pre_only else attn.to_add_out(context)


def _changed(transformer, base_changes: Mapping[str, Tensor]) -> dict[torch.nn.Parameter, Tensor]:
    """{parameter of the transformer: the tensor to put into it}."""
    changes = {}
    try:
        named = to_diffusers(base_changes, blocks=len(transformer.transformer_blocks))
        for name, tensor in named.items():
            parameter = transformer.get_parameter(name)
            if tensor.shape != parameter.shape:
                raise TTTError(f"{name} is {tuple(parameter.shape)} here and {tuple(tensor.shape)} in the weights; they are for another model.")
            changes[parameter] = tensor.to(parameter)
    except (KeyError, AttributeError) as e:
        raise TTTError(f"The weights change a tensor the transformer does not have ({e.args[0]}); they are for another model.") from e
    return changes


def _find(transformer, attention: AttentionId):
    """The diffusers Attention module of an attention id."""
    blocks = transformer.transformer_blocks
    module = getattr(blocks[attention.block], attention.module, None) if attention.block < len(blocks) else None
    if module is None:
        raise TTTError(f"The transformer has no attention {attention}; the TTT layers are for another model.")
    return module


def _read(path: str | os.PathLike, device) -> dict[str, Tensor]:
    """The transformer's tensors of a file, without prefix; other parts of a checkpoint are not read."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            prefix = PREFIX if any(name.startswith(PREFIX) for name in file.keys()) else ""
            return {n[len(prefix) :]: file.get_tensor(n) for n in file.keys() if n.startswith(prefix)}
    except (SafetensorError, OSError) as e:
        raise explain_unreadable(path, e) from e


def _build(tensors: dict[str, Tensor], path, dtype: torch.dtype | None):
    """An SD3Transformer2DModel holding these tensors; nothing is copied unless dtype asks for it."""
    from diffusers import SD3Transformer2DModel

    try:
        config = transformer_config({name: tuple(t.shape) for name, t in tensors.items()})
        state = {name: t if dtype is None else t.to(dtype) for name, t in to_diffusers(tensors).items()}
        with torch.device("meta"):
            transformer = SD3Transformer2DModel(**config)
        transformer.load_state_dict(state, strict=True, assign=True)
    except (TTTError, KeyError, RuntimeError) as e:
        raise TTTError(f"'{Path(path).name}': {e.args[0]}") from e
    return transformer.eval()
