"""Fine-tuning a linearized model with the rectified-flow loss; one loop for every host (paper section 4, SD3.5).

    tuning = FineTune(model, weights, examples, FineTuneSettings(steps=300))
    weights = tuning.run(path="state.safetensors", on_step=..., cancel=...)

The model is never written to: what is trained lives here, in fp32, and is put into the model for each step.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import checkpoint
from .ema import EMA
from .errors import TTTError
from .examples import Example, Examples, generator_for
from .flow import TIMESTEPS, draw_sigmas, flow_loss, noisy
from .geometry import AttentionId
from .optimizer import OPTIMIZERS, build_optimizer, export_state, import_state, set_rate
from .progress import ShouldCancel
from .trainable import MODES, Record, TrainableModel, normal, select_base_tensors, training_mode
from .weights import SPEC_KEY, TTTWeights

_MAY_CHANGE = ("steps", "rate", "new_rate_factor", "clip")  # on resuming; with all the same the run is exact


@dataclass(frozen=True)
class FineTuneSettings:
    """How to train; the defaults are for a first look, the paper's run is 3000 steps of batch 64 (batch x accumulation).

    mode: what is trained: ``ttt`` (the new layers), ``attention`` (and q, k, v, o of the replaced attentions), ``full``.
    rate: AdamW's for base weights; new layers get new_rate_factor times it (20 in the paper). warmup: steps to full rate.
    ema: decay of the averaged weights that are sampled and saved, 0 for none. drop: share of samples trained without
    their prompt. timesteps: density of the noise levels. teacher_velocity, teacher_attention: weights of the distances
    to the original model's velocity and to its outputs of the replaced attentions. clip: largest norm of the gradients.
    """

    mode: str = "ttt"
    steps: int = 300
    batch: int = 4
    accumulation: int = 1
    rate: float = 5e-5
    new_rate_factor: float = 20.0
    warmup: int = 10
    weight_decay: float = 0.0
    clip: float = 1.0
    optimizer: str = "adamw"
    ema: float = 0.99
    drop: float = 0.1
    timesteps: str = "logit_normal"
    flow: float = 1.0
    teacher_velocity: float = 0.0
    teacher_attention: float = 0.0
    checkpointing: bool = False
    seed: int = 0

    def check(self) -> None:
        """Raises TTTError, one sentence, for a value outside its range."""
        for name, allowed in (("mode", MODES), ("optimizer", OPTIMIZERS), ("timesteps", TIMESTEPS)):
            if getattr(self, name) not in allowed:
                raise TTTError(f"Fine-tuning: {name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}.")
        ranges = {
            "steps": (1, 10_000_000), "batch": (1, 4096), "accumulation": (1, 4096), "rate": (0.0, 1.0), "new_rate_factor": (0.0, 1e4),
            "warmup": (0, 1_000_000), "weight_decay": (0.0, 1.0), "clip": (1e-6, 1e6), "ema": (0.0, 0.99999), "drop": (0.0, 1.0),
            "flow": (0.0, 1e3), "teacher_velocity": (0.0, 1e3), "teacher_attention": (0.0, 1e3),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not (isinstance(value, int | float) and low <= value <= high):
                raise TTTError(f"Fine-tuning: {name} is {value!r}; choose a number from {low:g} to {high:g}.")
        if not (self.flow or self.teacher_velocity or self.teacher_attention):
            raise TTTError("Fine-tuning: flow, teacher_velocity and teacher_attention are all 0, so there is nothing to learn; set one above 0.")
        if self.rate * self.new_rate_factor == 0 and self.mode == "ttt":
            raise TTTError("Fine-tuning: the rate of the TTT layers is 0, so nothing would change; set rate and new_rate_factor above 0.")


@dataclass(frozen=True)
class StepReport:
    """One optimizer step. step: from 1. loss: the whole; parts: each term before its weight. grad_norm: before clipping."""

    step: int
    total: int
    loss: float
    parts: dict[str, float]
    grad_norm: float
    seconds_left: float


class FineTune:
    """One training run: its trained tensors, optimizer, average and place in the data.

    trained: {name: fp32 tensor}, TTT parameters under their file names and base tensors under theirs. done: optimizer
    steps so far. losses: of each. `weights` and `model` are not changed. Raises TTTError for bad settings or examples,
    for layers of another model, and for nothing to train.
    """

    def __init__(self, model: TrainableModel, weights: TTTWeights, examples: Sequence[Example], settings: FineTuneSettings | None = None):
        self.settings = settings or FineTuneSettings()
        self.settings.check()
        self.model, self.weights = model, weights
        self._start, self.resumed = _fingerprint(weights), 0
        self.done, self.losses = 0, []
        with training_mode():
            self.examples = Examples(examples, model, self.settings.batch, self.settings.seed)
            device = model.device
            self.layers = {a: copy.deepcopy(layer).to(device, torch.float32).requires_grad_(True) for a, layer in weights.layers.items()}
            own = model.base_tensors()
            self._types = {n: _step_type(own[n], model.dtype) for n in {*own} & {*weights.base_changes}}
            if missing := sorted(set(weights.base_changes) - set(own)):
                raise TTTError(f"The TTT weights change {missing[0]}, which this model does not have; load the base they were made for.")
            chosen = select_base_tensors(own, self.settings.mode, weights.layers)
            self._types |= {n: _step_type(own[n], model.dtype) for n in chosen}
            self._base = {
                n: normal(weights.base_changes.get(n, own[n]).detach()).to(device, torch.float32, copy=True).requires_grad_(True) for n in chosen
            }
            self._frozen = {n: normal(t.detach()).to(device) for n, t in weights.base_changes.items() if n not in self._base}
            new = {f"{a.path}.ttt.{n}": p for a, layer in self.layers.items() for n, p in layer.named_parameters()}
            self.trained: dict[str, Tensor] = {**new, **self._base}
            if not self.trained:
                raise TTTError("Fine-tuning: no attention is TTT and mode is not full, so there is nothing to train; choose attentions or mode full.")
            groups = [{"params": list(new.values()), "lr": self.settings.rate * self.settings.new_rate_factor}]
            groups.append({"params": list(self._base.values()), "lr": self.settings.rate})
            groups = [g for g in groups if g["params"]]
            self._rates = [g["lr"] for g in groups]
            self.optimizer = build_optimizer(self.settings.optimizer, groups, self.settings.weight_decay, device)
            self.average = EMA(self.trained, self.settings.ema) if self.settings.ema else None

    # ------------------------------------------------------------ the loop

    def run(
        self,
        *,
        path: str | os.PathLike | None = None,
        save_every: int = 100,
        on_step: Callable[[StepReport], None] | None = None,
        on_sample: Callable[[FineTune, int], None] | None = None,
        sample_every: int = 0,
        cancel: ShouldCancel | None = None,
    ) -> TTTWeights:
        """Trains up to settings.steps, going on where it is; returns `result()`.

        path: the state file, written every `save_every` steps, at the end and on cancel. on_sample(self, step) is called
        every `sample_every` steps; inside, `with tuning.sampling():` puts the averaged weights into the model. cancel is
        asked before every step; compare `done` with settings.steps afterwards. What on_step or on_sample raises (a host's
        cancel) passes through, after a save. Raises TTTError for a non-finite loss,
        naming the step; the file then is that of the last save.
        """
        start, first = time.monotonic(), self.done
        while self.done < self.settings.steps and not (cancel and cancel()):
            try:
                loss, parts, norm = self.step(where=f"; '{Path(path).name}' holds the last good state" if path and Path(path).exists() else "")
                left = (time.monotonic() - start) / (self.done - first) * (self.settings.steps - self.done)
                if path and save_every and self.done % save_every == 0 and self.done < self.settings.steps:
                    self.save(path)
                if on_step:
                    on_step(StepReport(self.done, self.settings.steps, loss, parts, norm, left))
                if on_sample and sample_every and self.done % sample_every == 0:
                    on_sample(self, self.done)
            except TTTError:
                raise  # not finite, say: the file keeps the last good state
            except BaseException:
                # A host's way to cancel, which may come out of any operation of the model. A step moves nothing before
                # its last operation, so what is here is the state after the last whole step.
                if path and self.done:
                    self.save(path)
                raise
        if path:
            self.save(path)
        return self.result()

    def step(self, where: str = "") -> tuple[float, dict[str, float], float]:
        """One optimizer step of batch x accumulation samples; (loss, its parts, norm of the gradients).

        Raises TTTError for a non-finite loss or gradient, before anything trained has moved.
        """
        with training_mode():
            number, parts_sum, total = self.done + 1, {}, 0.0
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                set_rate(group, rate * min(1.0, number / max(1, self.settings.warmup)))
            try:
                for part in range(self.settings.accumulation):
                    loss, parts = self._backward(self.done * self.settings.accumulation + part)
                    total += loss / self.settings.accumulation
                    for name, value in parts.items():
                        parts_sum[name] = parts_sum.get(name, 0.0) + value / self.settings.accumulation
                    self._refuse("loss", loss, number, where)
                norm = float(torch.nn.utils.clip_grad_norm_(self.trained.values(), self.settings.clip))
                self._refuse("gradient", norm, number, where)
                self.optimizer.step()
            finally:
                self.optimizer.zero_grad(set_to_none=True)
            self.done = number
            if self.average:
                self.average.update(self.trained, number)
            self.losses.append(total)
            return total, parts_sum, norm

    def _refuse(self, what: str, value: float, step: int, where: str) -> None:
        if not math.isfinite(value):
            raise TTTError(
                f"The {what} became {value} at step {step} of {self.settings.steps}, so the training was stopped before that step{where}. "
                f"Lower the learning rate (now {self.settings.rate:g}, {self.settings.new_rate_factor:g} times that for new layers) and resume."
            )

    def _backward(self, number: int) -> tuple[float, dict[str, float]]:
        """Adds the gradients of micro-batch `number`; everything random in it follows from the seed and that number."""
        settings, generator = self.settings, generator_for(self.settings.seed, 2, number)
        batch = self.examples.batch(number)
        latents = torch.stack([e.latent for e in batch])
        noise = torch.randn(latents.shape, generator=generator)
        sigma = draw_sigmas(len(batch), settings.timesteps, self.model.flow_shift, generator)
        dropped = (torch.rand(len(batch), generator=generator) < settings.drop).tolist()
        conditionings = [self.model.null_conditioning(e.conditioning) if d else e.conditioning for e, d in zip(batch, dropped, strict=True)]
        device = self.model.device
        x = noisy(latents, noise, sigma).to(device)
        latents, noise, sigma = latents.to(device), noise.to(device), sigma.to(device)

        watched = tuple(self.layers) if settings.teacher_attention else ()
        goal, goals = None, {}
        if settings.teacher_velocity or watched:
            with torch.no_grad(), _outputs(self.model, watched) as goals:
                goal = self.model.velocity(x, sigma, conditionings)
        with self._running(self.layers, self._base, settings.checkpointing), _outputs(self.model, watched) as outs:
            velocity = self.model.velocity(x, sigma, conditionings)
            parts = {"flow": flow_loss(velocity, latents, noise)}
            if settings.teacher_velocity:
                parts["teacher_velocity"] = (velocity - goal).square().mean()
            if watched:
                ratios = [_distance(outs[call], goals[call]) for call in goals]
                parts["teacher_attention"] = torch.stack(ratios).mean()
            loss = sum(getattr(settings, name) * value for name, value in parts.items())
            outs.closed = True
            (loss / settings.accumulation).backward()
        return float(loss.detach()), {name: float(value.detach()) for name, value in parts.items()}

    @contextmanager
    def _running(self, layers, base, checkpointing=False):
        cast = {n: t.to(self._types[n]) for n, t in {**self._frozen, **base}.items()}
        with self.model.running(layers, cast, checkpointing=checkpointing):
            yield

    # ------------------------------------------------------------ what comes out

    @contextmanager
    def sampling(self):
        """While inside, the model runs with the averaged weights (the current ones without ema), gradients off."""
        with training_mode(), torch.no_grad():
            layers, base = self._trained_copy()
            with self._running(layers, base):
                yield

    def result(self) -> TTTWeights:
        """The averaged weights (the current ones without ema), on the CPU, base tensors in the base's own precision."""
        with training_mode(), torch.no_grad():
            layers, base = self._trained_copy()
            layers = {a: layer.cpu().requires_grad_(True) for a, layer in layers.items()}
            changes = {n: t.to("cpu", self._types[n]) for n, t in {**self._frozen, **base}.items()}
        made = dict(self.weights.made)
        if self.done:
            made = {"state": "fine-tuned", "mode": self.settings.mode, "steps": self.done, "seed": self.settings.seed}
            made |= {"samples": len(self.examples), "from": self.weights.made.get("state", "unknown")}
        return TTTWeights(self.weights.spec, self.weights.geometry, layers, changes, made, self.weights.base_sketch)

    def _trained_copy(self) -> tuple[dict, dict[str, Tensor]]:
        values = self.average.average if self.average else self.trained
        layers = {a: copy.deepcopy(layer) for a, layer in self.layers.items()}
        for attention, layer in layers.items():
            layer.load_state_dict({n: values[f"{attention.path}.ttt.{n}"].detach() for n in layer.state_dict()})
        return layers, {n: values[n].detach().clone() for n in self._base}

    # ------------------------------------------------------------ stopping and going on

    def save(self, path: str | os.PathLike) -> None:
        """Everything needed to go on, in one safetensors file, written atomically. Raises TTTError."""
        state, numbers = export_state(self.optimizer, self.trained)
        parts = {"trained": self.trained, "optimizer": state, "frozen": self._frozen, "run": {"losses": torch.tensor(self.losses, dtype=torch.float64)}}
        if self.average:
            parts["average"] = self.average.average
        facts = {"step": self.done, "optimizer": numbers, "made": self.weights.made, **self._identity()}
        checkpoint.write(path, parts, facts)

    def resume(self, path: str | os.PathLike) -> None:
        """Goes on from a file that `save` wrote: step, trained tensors, optimizer, average, place in the data and random state.

        Settings, examples and starting layers must be the ones it was made with; steps, rates and clip may differ.
        Raises TTTError otherwise.
        """
        name = Path(path).name
        parts, facts = checkpoint.read(path)
        for what, ours in self._identity().items():
            theirs = facts.get(what)
            if theirs != json.loads(json.dumps(ours)):
                raise TTTError(f"'{name}' was made with other {what} ({_difference(theirs, ours)}); use the same, turn resume off, or choose another filename.")
        try:
            with training_mode(), torch.no_grad():
                if facts["step"]:  # before the first step an optimizer has no state
                    import_state(self.optimizer, self.trained, parts.get("optimizer", {}), facts["optimizer"])
                for value, saved in self._pairs(parts):
                    value.copy_(saved)
        except (KeyError, RuntimeError, TypeError) as e:
            raise TTTError(f"'{name}' does not fit this model and these settings ({e}); start a new file.") from e
        self.done, self.losses = int(facts["step"]), parts["run"]["losses"].tolist()
        self.resumed = self.done
        self.weights = TTTWeights(
            self.weights.spec, self.weights.geometry, self.weights.layers, self.weights.base_changes, facts["made"], self.weights.base_sketch
        )

    def _pairs(self, parts: dict[str, dict[str, Tensor]]):
        yield from ((t, parts["trained"][n]) for n, t in self.trained.items())
        yield from ((t, parts["frozen"][n]) for n, t in self._frozen.items())
        if self.average:
            yield from ((t, parts["average"][n]) for n, t in self.average.average.items())

    def _identity(self) -> dict:
        """What must be the same for a resumed run to equal an uninterrupted one."""
        settings = {n: v for n, v in asdict(self.settings).items() if n not in _MAY_CHANGE}
        return {
            "settings": settings, "TTT settings": asdict(self.weights.spec), "attentions": self.weights.selection,
            "base weights": self.weights.base_sketch, "pictures": self.examples.fingerprint, "starting layers": self._start,
        }


def _fingerprint(weights: TTTWeights) -> str:
    """Tells other starting layers and changed base tensors apart: a hash of 64 values of each tensor."""
    digest = hashlib.sha256()
    tensors = {n: t for n, t in weights.layer_tensors().items() if n != SPEC_KEY} | weights.base_changes
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().reshape(-1)
        digest.update(name.encode() + flat[:: max(1, len(flat) // 64)].float().numpy().tobytes())
    return digest.hexdigest()[:16]


def _difference(theirs, ours) -> str:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        differing = [n for n in ours if theirs.get(n) != ours[n]]
        return ", ".join(f"{n} {theirs.get(n)!r}, here {ours[n]!r}" for n in differing) or "other fields"
    text = f"{theirs!r}, here {ours!r}"
    return text if len(text) < 120 else "they differ"


def _step_type(tensor: Tensor, compute: torch.dtype) -> torch.dtype:
    """The type a trained base tensor has in a step and in the file: the base's own, or the compute type for an 8-bit base."""
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) else compute


class _Outputs(dict):
    """{(attention, elements): output} of the calls until `closed`; a recomputed block calls again and must not count."""

    closed = False

    def __call__(self, record: Record) -> None:
        if not self.closed:
            self[record.attention, record.elements] = record.out


@contextmanager
def _outputs(model: TrainableModel, attentions: tuple[AttentionId, ...]):
    sink = _Outputs()
    if not attentions:
        yield sink
        return
    with model.recording(attentions, sink):
        yield sink


def _distance(ours: Tensor, goal: Tensor) -> Tensor:
    """|ours - goal|^2 / |goal|^2."""
    goal = goal.detach().float()
    return (ours.float() - goal).square().mean() / goal.square().mean().clamp_min(1e-12)
