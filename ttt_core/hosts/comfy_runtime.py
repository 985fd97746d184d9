"""What happens in each ComfyUI model call: TTT layers put in place of chosen attentions, for this call only.

One APPLY_MODEL wrapper does everything at run time, on copies of the options it is given: it installs a block
replacement per converted block, and inside it an attention override that sees only that block. Replacements and
overrides of other packs are chained, whatever the order of the nodes. Nothing outside the call is touched.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping

import torch

from ..errors import TTTError
from ..geometry import AttentionId
from ..layer import TTTAttention
from ..trainable import Record

Watch = Callable[[Record], None]
log = logging.getLogger(__name__)
OVERRIDE = "optimized_attention_override"


def make_wrapper(layers: Mapping[AttentionId, TTTAttention], backend: str = "auto", bookkeeping: Iterable[int] = ()) -> Callable:
    """The APPLY_MODEL wrapper for these layers.

    bookkeeping: blocks to pass through an empty replacement. ComfyUI checkpoints every replaced block, so the
    softmax arm of a comparison needs the same replacement to be timed fairly.
    """
    plan = Plan(layers, backend=backend, bookkeeping=bookkeeping)

    def wrapper(executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options={}, **kwargs):
        grid = token_grid(x, executor.class_obj.diffusion_model)

        def run(watch=None):
            options = with_replacements(transformer_options, plan, grid, watch)
            return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)

        out = run()
        if layers and not bool(torch.isfinite(out).all()):
            _explain_non_finite(run, t, transformer_options)
        return out

    return wrapper


class Plan:
    """Which blocks are replaced, and by which layers: {block: {kind: (attention, layer or None to watch softmax)}}."""

    def __init__(
        self,
        layers: Mapping[AttentionId, TTTAttention],
        watched: Iterable[AttentionId] = (),
        backend: str = "auto",
        bookkeeping: Iterable[int] = (),
    ):
        self.backend = backend
        self.blocks: dict[int, dict[str, tuple[AttentionId, TTTAttention | None]]] = {int(b): {} for b in bookkeeping}
        for attention in (*watched, *layers):
            self.blocks.setdefault(attention.block, {})[attention.kind] = (attention, layers.get(attention))


def token_grid(x: torch.Tensor, diffusion_model) -> tuple[int, int]:
    """(h, w) of the image tokens of a latent (B, C, H, W), as MMDiT pads it."""
    patch = diffusion_model.patch_size
    return (x.shape[-2] + 1) // patch, (x.shape[-1] + 1) // patch


def with_replacements(outer: dict, plan: Plan, grid: tuple[int, int], watch: Watch | None = None) -> dict:
    """A copy of these transformer_options with the plan's block replacements, whatever was there chained behind them.

    watch: called with a Record of every attention in the plan, during the call.
    """
    options = dict(outer)
    replace = dict(options.get("patches_replace", {}))
    dit = dict(replace.get("dit", {}))
    for block, own in plan.blocks.items():
        key = ("double_block", block)
        dit[key] = _block_replacement(dit.get(key), own, grid, plan.backend, watch)
    replace["dit"] = dit
    options["patches_replace"] = replace
    return options


def _block_replacement(previous: Callable | None, own: Mapping, grid: tuple[int, int], backend: str, watch: Watch | None) -> Callable:
    def replacement(args, extra):
        original = extra["original_block"]

        def ours(args):
            outer = args["transformer_options"]
            if not own:
                return original(args)
            inner = {**outer, OVERRIDE: _attention_override(outer, own, grid, backend, watch)}
            return original({**args, "transformer_options": inner})

        return previous(args, {**extra, "original_block": ours}) if previous else ours(args)

    return replacement


def _attention_override(outer: dict, own: Mapping, grid: tuple[int, int], backend: str, watch: Watch | None) -> Callable:
    previous = outer.get(OVERRIDE)
    image_tokens = grid[0] * grid[1]

    def override(softmax, q, k, v, *args, **kwargs):
        # The text always has at least one token, so a call on exactly the image tokens is the image self-attention.
        text = q.shape[1] - image_tokens
        attention, layer = own.get("self" if text == 0 else "joint", (None, None))
        mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
        if layer is not None and mask is not None:
            _warn_mask(attention)
            attention = layer = None
        if text < 0 or kwargs.get("skip_reshape"):
            attention = layer = None
        if layer is None:
            kwargs["transformer_options"] = outer  # ours must not be met again by an override that wraps attention
            out = previous(softmax, q, k, v, *args, **kwargs) if previous else softmax(q, k, v, *args, **kwargs)
        else:
            out = layer(*(x.flatten(2) for x in (q, k, v)), grid=grid, text_tokens=text, backend=backend)  # SD3's v is (B, N, heads, d)
        if watch is not None and attention is not None:
            watch(Record(attention, *(x.flatten(2) for x in (q, k, v)), out, grid, text))
        return out

    return override


@functools.cache
def _warn_mask(attention: AttentionId) -> None:  # cached: said once for each attention
    log.warning("SD3.5-TTT: attention %s was called with a mask, which TTT has no meaning for; softmax is used there.", attention)


def _explain_non_finite(run: Callable, t: torch.Tensor, options: dict) -> None:
    """Runs the call once more, watching every TTT layer, and raises the sentence that names the first bad one."""
    seen: list[tuple[AttentionId, bool, bool]] = []

    def finite(*tensors: torch.Tensor) -> bool:
        return all(bool(torch.isfinite(x).all()) for x in tensors)

    run(lambda record: seen.append((record.attention, finite(record.q, record.k, record.v), finite(record.out))))
    step = _step_of(float(t.flatten()[0]), options)
    bad = next(((attention, inputs) for attention, inputs, out in seen if not out), None)
    if bad is None or not bad[1]:
        where = f"before attention {bad[0]}" if bad else "outside the TTT layers"
        raise TTTError(
            f"The model produced NaN or infinity {where} at {step}; the base model itself fails here, not a TTT layer. "
            "Try another weight dtype for the base (bf16 or default), or remove the last LoRA or patch."
        )
    raise TTTError(
        f"The TTT layer of attention {bad[0]} produced NaN or infinity at {step}; the run was stopped. "
        "Its weights do not suit this model: calibrate again, load other TTT weights, or leave this attention out of the selection."
    )


def _step_of(sigma: float, options: dict) -> str:
    sigmas = options.get("sample_sigmas")
    if sigmas is None:
        return f"sigma {sigma:.4f}"
    nearest = int((sigmas.float().cpu() - sigma).abs().argmin())
    return f"step {nearest + 1} of {len(sigmas) - 1} (sigma {sigma:.4f})"
