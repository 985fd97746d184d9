"""Fine-tuning on the digit model: what is trained and what is not, resuming bit for bit, and every way of stopping."""

import itertools
import os

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("diffusers")

from comfy_ttt.demo.digits_training import conditioning, load_model
from comfy_ttt.ttt_core import AttentionId, TTTError, TTTSpec, TTTWeights
from comfy_ttt.ttt_core.ema import EMA
from comfy_ttt.ttt_core.examples import Example, Examples
from comfy_ttt.ttt_core.finetune import FineTune, FineTuneSettings
from comfy_ttt.ttt_core.optimizer import build_optimizer, export_state, import_state
from comfy_ttt.ttt_core.trainable import select_base_tensors

PREFIX = "model.diffusion_model."
SMALL = dict(batch=2, rate=1e-3, warmup=2)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def data():
    """Ten latents of two sizes."""
    generator = torch.Generator().manual_seed(5)
    sizes = [(8, 8)] * 6 + [(8, 12)] * 4
    return [Example(torch.randn(16, *s, generator=generator), conditioning(i)) for i, s in enumerate(sizes)]


def new_weights(model, selection="paper", std=None):
    weights = TTTWeights.new(model.geometry, TTTSpec(selection), seed=0, base_sketch=model.base_sketch)
    for layer in weights.layers.values():  # at 0.02 gradients are tiny; at 0.1 they tell
        for name in ("w1", "w2", "w3"):
            getattr(layer, name).data.mul_(5)
    return weights


def base_copy(model):
    return {n: t.clone() for n, t in model.base_tensors().items()}


def layer_tensors(weights):
    return {f"{a}.{n}": t.clone() for a, layer in weights.layers.items() for n, t in layer.state_dict().items()}


@pytest.mark.parametrize("mode", ["ttt", "attention", "full"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_every_trained_parameter_and_no_other(model, data, mode, checkpointing):
    settings = FineTuneSettings(mode=mode, checkpointing=checkpointing, teacher_attention=0.1, **SMALL)
    weights, base = new_weights(model), base_copy(model)
    tuning = FineTune(model, weights, data, settings)
    tuning._backward(0)
    expected = {f"{a.path}.ttt.{n}" for a, layer in weights.layers.items() for n, _ in layer.named_parameters()}
    expected |= set(select_base_tensors(base, mode, weights.layers))
    assert set(tuning.trained) == expected
    for name, tensor in tuning.trained.items():
        assert tensor.grad is not None and tensor.grad.abs().max() > 0, name
    assert all(p.grad is None for p in model.transformer.parameters())
    assert all(p.grad is None for layer in weights.layers.values() for p in layer.parameters())
    assert {"ttt": 0, "attention": 14, "full": len(base) - 2}[mode] == len(expected) - 21


@pytest.mark.parametrize("mode", ["ttt", "attention", "full"])
def test_a_run_trains_what_it_says_and_leaves_the_model_alone(model, data, mode):
    weights, base = new_weights(model), base_copy(model)
    before = layer_tensors(weights)
    out = FineTune(model, weights, data, FineTuneSettings(mode=mode, steps=2, ema=0.0, **SMALL)).run()
    assert all(torch.equal(t, base[n]) for n, t in model.base_tensors().items())
    assert all(p.requires_grad for p in model.transformer.parameters())
    assert all(torch.equal(t, before[n]) for n, t in layer_tensors(weights).items())
    assert all(not torch.equal(t, before[n]) for n, t in layer_tensors(out).items())
    assert set(out.base_changes) == set(select_base_tensors(base, mode, weights.layers))
    assert all(not torch.equal(t, base[n]) and t.dtype == base[n].dtype for n, t in out.base_changes.items())
    assert out.made == {"state": "fine-tuned", "mode": mode, "steps": 2, "seed": 0, "samples": 10, "from": "untrained"}


def test_it_learns(model, data):
    tuning = FineTune(model, new_weights(model), data[:1] * 4, FineTuneSettings(mode="full", steps=12, batch=4, rate=2e-3, drop=0.0))
    tuning.run()
    assert sum(tuning.losses[-3:]) < 0.8 * sum(tuning.losses[:3])


def test_a_half_precision_base_has_fp32_masters_and_gives_half_back(data):
    from comfy_ttt.demo import digits
    from comfy_ttt.ttt_core.hosts.diffusers import load_transformer
    from comfy_ttt.ttt_core.hosts.diffusers_training import DiffusersTrainable

    model = DiffusersTrainable(load_transformer(digits.MODEL, dtype=torch.bfloat16))
    tuning = FineTune(model, new_weights(model), data, FineTuneSettings(mode="attention", steps=2, batch=2, rate=1e-6))
    name = PREFIX + "joint_blocks.2.x_block.attn.proj.weight"
    before = tuning.trained[name].detach().clone()
    out = tuning.run()
    assert tuning.trained[name].dtype == torch.float32 and out.base_changes[name].dtype == torch.bfloat16
    moved = tuning.trained[name].detach() - before
    assert 0 < moved.abs().max() < 1e-5  # smaller than bf16 could hold at most of these weights
    assert torch.equal(model.base_tensors()[name].float(), before)


def test_accumulation_is_one_larger_batch(model, data):
    """Two micro-batches give the mean of their gradients."""
    whole = FineTune(model, new_weights(model), data[:4], FineTuneSettings(batch=2, accumulation=2))
    whole._backward(0)
    whole._backward(1)
    one, two = (FineTune(model, new_weights(model), data[:4], FineTuneSettings(batch=2)) for _ in range(2))
    one._backward(0)
    two._backward(1)
    for name in whole.trained:
        mean = (one.trained[name].grad + two.trained[name].grad) / 2
        assert torch.allclose(whole.trained[name].grad, mean, rtol=1e-4, atol=1e-7), name


def test_the_teacher_is_the_original_model(model, data):
    """With softmax everywhere and nothing changed yet, the distance to the teacher's velocity is zero."""
    settings = FineTuneSettings(mode="full", teacher_velocity=1.0, flow=0.0, **SMALL)
    _, parts = FineTune(model, new_weights(model, "none"), data, settings)._backward(0)
    assert parts["teacher_velocity"] == 0.0
    settings = FineTuneSettings(teacher_velocity=1.0, teacher_attention=1.0, **SMALL)
    loss, parts = FineTune(model, new_weights(model), data, settings)._backward(0)
    assert parts["teacher_velocity"] > 0 and parts["teacher_attention"] == pytest.approx(1.5, abs=0.5)
    assert loss == pytest.approx(sum(parts.values()), rel=1e-5)


# ---------------------------------------------------------------- stopping and going on


@pytest.mark.parametrize("more", [{}, {"mode": "attention", "teacher_velocity": 0.5, "accumulation": 2}], ids=["ttt", "attention"])
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(model, data, tmp_path, more):
    settings = {**SMALL, **more}
    whole = FineTune(model, new_weights(model), data, FineTuneSettings(steps=5, **settings))
    expected = whole.run()
    count, path = itertools.count(), tmp_path / "state.safetensors"
    first = FineTune(model, new_weights(model), data, FineTuneSettings(steps=9, **settings))
    first.run(path=path, cancel=lambda: next(count) == 3)
    assert first.done == 3
    torch.manual_seed(999)  # nothing may hang on the global random state
    second = FineTune(model, new_weights(model), data, FineTuneSettings(steps=5, **settings))
    second.resume(path)
    assert second.done == 3
    out = second.run(path=path)
    assert second.losses == whole.losses
    for name, tensor in whole.trained.items():
        assert torch.equal(second.trained[name], tensor), name
        assert torch.equal(second.average.average[name], whole.average.average[name]), name
    states = [export_state(t.optimizer, t.trained)[0] for t in (whole, second)]
    assert states[0].keys() == states[1].keys() and all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    assert out.made == expected.made and all(torch.equal(t, layer_tensors(expected)[n]) for n, t in layer_tensors(out).items())


def test_cancelled_before_the_first_step_can_be_resumed(model, data, tmp_path):
    path = tmp_path / "s.safetensors"
    out = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=3, **SMALL)).run(path=path, cancel=lambda: True)
    assert out.made["state"] == "untrained"
    again = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=1, **SMALL))
    again.resume(path)
    again.run()
    assert again.done == 1


def test_changed_base_tensors_that_are_not_trained_travel_along(model, data, tmp_path):
    weights, name = new_weights(model, "self:0"), PREFIX + "joint_blocks.2.x_block.mlp.fc1.weight"
    weights.base_changes[name] = model.base_tensors()[name] * 1.5
    tuning = FineTune(model, weights, data, FineTuneSettings(steps=1, **SMALL))
    assert torch.equal(tuning.run(path=tmp_path / "s.safetensors").base_changes[name], weights.base_changes[name])
    plain = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=1, **SMALL))
    plain.step()
    assert plain.losses != tuning.losses


def test_killed_while_saving_keeps_the_old_file(model, data, tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    tuning = FineTune(model, new_weights(model), data, FineTuneSettings(steps=2, **SMALL))
    tuning.step()
    tuning.save(path)
    good = path.read_bytes()
    tuning.step()

    def half_then_killed(tensors, file, metadata=None):
        with open(file, "wb") as out:
            out.write(good[: len(good) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr("comfy_ttt.ttt_core.checkpoint.save_file", half_then_killed)
    with pytest.raises(KeyboardInterrupt):
        tuning.save(path)
    assert path.read_bytes() == good and os.listdir(tmp_path) == ["state.safetensors"]


def test_a_non_finite_loss_stops_before_the_step_and_keeps_the_file(model, data, tmp_path):
    path = tmp_path / "state.safetensors"
    poisoned = [*data[:3], Example(data[3].latent, (conditioning(3)[0] + float("inf"), conditioning(3)[1]))]
    tuning = FineTune(model, new_weights(model), poisoned, FineTuneSettings(steps=50, batch=1, drop=0.0))
    with pytest.raises(TTTError, match=r"The loss became nan at step \d of 50, so the training was stopped before that step; 'state.safetensors' holds the last good state"):
        tuning.run(path=path, save_every=1)
    resumed = FineTune(model, new_weights(model), poisoned, FineTuneSettings(steps=50, batch=1, drop=0.0))
    if tuning.done:
        resumed.resume(path)
    assert resumed.done == tuning.done
    assert all(torch.isfinite(t).all() and torch.equal(t, resumed.trained[n]) for n, t in tuning.trained.items())


def test_what_a_callback_raises_passes_through_after_a_save(model, data, tmp_path):
    class Interrupted(Exception):
        pass

    def on_step(report):
        if report.step == 2:
            raise Interrupted

    tuning = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=5, **SMALL))
    with pytest.raises(Interrupted):
        tuning.run(path=tmp_path / "s.safetensors", on_step=on_step)
    again = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=5, **SMALL))
    again.resume(tmp_path / "s.safetensors")
    assert again.done == 2


def test_cancelled_inside_the_model_keeps_the_last_whole_step(model, data, tmp_path, monkeypatch):
    class Interrupted(BaseException):
        pass

    whole = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=2, **SMALL))
    whole.run()
    tuning, calls, velocity = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=9, **SMALL)), [], model.velocity

    def interrupted(*args):
        calls.append(1)
        if tuning.done == 2:
            raise Interrupted
        return velocity(*args)

    monkeypatch.setattr(model, "velocity", interrupted)
    with pytest.raises(Interrupted):
        tuning.run(path=tmp_path / "s.safetensors")
    again = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=9, **SMALL))
    again.resume(tmp_path / "s.safetensors")
    assert again.done == again.resumed == 2 and all(torch.equal(t, whole.trained[n]) for n, t in again.trained.items())


def test_the_state_file_is_plain_safetensors_and_foreign_ones_are_refused(model, data, tmp_path):
    path = tmp_path / "state.safetensors"
    tuning = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=1, **SMALL))
    tuning.run(path=path)
    with safe_open(path, framework="pt") as file:
        assert {n.split("|")[0] for n in file.keys()} == {"trained", "optimizer", "average", "run"}

    def fresh(selection="self:0", examples=data, **change):
        return FineTune(model, new_weights(model, selection), examples, FineTuneSettings(**{"steps": 3, **SMALL, **change}))

    fresh().resume(path)  # more steps are fine
    with pytest.raises(TTTError, match=r"'state.safetensors' was made with other settings \(drop 0.1, here 0.2\); use the same, turn resume off, or choose another filename\."):
        fresh(drop=0.2).resume(path)
    fresh(rate=2e-3).resume(path)  # what to do after a loss that was not finite
    other = FineTune(model, TTTWeights.new(model.geometry, TTTSpec("self:0"), seed=99, base_sketch=model.base_sketch), data, FineTuneSettings(steps=3, **SMALL))
    with pytest.raises(TTTError, match="other starting layers"):
        other.resume(path)
    with pytest.raises(TTTError, match="other TTT settings .attentions 'self:0', here 'self:1'"):
        fresh("self:1").resume(path)
    with pytest.raises(TTTError, match="other pictures"):
        fresh(examples=data[:5]).resume(path)
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:5000])
    with pytest.raises(TTTError, match="'cut.safetensors' .* truncated"):
        fresh().resume(tmp_path / "cut.safetensors")
    tuning.result().save(tmp_path / "small.safetensors")
    with pytest.raises(TTTError, match="'small.safetensors' is not a TTT training state"):
        fresh().resume(tmp_path / "small.safetensors")
    with pytest.raises(TTTError, match="does not exist"):
        fresh().resume(tmp_path / "absent.safetensors")


def test_sampling_inside_a_run_uses_the_average_and_disturbs_nothing(model, data):
    seen = []

    def look(tuning, step):
        with tuning.sampling():
            x = torch.zeros(1, 16, 8, 8)
            seen.append((step, model.velocity(x, torch.ones(1), [conditioning(1)])))

    plain = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=4, **SMALL))
    plain.run()
    watched = FineTune(model, new_weights(model, "self:0"), data, FineTuneSettings(steps=4, **SMALL))
    out = watched.run(on_sample=look, sample_every=2)
    assert [s for s, _ in seen] == [2, 4] and plain.losses == watched.losses
    with torch.no_grad(), model.running(out.layers):
        assert torch.equal(seen[1][1], model.velocity(torch.zeros(1, 16, 8, 8), torch.ones(1), [conditioning(1)]))


# ---------------------------------------------------------------- the parts


def test_every_example_is_met_once_an_epoch_in_batches_of_one_size(model, data):
    examples = Examples(data, model, batch=4, seed=1)
    assert examples.sizes == {(8, 8): 6, (8, 12): 4}
    epochs = [[examples.batch(3 * e + i) for i in range(3)] for e in range(2)]
    for epoch in epochs:
        assert all(len({e.latent.shape for e in batch}) == 1 for batch in epoch)
        met = [id(e) for batch in epoch for e in batch]
        assert len(met) == len(set(met)) == 10
    assert [id(e) for b in epochs[0] for e in b] != [id(e) for b in epochs[1] for e in b]
    assert [id(e) for e in examples.batch(1)] == [id(e) for e in epochs[0][1]]  # going back gives the same


def test_average_of_a_constant_is_that_constant_and_lags_a_change():
    value = {"a": torch.zeros(3)}
    average = EMA(value, 0.9)
    average.update(value, 1)
    assert torch.equal(average.average["a"], torch.zeros(3))
    average.update({"a": torch.ones(3)}, 1000)
    assert torch.allclose(average.average["a"], torch.full((3,), 0.1))


def test_new_layers_learn_at_their_own_rate(model, data):
    tuning = FineTune(model, new_weights(model), data, FineTuneSettings(mode="attention", rate=1e-3, new_rate_factor=10, warmup=4))
    assert [g["lr"] for g in tuning.optimizer.param_groups] == [1e-2, 1e-3]
    tuning.step()
    assert [g["lr"] for g in tuning.optimizer.param_groups] == pytest.approx([2.5e-3, 2.5e-4])


def test_eight_bit_states_survive_a_file(monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)  # torchao compiles its step, which takes a minute here
    make = lambda: [torch.nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)))]
    steps = []
    for resumed in (False, True):
        parameters = make()
        optimizer = build_optimizer("adamw8bit", [{"params": parameters, "lr": 1e-2}], 0.0, torch.device("cpu"))
        for step in range(3):
            if resumed and step == 2:
                state, numbers = export_state(optimizer, {"p": parameters[0]})
                state = {n: t.clone() for n, t in state.items()}
                optimizer = build_optimizer("adamw8bit", [{"params": parameters, "lr": 1e-2}], 0.0, torch.device("cpu"))
                import_state(optimizer, {"p": parameters[0]}, state, numbers)
            parameters[0].grad = parameters[0].detach() * (step + 1)
            optimizer.step()
        steps.append(parameters[0].detach())
    assert torch.equal(*steps)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"mode": "lora"}, "mode is 'lora'; choose one of ttt, attention, full"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; choose one of adamw, adamw8bit"),
        ({"timesteps": "cosine"}, "timesteps is 'cosine'; choose one of"),
        ({"batch": 0}, "batch is 0; choose a number from 1"),
        ({"rate": -1.0}, "rate is -1.0; choose a number"),
        ({"rate": float("nan")}, "rate is nan; choose a number"),
        ({"ema": 1.0}, "ema is 1.0; choose a number from 0 to 0.99999"),
        ({"flow": 0.0}, "all 0, so there is nothing to learn"),
        ({"rate": 0.0}, "the rate of the TTT layers is 0"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(model, data, change, words):
    with pytest.raises(TTTError) as error:
        FineTune(model, new_weights(model), data, FineTuneSettings(**change))
    assert words in str(error.value) and str(error.value).startswith("Fine-tuning: ") and str(error.value).count(". ") == 0


def test_bad_examples_are_refused(model, data):
    weights = new_weights(model)
    with pytest.raises(TTTError, match="there are no examples"):
        FineTune(model, weights, [])
    with pytest.raises(TTTError, match=r"latent 2 has shape \(4, 8, 8\); the model takes \(16, h, w\)"):
        FineTune(model, weights, [data[0], Example(torch.zeros(4, 8, 8), conditioning(0))])
    with pytest.raises(TTTError, match="latent 1 has shape .* multiples of 2"):
        FineTune(model, weights, [Example(torch.zeros(16, 7, 8), conditioning(0))])
    with pytest.raises(TTTError, match="latent 1 holds NaN or infinity"):
        FineTune(model, weights, [Example(torch.full((16, 8, 8), float("nan")), conditioning(0))])
    with pytest.raises(TTTError, match="nothing to train"):
        FineTune(model, new_weights(model, "none"), data)
    with pytest.raises(TTTError, match="joint:7"):
        weights.layers[AttentionId("joint", 7)] = next(iter(weights.layers.values()))
        FineTune(model, weights, data).step()


def test_eight_bit_without_a_library_is_one_sentence(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(TTTError, match="8-bit AdamW is not available here .* install bitsandbytes or torchao, or choose optimizer 'adamw'"):
        build_optimizer("adamw8bit", [], 0.0, torch.device("cpu"))
