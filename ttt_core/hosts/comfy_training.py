"""A ComfyUI MODEL as something that can be calibrated and fine-tuned (see trainable.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import TTTError
from ..examples import Example
from ..geometry import PREFIX, AttentionId
from ..layer import TTTAttention
from ..trainable import Record, TrainableModel
from .comfy import check_position_table, detach, model_geometry, model_sketch
from .comfy_runtime import Plan, token_grid, with_replacements

ComfyConditioning = list  # [context (1, T, D), {"pooled_output": (1, P), ...}]: one entry of a CONDITIONING


class ComfyTrainable(TrainableModel):
    """See TrainableModel. A conditioning is one entry of a CONDITIONING; `null` is the one for no prompt, zeros if not given.

    The MODEL is loaded fully onto its device, without its TTT layers (the core brings those in) but with everything else
    on it: LoRAs, other packs' attention. Wrappers around the whole model (torch.compile, caches) are left out.
    """

    def __init__(self, model, *, null: ComfyConditioning | None = None, backend: str = "auto"):
        import comfy.model_management as management

        with torch.inference_mode(False):
            model = detach(model)
            if getattr(model, "is_dynamic", lambda: False)():
                # Weights that ComfyUI streams in at use have no tensors to differentiate through; this reloads them plainly.
                model = model.clone(disable_dynamic=True)
            management.load_models_gpu([model], force_full_load=True)
            _make_normal(model.model.diffusion_model)
        self._patcher, self._null, self.backend = model, null, backend
        self._inner = model.model.diffusion_model
        self.geometry, self.base_sketch = model_geometry(model), model_sketch(model)
        self.latent_channels = model.get_model_object("latent_format").latent_channels
        self._sampling = model.get_model_object("model_sampling")
        self.flow_shift = float(getattr(self._sampling, "shift", 1.0))
        self._layers: dict[AttentionId, TTTAttention] = {}
        self._checkpointing = False
        self._watched: tuple[AttentionId, ...] = ()
        self._sink: Callable[[Record], None] | None = None

    @property
    def has_patches(self) -> bool:
        """True when a LoRA or another weight patch is on the MODEL."""
        return bool(self._patcher.patches)

    @property
    def device(self) -> torch.device:
        return self._patcher.load_device

    @property
    def dtype(self) -> torch.dtype:
        base = self._patcher.model
        cast = getattr(base, "manual_cast_dtype", None)
        return cast if cast is not None else base.get_dtype()

    def velocity(self, x: Tensor, sigma: Tensor, conditionings: Sequence[ComfyConditioning]) -> Tensor:
        check_position_table(x.shape[-2:], self._patcher)
        x, sigma = x.to(self.device), sigma.to(self.device)
        by_length: dict[int, list[int]] = {}
        for index, (context, _) in enumerate(conditionings):
            by_length.setdefault(context.shape[1], []).append(index)
        if len(by_length) == 1:
            return self._call(x, sigma, conditionings, None)
        parts = {tuple(i): self._call(x[i], sigma[i], [conditionings[j] for j in i], tuple(i)) for i in by_length.values()}
        order = torch.tensor([index for part in parts for index in part], device=x.device)
        return torch.cat(list(parts.values()))[order.argsort()]

    def _call(self, x: Tensor, sigma: Tensor, conditionings: Sequence[ComfyConditioning], elements: tuple[int, ...] | None) -> Tensor:
        context = torch.cat([c[0] for c in conditionings]).to(self.device, self.dtype)
        pooled = torch.cat([_pooled(c) for c in conditionings]).to(self.device, self.dtype)
        every = range(self.geometry.blocks) if self._checkpointing else ()
        plan = Plan(self._layers, self._watched, self.backend, every)
        watched = set(self._watched)

        def watch(record: Record) -> None:
            if record.attention in watched:
                self._sink(Record(record.attention, record.q, record.k, record.v, record.out, record.grid, record.text_tokens, elements))

        options = self._patcher.model_options.get("transformer_options", {})
        options = with_replacements(options, plan, token_grid(x, self._inner), watch if self._sink else None)
        time = self._sampling.timestep(sigma).float()
        return self._inner(x.to(self.dtype), time, context=context, y=pooled, transformer_options=options).float()

    def null_conditioning(self, like: ComfyConditioning) -> ComfyConditioning:
        return self._null or [torch.zeros_like(like[0]), {"pooled_output": torch.zeros_like(_pooled(like))}]

    def base_tensors(self) -> dict[str, Tensor]:
        return {PREFIX + n: t for n, t in self._inner.state_dict().items()}

    @contextmanager
    def running(self, layers: Mapping[AttentionId, TTTAttention], base: Mapping[str, Tensor] | None = None, *, checkpointing: bool = False):
        for attention, layer in layers.items():
            sizes = (layer.num_heads, layer.head_dim)
            if attention not in self.geometry.attentions or sizes != (self.geometry.heads, self.geometry.head_dim):
                raise TTTError(f"The model has no attention {attention} with {sizes[0]} heads of size {sizes[1]}; the TTT layers are for another model.")
        places = self._places(base or {})
        asked = [p for p in self._inner.parameters() if p.requires_grad]
        before = self._layers, self._checkpointing
        self._layers, self._checkpointing = dict(layers), checkpointing
        try:
            for parameter in asked:
                parameter.requires_grad_(False)
            for store, leaf, _, tensor in places:
                store[leaf] = tensor
            yield
        finally:
            for store, leaf, own, _ in places:
                store[leaf] = own
            for parameter in asked:
                parameter.requires_grad_(True)
            self._layers, self._checkpointing = before

    def _places(self, base: Mapping[str, Tensor]) -> list[tuple[dict, str, Tensor, Tensor]]:
        """(the module's own dict, name in it, what is there now, what goes there) of each tensor to be replaced."""
        places = []
        for name, tensor in base.items():
            path, _, leaf = name.removeprefix(PREFIX).rpartition(".")
            try:
                module = self._inner.get_submodule(path)
            except AttributeError as e:
                raise TTTError(f"The model has no tensor {name}; the weights are for another model.") from e
            store = next((d for d in (module._parameters, module._buffers) if leaf in d), None)
            if store is None or store[leaf].shape != tensor.shape:
                raise TTTError(f"The model has no tensor {name} of shape {tuple(tensor.shape)}; the weights are for another model.")
            places.append((store, leaf, store[leaf], tensor))
        return places

    @contextmanager
    def recording(self, attentions: Iterable[AttentionId], sink: Callable[[Record], None]):
        before = self._watched, self._sink
        self._watched, self._sink = tuple(attentions), sink
        try:
            yield
        finally:
            self._watched, self._sink = before

    # ------------------------------------------------------------ from and to ComfyUI's types

    def to_model_latent(self, samples: Tensor) -> Tensor:
        """LATENT samples (B, C, h, w) -> the model's latent space."""
        return self._patcher.model.process_latent_in(samples)

    def from_model_latent(self, latent: Tensor) -> Tensor:
        """The model's latent space -> LATENT samples."""
        return self._patcher.model.process_latent_out(latent)

    def preview(self, latent: Tensor) -> Tensor:
        """A model latent (C, h, w) in ComfyUI's preview colours, (h, w, 3) in 0..1."""
        factors = torch.tensor(self._patcher.get_model_object("latent_format").latent_rgb_factors, dtype=torch.float32)
        return ((latent.float().cpu().movedim(0, -1) @ factors + 1) / 2).clamp(0, 1)


def examples_from(model: ComfyTrainable, latents: Sequence[dict], conditionings: Sequence[list]) -> list[Example]:
    """Training examples from lists of LATENT and CONDITIONING, as ComfyUI's dataset nodes give them.

    Every element of every latent's batch is one example. One conditioning serves all; otherwise there must be as many as
    examples. Raises TTTError when the counts do not match.
    """
    pictures = [p for latent in latents for p in model.to_model_latent(latent["samples"].clone())]
    entries = clone_entries([e for conditioning in conditionings for e in conditioning])
    if len(entries) == 1:
        entries *= len(pictures)
    if len(entries) != len(pictures):
        raise TTTError(
            f"TTT Fine-Tune got {len(pictures)} latents and {len(entries)} conditionings; give one conditioning for each latent, or a single one for all."
        )
    return [Example(p, c) for p, c in zip(pictures, entries, strict=True)]


def clone_entries(conditioning: Iterable[list]) -> list[ComfyConditioning]:
    """Entries of a CONDITIONING as tensors that training may touch. Raises TTTError for one without pooled output."""
    return [[context.clone(), {"pooled_output": _pooled([context, extra]).clone()}] for context, extra in conditioning]


def _pooled(conditioning: ComfyConditioning) -> Tensor:
    pooled = conditioning[1].get("pooled_output")
    if pooled is None:
        raise TTTError("This conditioning has no pooled output, so it was not made by SD3.5's text encoders; use CLIP Text Encode with them.")
    return pooled


def _make_normal(module: torch.nn.Module) -> None:
    """Replaces inference tensors in place by clones of the same values, one at a time.

    ComfyUI's loaders run in inference mode, and nothing can be differentiated through what they load.
    """
    for inner in module.modules():
        for store in (inner._parameters, inner._buffers):
            for name, tensor in store.items():
                if tensor is not None and tensor.is_inference():
                    clone = tensor.detach().clone()
                    store[name] = torch.nn.Parameter(clone, requires_grad=False) if store is inner._parameters else clone
