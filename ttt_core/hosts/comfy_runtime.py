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

log = logging.getLogger(__name__)
OVERRIDE = "optimized_attention_override"


def make_wrapper(layers: Mapping[AttentionId, TTTAttention], backend: str = "auto", bookkeeping: Iterable[int] = ()) -> Callable:
    """The APPLY_MODEL wrapper for these layers.

    bookkeeping: blocks to pass through an empty replacement. ComfyUI checkpoints every replaced block, so the
    softmax arm of a comparison needs the same replacement to be timed fairly.
    """
    by_block: dict[int, dict[str, tuple[AttentionId, TTTAttention]]] = {int(b): {} for b in bookkeeping}
    for attention, layer in layers.items():
        by_block.setdefault(attention.block, {})[attention.kind] = (attention, layer)

    def wrapper(executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options={}, **kwargs):
        patch = executor.class_obj.diffusion_model.patch_size
        grid = ((x.shape[-2] + 1) // patch, (x.shape[-1] + 1) // patch)

        def run(probe=None):
            options = _with_replacements(transformer_options, by_block, grid, backend, probe)
            return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)

        out = run()
        if layers and not bool(torch.isfinite(out).all()):
            _explain_non_finite(run, t, transformer_options)
        return out

    return wrapper


def _with_replacements(outer: dict, by_block: Mapping, grid: tuple[int, int], backend: str, probe: list | None) -> dict:
    options = dict(outer)
    replace = dict(options.get("patches_replace", {}))
    dit = dict(replace.get("dit", {}))
    for block, own in by_block.items():
        key = ("double_block", block)
        dit[key] = _block_replacement(dit.get(key), own, grid, backend, probe)
    replace["dit"] = dit
    options["patches_replace"] = replace
    return options


def _block_replacement(previous: Callable | None, own: Mapping, grid: tuple[int, int], backend: str, probe: list | None) -> Callable:
    def replacement(args, extra):
        original = extra["original_block"]

        def ours(args):
            outer = args["transformer_options"]
            if not own:
                return original(args)
            inner = {**outer, OVERRIDE: _attention_override(outer, own, grid, backend, probe)}
            return original({**args, "transformer_options": inner})

        return previous(args, {**extra, "original_block": ours}) if previous else ours(args)

    return replacement


def _attention_override(outer: dict, own: Mapping, grid: tuple[int, int], backend: str, probe: list | None) -> Callable:
    previous = outer.get(OVERRIDE)
    image_tokens = grid[0] * grid[1]

    def override(softmax, q, k, v, *args, **kwargs):
        # The text always has at least one token, so a call on exactly the image tokens is the image self-attention.
        text = q.shape[1] - image_tokens
        entry = own.get("self" if text == 0 else "joint")
        mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
        if entry is not None and mask is not None:
            _warn_mask(entry[0])
            entry = None
        if entry is None or text < 0 or kwargs.get("skip_reshape"):
            kwargs["transformer_options"] = outer  # ours must not be met again by an override that wraps attention
            return previous(softmax, q, k, v, *args, **kwargs) if previous else softmax(q, k, v, *args, **kwargs)
        attention, layer = entry
        q, k, v = (x.flatten(2) for x in (q, k, v))  # SD3 gives v as (B, N, heads, d)
        out = layer(q, k, v, grid=grid, text_tokens=text, backend=backend)
        if probe is not None:
            inputs_finite = all(bool(torch.isfinite(x).all()) for x in (q, k, v))
            probe.append((attention, inputs_finite, bool(torch.isfinite(out).all())))
        return out

    return override


@functools.cache
def _warn_mask(attention: AttentionId) -> None:  # cached: said once for each attention
    log.warning("SD3.5-TTT: attention %s was called with a mask, which TTT has no meaning for; softmax is used there.", attention)


def _explain_non_finite(run: Callable, t: torch.Tensor, options: dict) -> None:
    """Runs the call once more, watching every TTT layer, and raises the sentence that names the first bad one."""
    probe: list = []
    run(probe)
    sigma = float(t.flatten()[0])
    step = _step_of(sigma, options)
    bad = next(((a, i) for a, i, o in probe if not o), None)
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
