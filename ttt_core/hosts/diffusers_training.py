"""A diffusers SD3Transformer2DModel as something that can be calibrated and fine-tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import TTTError
from ..fingerprint import sketch
from ..geometry import AttentionId, read_geometry
from ..layer import TTTAttention
from ..trainable import Record, TrainableModel
from .diffusers import attach
from .diffusers_names import to_diffusers, to_original

DiffusersConditioning = tuple[Tensor, Tensor]  # context (T, D) and pooled (P,) of one sample


class DiffusersTrainable(TrainableModel):
    """See TrainableModel. A conditioning is (context (T, D), pooled (P,)); `null` is the one for no prompt, zeros if not given."""

    def __init__(self, transformer, *, flow_shift: float = 3.0, null: DiffusersConditioning | None = None, backend: str = "auto"):
        self.transformer, self.flow_shift, self.backend, self._null = transformer, flow_shift, backend, null
        tensors = to_original(transformer.state_dict())
        self.geometry = read_geometry({n: tuple(t.shape) for n, t in tensors.items()})
        self.base_sketch = sketch(tensors)
        self.latent_channels = transformer.config.in_channels
        self.latent_multiple = transformer.config.patch_size
        self._layers: dict[AttentionId, TTTAttention] = {}
        self._watched: tuple[AttentionId, ...] = ()
        self._sink: Callable[[Record], None] | None = None
        self._attachment = None

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.transformer.parameters()).dtype

    def velocity(self, x: Tensor, sigma: Tensor, conditionings: Sequence[DiffusersConditioning]) -> Tensor:
        lengths = {len(context) for context, _ in conditionings}
        if len(lengths) > 1:
            raise TTTError(f"Prompts of {sorted(lengths)} tokens cannot share a batch here; encode them to one length.")
        context, pooled = (torch.stack([c[i] for c in conditionings]).to(self.device, self.dtype) for i in (0, 1))
        x, sigma = x.to(self.device, self.dtype), sigma.to(self.device)
        return self.transformer(x, context, pooled, sigma * 1000).sample.float()

    def null_conditioning(self, like: DiffusersConditioning) -> DiffusersConditioning:
        return self._null or (torch.zeros_like(like[0]), torch.zeros_like(like[1]))

    def base_tensors(self) -> dict[str, Tensor]:
        return to_original(self.transformer.state_dict())

    @contextmanager
    def running(self, layers: Mapping[AttentionId, TTTAttention], base: Mapping[str, Tensor] | None = None, *, checkpointing: bool = False):
        swaps = _Swaps(self.transformer, base or {})
        asked = [p for p in self.transformer.parameters() if p.requires_grad]
        was_checkpointing = self.transformer.gradient_checkpointing
        with self._with(_layers=dict(layers)):
            try:
                self.transformer.requires_grad_(False)
                swaps.apply()
                if checkpointing:
                    self.transformer.enable_gradient_checkpointing()
                yield
            finally:
                if checkpointing and not was_checkpointing:
                    self.transformer.disable_gradient_checkpointing()
                swaps.restore()
                for parameter in asked:
                    parameter.requires_grad_(True)

    @contextmanager
    def recording(self, attentions: Iterable[AttentionId], sink: Callable[[Record], None]):
        with self._with(_watched=tuple(attentions), _sink=sink):
            yield

    @contextmanager
    def _with(self, **changes):
        """These attributes inside, the former ones afterwards, the transformer's attachment following them."""
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        try:
            self._refresh()
            yield
        finally:
            vars(self).update(before)
            self._refresh()

    def _refresh(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()
        stands: dict = dict(self._layers)
        for attention in self._watched:
            inner = self._layers.get(attention) or _Softmax(self.geometry.heads, self.geometry.head_dim)
            stands[attention] = _Watched(attention, inner, self._sink)
        self._attachment = attach(self.transformer, stands, backend=self.backend) if stands else None


class _Softmax:
    """The original attention in the place of a TTT layer, so that it can be watched with text tokens first."""

    def __init__(self, num_heads: int, head_dim: int):
        self.num_heads, self.head_dim = num_heads, head_dim

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **_) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class _Watched:
    def __init__(self, attention: AttentionId, inner, sink: Callable[[Record], None]):
        self.attention, self.inner, self.sink = attention, inner, sink
        self.num_heads, self.head_dim = inner.num_heads, inner.head_dim

    def __call__(self, q, k, v, grid, text_tokens=0, backend="auto"):
        out = self.inner(q, k, v, grid=grid, text_tokens=text_tokens, backend=backend)
        self.sink(Record(self.attention, q, k, v, out, grid, text_tokens))
        return out


class _Swaps:
    """Tensors put in the place of a module's parameters. Unlike functional_call they stay until `restore`, so that a
    block recomputed in the backward pass meets the same ones."""

    def __init__(self, transformer, base: Mapping[str, Tensor]):
        self.places = []
        try:
            named = to_diffusers(base, blocks=len(transformer.transformer_blocks))
            for name, tensor in named.items():
                path, _, leaf = name.rpartition(".")
                module = transformer.get_submodule(path)
                own = module._parameters[leaf]
                if own.shape != tensor.shape:
                    raise TTTError(f"{name} is {tuple(own.shape)} in the model and {tuple(tensor.shape)} here; it is from another model.")
                self.places.append((module, leaf, own, tensor))
        except (KeyError, AttributeError) as e:
            raise TTTError(f"The model has no tensor to replace: {e.args[0]}; the weights are for another model.") from e

    def apply(self) -> None:
        for module, leaf, _, tensor in self.places:
            module._parameters[leaf] = tensor

    def restore(self) -> None:
        for module, leaf, own, _ in self.places:
            module._parameters[leaf] = own
