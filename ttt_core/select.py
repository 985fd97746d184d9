"""Which attentions to replace: presets and the written list.

Grammar: items separated by spaces, each ``self:RANGES`` or ``joint:RANGES``; RANGES are block numbers or ranges
separated by commas, as in ``self:0-12 joint:4,19-23``. Presets: ``paper``, ``self``, ``joint``, ``all``, ``none``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import TTTError
from .geometry import AttentionId, attention_blocks

PRESETS = ("paper", "self", "joint", "all", "none")
_ITEM = re.compile(r"(self|joint):(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")


def _paper(joint: tuple[int, ...], self_blocks: tuple[int, ...]) -> list[AttentionId]:
    """SD3.5-Medium: all 13 image self-attentions and the last 5 of 24 joint ones, half of the attentions.

    The paper has no other SD3 model; elsewhere the same shares hold: the last 5/24 of the joint attentions beside
    attn2, and the last half of them in a model without attn2.
    """
    count = max(1, round(len(joint) * 5 / 24)) if self_blocks else len(joint) // 2
    return [AttentionId("self", i) for i in self_blocks] + [AttentionId("joint", i) for i in joint[len(joint) - count :]]


def _parse(selection: str, available: dict[str, tuple[int, ...]]) -> list[AttentionId]:
    chosen = []
    for item in selection.split():
        match = _ITEM.fullmatch(item)
        if not match:
            raise TTTError(
                f"Cannot read '{item}' in the attention selection '{selection}'; write a preset ({', '.join(PRESETS)}) "
                "or a list such as 'self:0-12 joint:19-23'."
            )
        kind, blocks = match.group(1), available[match.group(1)]
        for part in match.group(2).split(","):
            first, _, last = part.partition("-")
            low, high = int(first), int(last or first)
            if low > high:
                raise TTTError(f"'{part}' in the attention selection '{selection}' runs backwards; write '{high}-{low}'.")
            for block in range(low, high + 1):
                if block not in blocks:
                    has = f"blocks {blocks[0]} to {blocks[-1]}" if blocks else "none"
                    raise TTTError(
                        f"The attention selection '{selection}' asks for {kind}:{block}, but this model's {kind} attentions are: {has}."
                    )
                chosen.append(AttentionId(kind, block))
    return chosen


def select_attentions(names: Iterable[str], selection: str = "paper") -> tuple[AttentionId, ...]:
    """The attentions that `selection` means for the model with these tensor names, sorted, without repeats.

    names: tensor names in SD3's layout (a state dict will do), any prefix. Raises TTTError, in one sentence, for a
    model that is not an MMDiT, a list that cannot be read, a block out of range, or preset self without attn2.
    """
    joint, self_blocks = attention_blocks(names)
    text = selection.strip()
    if text == "none":
        return ()
    if not text:
        raise TTTError(f"The attention selection is empty; write a preset ({', '.join(PRESETS)}) or a list such as 'self:0-12 joint:19-23'.")
    if text == "self" and not self_blocks:
        raise TTTError(
            "Preset 'self' replaces image self-attentions (attn2), and this model has none (SD3.5-Large, for example); "
            "choose 'paper', 'joint' or 'all'."
        )
    every = {"self": self_blocks, "joint": joint}
    if text == "paper":
        chosen = _paper(joint, self_blocks)
    elif text in ("self", "joint"):
        chosen = [AttentionId(text, i) for i in every[text]]
    elif text == "all":
        chosen = [AttentionId(kind, i) for kind, blocks in every.items() for i in blocks]
    else:
        chosen = _parse(text, every)
    return tuple(sorted(set(chosen), key=lambda a: (a.kind != "self", a.block)))


def describe(chosen: Iterable[AttentionId]) -> str:
    """The shortest written list that means exactly these attentions, e.g. ``self:0-12 joint:19-23``."""
    parts = []
    for kind in ("self", "joint"):
        runs: list[list[int]] = []
        for block in sorted(a.block for a in chosen if a.kind == kind):
            if runs and block == runs[-1][1] + 1:
                runs[-1][1] = block
            else:
                runs.append([block, block])
        if runs:
            parts.append(f"{kind}:" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs))
    return " ".join(parts) or "none"
