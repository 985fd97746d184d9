"""Looking into the attentions of a model: which suit TTT, how well each TTT layer fits, and what a token looks at.

Everything is measured in the middle of one sampling run of the softmax model, on what its attentions really see there.
The cost is counted in model calls before anything runs: `planned_calls`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import TTTError
from .geometry import AttentionId
from .layer import TTTAttention
from .select import select_attentions
from .trainable import Conditioning, Record, TrainableModel, training_mode
from .trajectory import euler, flow_sigmas
from .weights import TTTWeights

PRETRAINED, RANDOM = 0.5, 0.07  # paper: key shift ratio of pretrained ViTs, and at random initialisation
MOST_MAPS = 6  # attention maps drawn at most
PROBES = 16  # random vectors that estimate the size of a Jacobian


@dataclass(frozen=True)
class InspectSettings:
    """steps: of the sampling run (plain Euler, no guidance). at: the model call looked at, as a share of the run.

    token: (down, right) of the image token to look from, each 0 to 1. maps: attentions to draw, as select_attentions
    reads it; empty: up to four of those that are TTT. importance: whether to try every TTT layer alone.
    """

    steps: int = 8
    at: float = 0.5
    token: tuple[float, float] = (0.5, 0.5)
    maps: str = ""
    importance: bool = True
    seed: int = 0

    @property
    def step(self) -> int:
        return min(self.steps - 1, int(self.at * self.steps))


@dataclass
class Row:
    """One attention. shift: |mean k| / mean |k| over the tokens, averaged over heads. fit: |ttt - softmax|^2 / |softmax|^2
    of this layer's output. change: |v' - v| / |v| of the model's prediction v when only this attention is TTT."""

    attention: AttentionId
    shift: float
    fit: float | None = None
    change: float | None = None


@dataclass
class AttentionMap:
    """How strongly one image token's output depends on the value of every image token, (h, w) each, summing to 1.

    For softmax these are the attention weights over all heads; for TTT the sizes of d out_i / d v_j, estimated with
    random vectors. reach: mean distance in tokens from the chosen one. softmax_text: share of softmax's that goes to the text.
    """

    attention: AttentionId
    token: tuple[int, int]
    softmax: Tensor
    ttt: Tensor | None
    softmax_text: float

    def reach(self, field: Tensor) -> float:
        h, w = field.shape
        down, right = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        distance = ((down - self.token[0]) ** 2 + (right - self.token[1]) ** 2).float().sqrt()
        return float((field * distance).sum())


@dataclass
class Inspection:
    rows: list[Row]
    maps: list[AttentionMap]
    calls: int
    seconds: float
    sigma: float
    grid: tuple[int, int]
    skipped: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A table with the attentions that change the prediction most on top, then the reaches, then the cost."""
        lines = [f"grid {self.grid[1]} x {self.grid[0]} tokens, sigma {self.sigma:.2f}", f"{'attention':10} {'key shift':>9} {'fit error':>9} {'change':>8}"]
        for row in sorted(self.rows, key=lambda r: (-(r.change if r.change is not None else -1), r.attention.kind, r.attention.block)):
            fit = "-" if row.fit is None else f"{row.fit:.1%}"
            change = "-" if row.change is None else f"{row.change:.2%}"
            lines.append(f"{row.attention!s:10} {row.shift:9.2f} {fit:>9} {change:>8}")
        lines.append(f"key shift: |mean k| / mean |k|; the paper gives about {PRETRAINED} for pretrained vision transformers, {RANDOM} at random initialisation.")
        if any(r.change is not None for r in self.rows):
            lines.append("change: of the model's prediction when only that attention is TTT. Leave the largest out of the selection if the picture suffers.")
        for m in self.maps:
            ttt = "" if m.ttt is None else f", TTT {m.reach(m.ttt):.1f}"
            uniform = torch.full(self.grid, 1 / math.prod(self.grid))
            lines.append(f"reach of {m.attention}: softmax {m.reach(m.softmax):.1f} tokens{ttt} (evenly spread: {m.reach(uniform):.1f})")
        return "\n".join([*lines, *self.skipped, f"cost: {self.calls} model calls, {self.seconds:.1f} s"])


def planned_calls(weights: TTTWeights | None, settings: InspectSettings) -> int:
    """Model calls that `inspect_model` will make."""
    alone = len(weights.layers) if weights is not None and settings.importance else 0
    return settings.step + 1 + alone + (1 if settings.step else 0)


def inspect_model(
    model: TrainableModel,
    weights: TTTWeights | None,
    conditioning: Conditioning,
    size: tuple[int, int],
    settings: InspectSettings | None = None,
    on_call: Callable[[], None] | None = None,
) -> Inspection:
    """Inspects the softmax model and, if given, the layers that would take its attentions' places.

    size: (h, w) of the latent. on_call: called after every model call; what it raises ends the inspection. Raises
    TTTError for settings out of range, for an unknown attention, and for non-finite keys.
    """
    settings = settings or InspectSettings()
    if settings.steps < 1 or not 0 <= settings.at <= 1 or not all(0 <= t <= 1 for t in settings.token):
        raise TTTError("TTT Inspect: steps must be at least 1, and the place in the run and the token's place from 0 to 1.")
    layers = dict(weights.layers) if weights is not None else {}
    to_draw, skipped = _to_draw(model, layers, settings)
    start, calls = time.monotonic(), 0

    def called() -> None:
        nonlocal calls
        calls += 1
        if on_call is not None:
            on_call()

    with training_mode(), torch.no_grad():
        x, sigma = _on_the_way(model, conditioning, size, settings, called)
        look = _Look(layers, to_draw, settings.token, model.geometry.heads)
        with model.running({}), model.recording(model.geometry.attentions, look):
            softmax = model.velocity(x, sigma, [conditioning])
        called()
        if settings.importance:
            for attention, layer in layers.items():
                with model.running({attention: layer}):
                    alone = model.velocity(x, sigma, [conditioning])
                look.rows[attention].change = float((alone - softmax).norm() / softmax.norm())
                called()
    rows = [look.rows[a] for a in model.geometry.attentions if a in look.rows]
    return Inspection(rows, look.maps, calls, time.monotonic() - start, float(sigma[0]), look.grid, skipped)


def _to_draw(model: TrainableModel, layers: dict, settings: InspectSettings) -> tuple[tuple[AttentionId, ...], list[str]]:
    if settings.maps.strip():
        names = [f"{a.path}.qkv.weight" for a in model.geometry.attentions]
        chosen = select_attentions(names, settings.maps)
        if not chosen:
            raise TTTError("TTT Inspect: maps is 'none', so there is nothing to draw; name up to six attentions, such as 'self:0 joint:23', or leave it empty.")
    else:
        every = sorted(layers, key=lambda a: (a.kind != "self", a.block)) or list(model.geometry.attentions)
        chosen = tuple(dict.fromkeys(every[round(i * (len(every) - 1) / 3)] for i in range(4)))
    skipped = [f"maps: only the first {MOST_MAPS} of {len(chosen)} are drawn."] if len(chosen) > MOST_MAPS else []
    return tuple(chosen[:MOST_MAPS]), skipped


def _on_the_way(model: TrainableModel, conditioning: Conditioning, size, settings: InspectSettings, called) -> tuple[Tensor, Tensor]:
    """(latent, sigma) before step number settings.step of a run of the softmax model."""
    noise = torch.randn(1, model.latent_channels, *size, generator=torch.Generator().manual_seed(settings.seed))
    sigma = flow_sigmas(settings.steps, model.flow_shift)[settings.step].reshape(1)
    if settings.step == 0:
        return noise.to(model.device), sigma
    with model.running({}):
        # euler calls the model before it yields x, so the state wanted comes with one call more than needed.
        for step, x, _ in euler(model, noise, [conditioning], [], steps=settings.steps, cfg=1.0):
            called()
            if step == settings.step:
                return x, sigma
    raise AssertionError("unreachable: the run ends after settings.steps")


class _Look:
    """Sink for the records of one softmax call: takes the numbers out at once and keeps no tensor of the call."""

    def __init__(self, layers: dict[AttentionId, TTTAttention], to_draw: Sequence[AttentionId], token: tuple[float, float], heads: int):
        self.layers, self.to_draw, self.token, self.heads = layers, set(to_draw), token, heads
        self.rows: dict[AttentionId, Row] = {}
        self.maps: list[AttentionMap] = []
        self.grid = (1, 1)

    def __call__(self, record: Record) -> None:
        attention, self.grid = record.attention, record.grid
        layer = self.layers.get(attention)
        row = Row(attention, key_shift(record.k, self.heads))
        if not math.isfinite(row.shift):
            raise TTTError(f"The keys of attention {attention} are not finite, in the softmax model itself; try another weight dtype for the base.")
        if layer is not None:
            options = dict(grid=record.grid, text_tokens=record.text_tokens)
            out = layer(record.q, record.k, record.v, **options).float()
            row.fit = float((out - record.out).square().sum() / record.out.float().square().sum())
        self.rows[attention] = row
        if attention in self.to_draw:
            self.maps.append(self._map(record, layer))

    def _map(self, record: Record, layer: TTTAttention | None) -> AttentionMap:
        (h, w), (down, right) = record.grid, self.token
        place = min(h - 1, int(down * h)), min(w - 1, int(right * w))
        index = record.text_tokens + place[0] * w + place[1]
        weights = softmax_row(record.q, record.k, self.heads, index)
        image = weights[record.text_tokens :]
        ours = None if layer is None else value_influence(layer, record, index)[record.text_tokens :]
        fields = [None if f is None else (f / f.sum()).reshape(h, w).cpu() for f in (image, ours)]
        return AttentionMap(record.attention, place, fields[0], fields[1], float(1 - image.sum() / weights.sum()))


def key_shift(k: Tensor, heads: int) -> float:
    """|mean of the keys| / mean |key| over the tokens, averaged over heads and batch; k (B, N, heads*d). Paper, section 3.2."""
    k = k.float().unflatten(2, (heads, -1))  # [B, N, H, d]
    return float((k.mean(1).norm(dim=-1) / k.norm(dim=-1).mean(1)).mean())


def softmax_row(q: Tensor, k: Tensor, heads: int, index: int) -> Tensor:
    """(N,) attention weights of token `index`, root mean square over the heads: the size of d out_i / d v_j over sqrt(d)."""
    q, k = (x[:1].float().unflatten(2, (heads, -1)) for x in (q, k))
    scores = torch.einsum("bhd,bnhd->bhn", q[:, index], k) * q.shape[-1] ** -0.5
    return scores.softmax(-1).square().mean((0, 1)).sqrt()


def value_influence(layer: TTTAttention, record: Record, index: int, probes: int = PROBES, seed: int = 0) -> Tensor:
    """(N,) estimated sizes |d out_i / d v_j| of a TTT layer for the token `index`, over all heads.

    The squared Frobenius norm of each (d, d) block is the mean of |J^T z|^2 over random signs z, of which `probes` are
    drawn. Runs in plain PyTorch, once.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (x[:1].detach().float().clone() for x in (record.q, record.k, record.v))
    with torch.enable_grad():
        v.requires_grad_(True)
        out = layer(q, k, v, grid=record.grid, text_tokens=record.text_tokens, backend="torch")[0, index]
        total = torch.zeros(v.shape[1], device=v.device)
        for i in range(probes):
            signs = (torch.randint(0, 2, out.shape, generator=generator) * 2 - 1).to(out)
            (gradient,) = torch.autograd.grad(out, v, signs, retain_graph=i + 1 < probes)
            total += gradient[0].square().sum(-1)
    return (total / probes).sqrt()
