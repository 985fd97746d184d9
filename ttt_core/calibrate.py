"""Fitting each TTT layer alone to the softmax attention it replaces; no gradient passes through the big model.

Recorded along real sampling runs: (q, k, v, softmax output) of each attention; regressed: the layer's output on
softmax's. So it runs in the memory of inference plus a budget the user sets (design section 6; ours, not the paper's).

There is no second pass on the converted model's own inputs: on the digit model the layers are as close to softmax there
(7.4 %, 7.8 %, 5.8 % of its output) as on the original's inputs (7.4 %, 7.6 %, 5.7 %), so errors do not build up.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import TTTError
from .geometry import AttentionId
from .layer import TTTAttention
from .progress import OnProgress, ShouldCancel, Ticker
from .records import Recorder, Sample, sample_bytes
from .select import describe
from .trainable import Conditioning, TrainableModel, training_mode
from .trajectory import euler
from .weights import TTTWeights

FEWEST_SAMPLES = 8
_HOLD_OUT = 8  # every eighth sampling run is never fitted: samples of one run are too alike to test on
# Samples kept of each run. Measured on the digit model, 120 samples: from 6 runs, 89 % of the gap in flow loss closed,
# from 120 pictures 94 %, although the former fitted their own runs twice as well.
_PER_RUN = 4
# When memory is short: first up to this many passes, then fewer samples down to _ENOUGH, then more passes.
_PASSES, _ENOUGH = 4, 32
# Measured on the digit model, 150 steps, hold-out error of an image self-attention: rate 1e-2 9.0 %, 2e-2 8.3 %, 3e-2 10 %
# (with second beta 0.99), 1e-1 does not learn. Starting at four times the paper's 0.02, where the output has softmax's
# size: 13 %, so layers start as the paper has them.
_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class CalibrationSettings:
    """How to calibrate; the defaults suit SD3.5-Medium on a 24 GB card and the tiny model on a CPU alike.

    steps: Adam steps per layer. rate: Adam's rate at the start, falling to 0 along a cosine. samples: recorded samples
    per attention, spread over prompts, sizes and noise levels. memory_gb: GiB of main memory for them; when they do not
    fit for all attentions at once, attentions take turns and the sampling runs are repeated. sampling_steps, cfg: of the
    runs. batch: samples per Adam step. target_tokens: softmax outputs kept per sample.
    """

    steps: int = 400
    rate: float = 2e-2
    samples: int = 128
    memory_gb: float = 8.0
    sampling_steps: int = 12
    cfg: float = 4.0
    batch: int = 8
    target_tokens: int = 1024
    seed: int = 0

    def check(self) -> None:
        """Raises TTTError, one sentence, for a value outside its range."""
        ranges = {
            "steps": (1, 100_000), "rate": (1e-6, 1.0), "samples": (FEWEST_SAMPLES, 100_000), "memory_gb": (0.001, 4096),
            "sampling_steps": (1, 1000), "cfg": (1.0, 100.0), "batch": (1, 1024), "target_tokens": (16, 2**31),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not (isinstance(value, int | float) and low <= value <= high):
                raise TTTError(f"Calibration: {name} is {value!r}; choose a number from {low} to {high}.")


@dataclass
class CalibrationReport:
    """fit: {attention: (relative error before, after)}, each |ttt - softmax|^2 / |softmax|^2 on samples that were not
    fitted. losses: the training error, averaged over the attentions, along the steps. fitted: attentions done."""

    fit: dict[AttentionId, tuple[float, float]] = field(default_factory=dict)
    curves: dict[AttentionId, list[float]] = field(default_factory=dict)
    samples: int = 0
    passes: int = 0
    seconds: float = 0.0
    cancelled: bool = False

    @property
    def fitted(self) -> tuple[AttentionId, ...]:
        return tuple(self.fit)

    @property
    def losses(self) -> list[float]:
        """Relative error at each step, averaged over the attentions fitted so far."""
        return [sum(step) / len(step) for step in zip(*self.curves.values(), strict=False)]

    def text(self) -> str:
        """Several short lines for a person."""
        lines = [f"calibrated {len(self.fit)} attentions on {self.samples} samples each in {self.seconds:.0f} s"]
        lines += [f"{a}: error {before:.1%} -> {after:.1%} of softmax's output (hold-out)" for a, (before, after) in self.fit.items()]
        if self.cancelled:
            lines.append("CANCELLED: the attentions not named above are as they were.")
        return "\n".join(lines)


def calibrate(
    model: TrainableModel,
    weights: TTTWeights,
    conditionings: Sequence[Conditioning],
    sizes: Sequence[tuple[int, int]],
    settings: CalibrationSettings | None = None,
    *,
    negative: Conditioning | None = None,
    progress: OnProgress | None = None,
    cancel: ShouldCancel | None = None,
    interruptions: tuple[type[BaseException], ...] = (),
) -> tuple[TTTWeights, CalibrationReport]:
    """(weights with fitted layers, report). `weights` itself and the model are not changed.

    conditionings: of single samples, used in turn. sizes: latent sizes (h, w), used in turn. negative: for cfg, the
    model's null conditioning if not given. cancel is asked before every step; when it says yes, what is fitted so far is
    returned and report.cancelled is set; so it is for an exception of `interruptions`, which a host may raise anywhere. Raises TTTError for bad settings, a budget too small for a few samples, and
    non-finite values, naming attention and step.
    """
    settings = settings or CalibrationSettings()
    settings.check()
    _check_inputs(model, weights, conditionings, sizes)
    start = time.monotonic()
    report = CalibrationReport()
    with training_mode():
        layers = {a: copy.deepcopy(layer).requires_grad_(True) for a, layer in weights.layers.items()}
        fresh = {a: layer.state_dict() for a, layer in weights.layers.items()}
        plan = _plan(model, tuple(layers), sizes, settings)
        report.samples, report.passes = plan.samples, len(plan.groups)
        tick = Ticker({"record": (len(plan.groups) * plan.calls, 2.0), "fit": (len(layers) * settings.steps, 1.0)}, progress)
        stop = cancel or (lambda: False)
        try:
            for group in plan.groups:
                samples = _record(model, group, conditionings, negative, sizes, plan, settings, tick, stop)
                for attention in group if samples is not None else ():
                    if not _fit(layers[attention], fresh[attention], attention, samples.pop(attention), model.device, settings, report, tick, stop):
                        samples = None
                        break
                if samples is None:
                    report.cancelled = True
                    break
        except interruptions:
            report.cancelled = True
        for attention in set(layers) - set(report.fit):
            layers[attention].load_state_dict(fresh[attention])
            layers[attention].to("cpu")
    report.seconds = time.monotonic() - start
    made = dict(weights.made)
    if report.fit:
        made = {"state": "calibrated", "steps": settings.steps, "samples": plan.samples, "seed": settings.seed}
        if len(report.fit) < len(layers):
            made["attentions"] = describe(report.fit)
    return TTTWeights(weights.spec, weights.geometry, layers, dict(weights.base_changes), made, weights.base_sketch), report


@dataclass(frozen=True)
class _Plan:
    """groups: attentions recorded in one pass each. calls: model calls of a pass. samples: kept per attention."""

    groups: list[tuple[AttentionId, ...]]
    runs: int
    calls: int
    samples: int


def _check_inputs(model: TrainableModel, weights: TTTWeights, conditionings: Sequence, sizes: Sequence) -> None:
    if not weights.layers:
        raise TTTError("Calibration: no attention is selected, so there is nothing to fit; choose attentions in TTT Linearize.")
    if not conditionings:
        raise TTTError("Calibration: no conditioning was given; connect at least one prompt.")
    if not sizes:
        raise TTTError("Calibration: no size was given; connect an empty latent of the size you sample at.")
    for h, w in sizes:
        if min(h, w) < 1 or h % model.latent_multiple or w % model.latent_multiple:
            raise TTTError(f"Calibration: a latent of {h} x {w} cannot be sampled; both sides must be multiples of {model.latent_multiple}.")


def _plan(model: TrainableModel, attentions: tuple[AttentionId, ...], sizes, settings: CalibrationSettings) -> _Plan:
    """As many attentions per pass as the budget holds; fewer samples when it does not even hold one attention's."""
    tokens = max(h * w for h, w in sizes) // 4 + 512  # patches of 2 x 2, and some text
    one = sample_bytes(tokens, model.geometry.hidden, settings.target_tokens)
    fits = int(settings.memory_gb * 2**30 // one)
    if fits < FEWEST_SAMPLES:
        raise TTTError(
            f"Calibration: {settings.memory_gb:g} GiB hold {fits} samples of the largest size and at least {FEWEST_SAMPLES} are needed; "
            f"set memory_gb to {math.ceil(FEWEST_SAMPLES * one / 2**30 * 10) / 10:g} or more, or calibrate at a smaller size."
        )
    for passes in range(1, len(attentions) + 1):
        width = math.ceil(len(attentions) / passes)
        samples = min(settings.samples, fits // width)
        if samples >= min(settings.samples, _ENOUGH if passes >= _PASSES else settings.samples) or width == 1:
            break
    groups = [attentions[i : i + width] for i in range(0, len(attentions), width)]
    runs = max(len(sizes), math.ceil(samples / min(_PER_RUN, settings.sampling_steps)))
    samples = min(samples, runs * settings.sampling_steps)
    return _Plan(groups, runs, runs * settings.sampling_steps, samples)


def _record(model, group, conditionings, negative, sizes, plan: _Plan, settings: CalibrationSettings, tick: Ticker, stop: ShouldCancel):
    """{attention: samples} along plan.runs sampling runs of one prompt each, or None when cancelled.

    Every run gives about as many samples, at random noise levels; at most one element of a call is kept, the prompt's or
    the negative's by chance.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    shares = [plan.samples // plan.runs + (run < plan.samples % plan.runs) for run in range(plan.runs)]
    kept = [set(torch.randperm(settings.sampling_steps, generator=generator)[:share].tolist()) for share in shares]
    guided = settings.cfg != 1.0
    recorder = Recorder(settings.target_tokens, settings.seed)
    for run in range(plan.runs):
        h, w = sizes[run % len(sizes)]
        noise = torch.randn(1, model.latent_channels, h, w, generator=generator)
        positive = conditionings[run % len(conditionings)]
        empty = model.null_conditioning(positive) if negative is None else negative
        halves = torch.randint(2 if guided else 1, (settings.sampling_steps,), generator=generator).tolist()

        def choose(step: int, run=run, halves=halves) -> None:
            picked = [halves[step]] if step in kept[run] else []
            recorder.pick(picked, f"sampling step {step + 1} of {settings.sampling_steps}", run)

        choose(0)
        with model.recording(group, recorder):
            for step, _, _ in euler(model, noise, [positive], [empty], steps=settings.sampling_steps, cfg=settings.cfg):
                if step < settings.sampling_steps:
                    tick("record", f"recording {describe(group)}")
                    choose(step + 1)
                if stop():
                    return None
    return recorder.samples


def _fit(
    layer: TTTAttention, fresh: dict, attention: AttentionId, samples: list[Sample], device, settings: CalibrationSettings,
    report: CalibrationReport, tick: Ticker, stop: ShouldCancel,
) -> bool:
    """Fits one layer in place and notes it in the report; False when cancelled, the layer then goes back by the caller."""
    layer.to(device)
    held, fitted = ([s for s in samples if (s.run % _HOLD_OUT == 0) == out] for out in (True, False))
    probe = copy.deepcopy(layer)
    probe.load_state_dict(fresh)
    before = relative_error(probe, held, device, settings.batch)
    scale = 1 / _mean_square(fitted)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=settings.rate, betas=_BETAS)
    curve = []
    for step in range(settings.steps):
        if stop():
            layer.to("cpu")
            return False
        optimizer.param_groups[0]["lr"] = settings.rate * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        error = _error(layer, _draw(fitted, settings.batch, generator), device) * scale
        error.backward()
        curve.append(float(error.detach()))
        if not math.isfinite(curve[-1]):
            raise TTTError(
                f"Calibration of attention {attention} gave {curve[-1]} at step {step + 1} of {settings.steps}; "
                f"nothing was changed. Lower the rate (now {settings.rate:g}) and calibrate again."
            )
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tick("fit", f"fitting {attention}", curve[-1])
    after = relative_error(layer, held, device, settings.batch)
    if not math.isfinite(after) or after > before:
        layer.load_state_dict(fresh)  # never hand back something worse than what came in
        after = before
    layer.to("cpu")
    report.fit[attention], report.curves[attention] = (before, after), curve
    return True


def _draw(samples: list[Sample], batch: int, generator: torch.Generator) -> list[Sample]:
    """A random batch of samples of one shape."""
    first = samples[int(torch.randint(len(samples), (1,), generator=generator))]
    alike = [s for s in samples if s.shape == first.shape]
    count = max(1, min(batch, 16384 // len(first.q)))  # a token limit, as the layer's backward holds 23 tensors of them
    return [alike[i] for i in torch.randint(len(alike), (count,), generator=generator).tolist()]


def _error(layer: TTTAttention, samples: list[Sample], device) -> Tensor:
    """Mean squared difference to softmax's output at the picked tokens of samples of one shape."""
    q, k, v, out = (torch.stack([getattr(s, n) for s in samples]).to(device).float() for n in ("q", "k", "v", "out"))
    picked = torch.stack([s.picked for s in samples]).to(device)
    ours = layer(q, k, v, grid=samples[0].grid, text_tokens=samples[0].text_tokens, backend="torch")
    ours = ours.gather(1, picked[..., None].expand(-1, -1, ours.shape[2]))
    return (ours - out).square().mean()


def _mean_square(samples: list[Sample]) -> float:
    return max(sum(float(s.out.float().square().mean()) for s in samples) / len(samples), 1e-12)


@torch.no_grad()
def relative_error(layer: TTTAttention, samples: list[Sample], device, batch: int = 8) -> float:
    """|ttt - softmax|^2 / |softmax|^2 over all these samples, of any shapes."""
    total = sum(float(_error(layer, [s], device)) for s in samples)
    return total / len(samples) / _mean_square(samples)
