"""Launch configurations per family of NVIDIA GPUs, chosen by offline compilation (docs/kernels.md has the table).

What decides is registers: in bf16 and fp16 the tiles below compile without spills at head size 64 and with at most
128 bytes at 128, inside each family's shared memory. No autotuning at a user's first picture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Config:
    """Tile sizes in tokens, hidden units per program, warps, pipeline stages. Every tile is a power of two >= 16."""

    keys_tile: int
    keys_warps: int
    step_tile: int
    step_hidden: int
    step_warps: int
    step_stages: int
    apply_tile: int
    apply_hidden: int
    apply_warps: int
    programs: int = 512  # how many programs a launch should at least have, a few for each multiprocessor


STATS_TILE, STATS_CHANNELS, STATS_WARPS = 16, 64, 4

_BASE = {  # (head size, fp32)
    (64, False): Config(32, 4, 32, 32, 4, 2, 32, 64, 4),
    (128, False): Config(32, 8, 32, 16, 8, 1, 16, 64, 8),
    (64, True): Config(32, 4, 16, 16, 8, 1, 16, 32, 8),
    (128, True): Config(32, 8, 16, 16, 8, 1, 16, 16, 8),
}

# Hopper's and data-centre Blackwell's matrix units read operands from shared memory, which leaves registers for larger
# tiles, and they want 64 rows.
_WIDE = {
    (64, False): replace(_BASE[64, False], step_tile=64),
    (128, False): replace(_BASE[128, False], step_tile=64, step_hidden=32, step_stages=2),
}

# Compute capability of a family's first member -> what differs from the base.
_FAMILIES: dict[tuple[int, int], dict[tuple[int, bool], Config]] = {
    (8, 0): {},
    (8, 6): {},
    (8, 9): {},
    (9, 0): _WIDE,
    (10, 0): _WIDE,
    (12, 0): {},
}

FAMILIES = tuple(_FAMILIES)
SHARED_LIMIT = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # KiB per block


def config_for(capability: tuple[int, int] | None, head_dim: int, fp32: bool) -> Config:
    """The row for a GPU; a capability between two families takes the older one, None (no NVIDIA GPU) the default."""
    known = [family for family in _FAMILIES if capability is not None and family <= capability]
    changes = _FAMILIES[max(known)] if known else {}
    return changes.get((head_dim, fp32), _BASE[head_dim, fp32])


def strip_width(length: int, largest: int) -> int:
    """The tile for grid rows of this length, one of at most three so that few sizes are ever compiled.

    Padding costs whole tiles, and a smaller tile costs each token more: about what eight tokens cost, for each tile.
    """
    sizes = [t for t in (largest, largest // 2, largest // 4) if t >= 16]
    return min(sizes, key=lambda t: (-(-length // t) * (t + 8), -t))
