"""The method itself, torch only: what to replace, the layer, its weights file. Knows no UI and no host."""

from .errors import TTTError
from .geometry import AttentionId, Geometry, read_geometry
from .layer import TTTAttention
from .select import select_attentions
from .spec import TTTSpec
from .weights import TTTWeights

__all__ = [
    "AttentionId",
    "Geometry",
    "TTTAttention",
    "TTTError",
    "TTTSpec",
    "TTTWeights",
    "read_geometry",
    "select_attentions",
]
