"""The TTT layer as one operation, with a plain reference and faster backends behind it. Knows no model."""

from .ops import ttt_mlp2, ttt_swiglu
from .registry import BackendStatus, BackendUnavailable, backends

__all__ = ["BackendStatus", "BackendUnavailable", "backends", "ttt_mlp2", "ttt_swiglu"]
