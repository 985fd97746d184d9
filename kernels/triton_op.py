"""The fused layer as a PyTorch operator: visible to torch.compile as one node, with gradients.

The forward is fused; the backward recomputes through the plain reference, so that a layer saves its inputs and
nothing of the roughly twenty activations in between. Importing this imports Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import ttt_reference
from .triton_launch import fused_forward

Conv = tuple[Tensor, Tensor]


def _pair(tensors: list[Tensor]) -> tuple[Conv | None, Conv | None]:
    """[] -> (None, None); [q weight, q bias, k weight, k bias] -> two convolutions."""
    return ((tensors[0], tensors[1]), (tensors[2], tensors[3])) if tensors else (None, None)


@torch.library.custom_op("sd35_ttt::forward", mutates_args=())
def ttt_forward(
    q: Tensor, k: Tensor, v: Tensor, weights: list[Tensor], convs: list[Tensor], height: int, width: int, text: int
) -> tuple[Tensor, Tensor]:
    """See triton_launch.fused_forward. convs: [] or [q weight, q bias, k weight, k bias]."""
    q_conv, k_conv = _pair(convs)
    return fused_forward(q, k, v, weights, q_conv, k_conv, (height, width), text)


@ttt_forward.register_fake
def _(q, k, v, weights, convs, height, width, text):
    heads, dim = weights[0].shape[0], weights[0].shape[1]
    updated = q.new_empty((len(weights), q.shape[0], heads, dim, dim), dtype=torch.float32)
    return q.new_empty(q.shape), updated


@torch.library.custom_op("sd35_ttt::backward", mutates_args=())
def ttt_backward(
    grad_out: Tensor, grad_updated: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: list[Tensor], convs: list[Tensor],
    height: int, width: int, text: int,
) -> list[Tensor]:
    """Gradients of q, k, v, every weight and every convolution tensor, recomputed through the reference.

    An operator of its own: the compiler need not trace the recomputation. torch.func.vjp because autograd proper is
    switched off inside of an operator.
    """
    inner, n = ("swiglu", 3) if len(weights) == 3 else ("mlp2", 2)

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        q_conv, k_conv = _pair(list(rest[n:]))
        out, updated = ttt_reference(q, k, v, rest[:n], q_conv, k_conv, (height, width), text, inner, "instance")
        return out, torch.stack(updated)

    _, pull = torch.func.vjp(run, q, k, v, *weights, *convs)
    return [g.contiguous() for g in pull((grad_out, grad_updated))]


@ttt_backward.register_fake
def _(grad_out, grad_updated, q, k, v, weights, convs, height, width, text):
    return [x.new_empty(x.shape) for x in (q, k, v, *weights, *convs)]


def _save(ctx, inputs, output) -> None:
    q, k, v, weights, convs, *ctx.grid = inputs
    ctx.weights, ctx.convs = len(weights), len(convs)
    ctx.updated_shape = output[1].shape
    ctx.save_for_backward(q, k, v, *weights, *convs)


def _gradients(ctx, grad_out, grad_updated):
    q, k, v, *rest = ctx.saved_tensors
    if grad_out is None:
        grad_out = q.new_zeros(q.shape)
    if grad_updated is None:
        grad_updated = q.new_zeros(ctx.updated_shape, dtype=torch.float32)
    weights, convs = rest[: ctx.weights], rest[ctx.weights :]
    grads = ttt_backward(grad_out.contiguous(), grad_updated, q, k, v, weights, convs, *ctx.grid)
    return *grads[:3], grads[3 : 3 + ctx.weights], grads[3 + ctx.weights :], None, None, None


ttt_forward.register_autograd(_gradients, setup_context=_save)


def run_triton(q, k, v, weights, q_conv, k_conv, grid, text_tokens, inner_model, key_norm):
    """The backend row's entry; arguments and results as reference.ttt_reference."""
    convs = [] if q_conv is None else [*q_conv, *k_conv]
    out, updated = ttt_forward(q, k, v, list(weights), convs, grid[0], grid[1], text_tokens)
    return out, updated.unbind(0)
