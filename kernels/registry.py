"""Which backend computes the layer, decided from declared constraints before the call, never by try and except.

A backend is one row: a name, `unavailable()` (why this machine cannot run it at all, or None) and `refuses(call)`
(why this one call cannot, or None). `auto` takes the first row that accepts, so the order is the preference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import triton_backend
from .reference import ttt_reference


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name and cannot do this call; the message says why and what to choose instead."""


@dataclass(frozen=True)
class Call:
    """What a backend needs to know about a call to accept or refuse it."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    inner_model: str
    key_norm: str
    locality: bool
    same_dtype: bool = True


@dataclass(frozen=True)
class Backend:
    name: str
    run: Callable
    unavailable: Callable[[], str | None]
    refuses: Callable[[Call], str | None]


@dataclass(frozen=True)
class BackendStatus:
    """One backend on this machine: `reason` is empty when it is available."""

    name: str
    available: bool
    reason: str


def _always(*_: object) -> None:
    return None


def _run_torch(*args):
    return ttt_reference(*args)


_TRITON = Backend("triton", triton_backend.run, triton_backend.unavailable, triton_backend.refuses)
_TORCH = Backend("torch", _run_torch, _always, _always)


def _table() -> tuple[Backend, ...]:
    return _TRITON, _TORCH


def backends() -> list[BackendStatus]:
    """Every backend in order of preference, whether this machine can run it, and the reason if not."""
    rows = []
    for backend in _table():
        reason = backend.unavailable()
        rows.append(BackendStatus(backend.name, reason is None, reason or ""))
    return rows


def choose(call: Call, name: str = "auto") -> Backend:
    """The backend for this call. Raises BackendUnavailable when one asked for by name refuses it."""
    table = _table()
    if name == "auto":
        return next(b for b in table if b.unavailable() is None and b.refuses(call) is None)
    for backend in table:
        if backend.name == name:
            reason = backend.unavailable() or backend.refuses(call)
            if reason is not None:
                raise BackendUnavailable(f"TTT backend '{name}' cannot run here: {reason} Choose 'auto' or 'torch'.")
            return backend
    known = ", ".join(["auto", *(b.name for b in table)])
    raise BackendUnavailable(f"Unknown TTT backend '{name}'; choose one of: {known}.")


def explain(call: Call, name: str = "auto") -> tuple[str, str]:
    """(backend that this call takes, why those preferred to it do not run; "" when the first choice does).

    For reports; raises as `choose` does.
    """
    chosen = choose(call, name)
    passed = [b for b in _table() if name == "auto"]
    passed = passed[: passed.index(chosen)] if chosen in passed else []
    return chosen.name, " ".join(f"{b.name}: {b.unavailable() or b.refuses(call)}" for b in passed)
