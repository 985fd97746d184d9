"""Calibration on the digit model: it fits, leaves everything else alone, stops when told and refuses bad settings."""

import itertools

import pytest
import torch

pytest.importorskip("diffusers")

from comfy_ttt.demo.digits_training import load_model, prompts
from comfy_ttt.ttt_core import AttentionId, TTTError, TTTSpec, TTTWeights
from comfy_ttt.ttt_core.calibrate import CalibrationSettings, calibrate
from comfy_ttt.ttt_core.flow import draw_sigmas
from comfy_ttt.ttt_core.trajectory import euler, flow_sigmas

QUICK = dict(samples=16, sampling_steps=4, batch=4, cfg=3.0)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return load_model()


def new_weights(model, selection="paper", **options):
    return TTTWeights.new(model.geometry, TTTSpec(selection, **options), seed=0, base_sketch=model.base_sketch)


def all_tensors(weights):
    return {f"{a}.{n}": t.clone() for a, layer in weights.layers.items() for n, t in layer.state_dict().items()}


def test_it_fits_softmax_and_changes_nothing_else(model, tmp_path):
    weights = new_weights(model, "self:0 joint:2")
    before, base = all_tensors(weights), {n: t.clone() for n, t in model.base_tensors().items()}
    seen = []
    out, report = calibrate(model, weights, prompts(), [(12, 16), (8, 8)], CalibrationSettings(steps=70, **{**QUICK, "samples": 48}), progress=seen.append)
    for attention, (old, new) in report.fit.items():
        assert old == pytest.approx(1.0, abs=0.02), attention  # an untrained layer puts out next to nothing
        assert new < 0.5, attention
    assert report.losses[-1] < 0.6 * report.losses[0] and len(report.losses) == 70
    assert all(torch.equal(t, before[n]) for n, t in all_tensors(weights).items())
    assert all(torch.equal(t, base[n]) for n, t in model.base_tensors().items())
    assert out.made == {"state": "calibrated", "steps": 70, "samples": 48, "seed": 0}
    assert seen[-1].done == seen[-1].total and seen[-1].seconds_left == pytest.approx(0, abs=1e-6)
    assert "fitting joint:2" in seen[-1].stage and seen[-1].loss is not None
    again = TTTWeights.load(out.save(tmp_path / "ttt.safetensors"))
    assert again.made["state"] == "calibrated" and all(torch.equal(t, all_tensors(out)[n]) for n, t in all_tensors(again).items())


def test_a_small_budget_takes_turns_with_the_same_result(model):
    weights = new_weights(model)
    one, whole = calibrate(model, weights, prompts(), [(8, 8)], CalibrationSettings(steps=2, memory_gb=4, **QUICK))
    two, parts = calibrate(model, weights, prompts(), [(8, 8)], CalibrationSettings(steps=2, memory_gb=0.02, **QUICK))
    assert whole.passes == 1 and parts.passes > 1
    # Equal to rounding: a watched attention is computed in another order of its tokens.
    assert all((t - all_tensors(two)[n]).abs().max() < 1e-3 for n, t in all_tensors(one).items())


def test_every_kind_of_layer_can_be_calibrated(model):
    for options in ({"inner_model": "mlp2"}, {"locality": "none"}, {"key_norm": "center"}):
        weights = new_weights(model, "self:0", **options)
        _, report = calibrate(model, weights, prompts(), [(8, 8)], CalibrationSettings(steps=25, **QUICK))
        old, new = report.fit[AttentionId("self", 0)]
        assert new < 0.9 * old, options


def test_cancel_keeps_what_is_fitted(model):
    weights, calls = new_weights(model), itertools.count()
    settings = CalibrationSettings(steps=5, **QUICK)
    out, report = calibrate(model, weights, prompts(), [(8, 8)], settings, cancel=lambda: next(calls) >= 4 * (4 + 1) + 5 + 2)  # recording, the first layer, part of the second
    assert report.cancelled and "CANCELLED" in report.text()
    assert report.fitted == (AttentionId("self", 0),)
    assert all(torch.equal(t, all_tensors(weights)[n]) for n, t in all_tensors(out).items() if not n.startswith("self:0"))
    assert not torch.equal(out.layers[AttentionId("self", 0)].w1, weights.layers[AttentionId("self", 0)].w1)
    assert out.made["attentions"] == "self:0"
    out, report = calibrate(model, weights, prompts(), [(8, 8)], settings, cancel=lambda: True)
    assert report.cancelled and not report.fit and out.made["state"] == "untrained"


def test_it_runs_inside_inference_mode(model):
    with torch.inference_mode():
        inside = [tuple(t.clone() for t in p) for p in prompts()[:2]]
        out, report = calibrate(model, new_weights(model, "self:0"), inside, [(8, 8)], CalibrationSettings(steps=3, **QUICK))
    assert report.fit and not any(t.is_inference() for t in all_tensors(out).values())


@pytest.mark.parametrize("change", [{"steps": 0}, {"rate": 5.0}, {"samples": 2}, {"memory_gb": 0}, {"cfg": 0.5}, {"batch": 0}, {"rate": float("nan")}])
def test_bad_settings_are_refused_in_one_sentence(model, change):
    (name,) = change
    with pytest.raises(TTTError, match=rf"^Calibration: {name} is .*; choose a number from .*\.$"):
        calibrate(model, new_weights(model), prompts(), [(8, 8)], CalibrationSettings(**change))


def test_bad_inputs_are_refused(model):
    with pytest.raises(TTTError, match="no attention is selected"):
        calibrate(model, new_weights(model, "none"), prompts(), [(8, 8)])
    with pytest.raises(TTTError, match="no conditioning"):
        calibrate(model, new_weights(model), [], [(8, 8)])
    with pytest.raises(TTTError, match="no size"):
        calibrate(model, new_weights(model), prompts(), [])
    with pytest.raises(TTTError, match="7 x 8 cannot be sampled.*multiples of 2"):
        calibrate(model, new_weights(model), prompts(), [(7, 8)])
    with pytest.raises(TTTError, match=r"hold \d samples .* set memory_gb to 0\.\d or more"):
        calibrate(model, new_weights(model), prompts(), [(96, 96)], CalibrationSettings(memory_gb=0.02))


def test_non_finite_values_stop_it_and_are_located(model):
    weights = new_weights(model, "self:1")
    bad = [(c + float("nan"), p) for c, p in prompts()]
    with pytest.raises(TTTError, match=r"NaN or infinity in attention self:1 at sampling step 1 of 4, before anything was fitted"):
        calibrate(model, weights, bad, [(8, 8)], CalibrationSettings(steps=2, cfg=1.0, samples=16, sampling_steps=4))
    with torch.no_grad():
        weights.layers[AttentionId("self", 1)].w1.fill_(float("inf"))
    with pytest.raises(TTTError, match=r"Calibration of attention self:1 gave nan at step 1 of 2; nothing was changed"):
        calibrate(model, weights, prompts(), [(8, 8)], CalibrationSettings(steps=2, **QUICK))


def test_the_trajectory_is_the_samplers(model):
    """The runs that are recorded are those of plain Euler sampling with guidance."""
    from comfy_ttt.demo import digits

    noise = torch.randn((2, 16, 16, 16), generator=torch.Generator().manual_seed(3))
    three, empty = (tuple(t[0] for t in digits.encode_digits([d])) for d in (3, None))
    *_, (step, ours, _) = euler(model, noise, [three] * 2, [empty] * 2, steps=3, cfg=3.0)
    velocity = lambda x, t, context, pooled: model.transformer(x, context, pooled, t).sample
    theirs = digits.sample(velocity, [3, 3], 64, 64, steps=3, cfg=3.0, seed=3)
    assert step == 3 and torch.equal(flow_sigmas(3, 3.0), digits.flow_sigmas(3))
    assert (digits.model_to_samples(ours) - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("kind, middle", [("logit_normal", 0.75), ("uniform", 0.75), ("mode", 0.75)])
def test_noise_levels_follow_the_models_shift(kind, middle):
    sigma = draw_sigmas(20_000, kind, 3.0, torch.Generator().manual_seed(0))
    assert 0 < sigma.min() and sigma.max() < 1
    assert sigma.median().item() == pytest.approx(middle, abs=0.02)  # 3 u / (1 + 2 u) at u = 1/2
