"""The TTT layer as one operation, with a plain reference and faster backends behind it. Knows no model."""

from .ops import ttt_mlp2, ttt_swiglu
from .registry import BackendStatus, BackendUnavailable, Call, backends, explain

__all__ = ["BackendStatus", "BackendUnavailable", "Call", "backends", "explain", "ttt_mlp2", "ttt_swiglu"]
