"""The optimizers, and their state as plain tensors and numbers (no pickle)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .errors import TTTError

OPTIMIZERS = ("adamw", "adamw8bit")
BETAS = (0.9, 0.99)


def build_optimizer(kind: str, groups: list[dict], weight_decay: float, device: torch.device) -> torch.optim.Optimizer:
    """groups: [{"params": [...], "lr": ...}]. ``adamw8bit``: from bitsandbytes (CUDA) or torchao, whichever is installed.

    Raises TTTError for an unknown kind, or when neither library can give the 8-bit one here.
    """
    if kind == "adamw":
        # Fused: without it the default on CUDA makes temporary copies as large as the trained weights.
        return torch.optim.AdamW(groups, betas=BETAS, weight_decay=weight_decay, fused=device.type == "cuda" or None)
    if kind == "adamw8bit":
        return _eight_bit(device)(groups, betas=BETAS, weight_decay=weight_decay)
    raise TTTError(f"Optimizer '{kind}' is not known; choose one of {', '.join(OPTIMIZERS)}.")


def _eight_bit(device: torch.device) -> Callable:
    reasons = []
    if device.type == "cuda":
        try:
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit
        except Exception as e:  # a broken build raises RuntimeError or OSError rather than ImportError
            reasons.append(f"bitsandbytes: {e}")
    else:
        reasons.append("bitsandbytes needs a CUDA GPU")
    try:
        from torchao.optim import AdamW8bit

        return AdamW8bit
    except Exception as e:
        reasons.append(f"torchao: {e}")
    why = "; ".join(reasons)
    raise TTTError(f"8-bit AdamW is not available here ({why}); install bitsandbytes or torchao, or choose optimizer 'adamw'.")


def set_rate(group: dict, rate: float) -> None:
    """Sets a parameter group's learning rate; torchao keeps it in a tensor that must stay the same one."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def export_state(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """({"name/entry": tensor}, {name: {entry: number}}) of the state of each named parameter."""
    tensors, numbers = {}, {}
    for name, parameter in named.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                numbers.setdefault(name, {})[entry] = value
            elif hasattr(value, "__tensor_flatten__"):  # torchao keeps 8-bit codes and scales in a tensor subclass
                inner, _ = value.__tensor_flatten__()
                tensors |= {f"{name}/{entry}/{part}": getattr(value, part) for part in inner}
            else:
                tensors[f"{name}/{entry}"] = value
    return tensors, numbers


@torch.no_grad()
def import_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], tensors: Mapping[str, Tensor], numbers: Mapping[str, dict]
) -> None:
    """The inverse of export_state, into a new optimizer. Raises KeyError when something is missing."""
    _prime(optimizer)
    for name, parameter in named.items():
        state = optimizer.state[parameter]
        for entry, value in list(state.items()):
            if not isinstance(value, Tensor):
                state[entry] = numbers[name][entry]
            elif hasattr(value, "__tensor_flatten__"):
                for part in value.__tensor_flatten__()[0]:
                    getattr(value, part).copy_(tensors[f"{name}/{entry}/{part}"])
            else:
                value.copy_(tensors[f"{name}/{entry}"])


def _prime(optimizer: torch.optim.Optimizer) -> None:
    """A step of rate 0 with zero gradients: every optimizer then has its own kind of state, and no parameter moved."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        set_rate(group, 0.0)
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with torch.enable_grad():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)
