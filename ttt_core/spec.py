"""What a linearization is: which attentions, which inner model, which key norm, which locality."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from .errors import TTTError

INNER_MODELS = ("swiglu", "mlp2")
KEY_NORMS = ("instance", "none", "center", "scale", "rms", "layer")
LOCALITIES = ("dwc_qk", "none")


@dataclass(frozen=True)
class TTTSpec:
    """The recipe of a linearization; frozen, JSON both ways.

    attentions: a preset (paper, self, joint, all, none) or a list such as ``self:0-12 joint:19-23`` (see select.py).
    inner_model: ``swiglu`` (the paper's) or ``mlp2``. key_norm: ``instance`` (the paper's), or ``center``, ``scale``,
    ``rms``, ``layer``, ``none`` for study. locality: ``dwc_qk`` (depthwise 3x3 on q and k) or ``none``.
    Raises TTTError for a value outside these lists.
    """

    attentions: str = "paper"
    inner_model: str = "swiglu"
    key_norm: str = "instance"
    locality: str = "dwc_qk"

    def __post_init__(self):
        for name, allowed in (("inner_model", INNER_MODELS), ("key_norm", KEY_NORMS), ("locality", LOCALITIES)):
            value = getattr(self, name)
            if value not in allowed:
                raise TTTError(f"TTT {name} '{value}' is not known; choose one of {', '.join(allowed)}.")
        if not isinstance(self.attentions, str):
            raise TTTError(f"TTT attentions must be text such as 'paper' or 'self:0-12 joint:19-23', got {self.attentions!r}.")

    @property
    def layer_key(self) -> tuple[str, str, str]:
        """What makes two layers interchangeable: everything but the selection."""
        return self.inner_model, self.key_norm, self.locality

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TTTSpec:
        """Reads what to_json wrote. Raises TTTError for text that is not a spec or has unknown fields."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as e:
            raise TTTError(f"The TTT spec is not valid JSON ({e}).") from e
        known = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or not set(data) <= known:
            raise TTTError(f"The TTT spec must be a JSON object with the fields {', '.join(sorted(known))}, got {text[:80]!r}.")
        return cls(**data)
