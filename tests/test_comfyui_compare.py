"""TTT Compare in a real ComfyUI: what it samples, that its factors are true, several arms and sizes, compiled models."""

import json
import time

import pytest
import torch
from comfy_helpers import conditioning, empty_latent, load, run_node, sample, trained
from tiny import write_checkpoint
from tiny_vae import write_vae

from comfy_ttt.ttt_core import TTTError, TTTSpec

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def base(comfyui, tmp_path_factory):
    path = tmp_path_factory.mktemp("compare") / "tiny.safetensors"
    write_checkpoint(path)
    return load(path)


@pytest.fixture(scope="module")
def ttt(base):
    from comfy_ttt.ttt_core.hosts import comfy as host

    model = host.linearize(base, TTTSpec("paper"))
    trained(host.attached(model).weights)
    return model


def compare(a, b, **changes):
    from comfy_ttt.nodes.compare import TTTCompare

    values = dict(
        model_a=a, model_b=b, positive=conditioning(1), negative=conditioning(2, tokens=5), latent=empty_latent(), label_a="softmax",
        label_b="TTT", seed=0, steps=3, cfg=2.0, sampler_name="euler", scheduler="simple", repeats=2, warmup=1,
    )  # fmt: skip
    names = [o.id for o in TTTCompare.define_schema().outputs]
    return dict(zip(names, run_node(TTTCompare, **values | changes), strict=True))


def slowed(model, times):
    """A copy that does the work of every call several times over; sleeping would be paid back by the scheduler of a busy machine."""
    import comfy.patcher_extension

    def wrapper(executor, *args, **kwargs):
        return [executor(*args, **kwargs) for _ in range(times)][-1]

    model = model.clone()
    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "test_slowed", wrapper)
    return model


def test_both_arms_are_what_ksampler_samples(base, ttt):
    out = compare(base, ttt)
    assert torch.equal(out["latent_a"]["samples"], sample(base, steps=3, cfg=2.0))
    assert torch.equal(out["latent_b"]["samples"], sample(ttt, steps=3, cfg=2.0))
    for name in ("chart", "side_by_side", "difference"):
        assert out[name].dim() == 4 and out[name].shape[-1] == 3 and 0 <= float(out[name].min()) and float(out[name].max()) <= 1
    assert out["speedup"] == pytest.approx(out["seconds_a"] / out["seconds_b"]) and out["break_even"] == 0
    for words in ("softmax", "128 x 96", "48 image tokens", "softmax attention: ", "numbers: "):
        assert words in out["table"]


def test_a_model_against_itself_is_one_within_the_printed_range(base):
    out = compare(base, base, label_b="softmax", repeats=7, steps=2, cfg=1.0)
    assert "no difference beyond the spread" in out["table"] and "softmax (b)" in out["table"]


def test_the_reason_for_a_small_gain_is_counted_and_names_the_backend(base, ttt):
    from comfy_ttt.ttt_core.hosts.comfy_sampling import _reason

    said = _reason([base, ttt], ["softmax", "TTT"], 48, conditioning(1))
    assert "TTT: By counted operations, at 48 image tokens" in said and "TTT runs in plain PyTorch" in said
    assert _reason([ttt, base], ["TTT", "softmax"], 48, conditioning(1)) == ""


def test_a_slowed_copy_shows_its_factor(base, monkeypatch):
    """Timed by the CPU seconds of one thread: on a machine that others use too, the clock on the wall proves nothing."""
    from comfy_ttt.ttt_core import compare as core
    from comfy_ttt.ttt_core.hosts.comfy_sampling import Settings, compare_models

    monkeypatch.setattr(core.time, "perf_counter", time.thread_time)

    models = [("plain", base), ("slowed", slowed(base, 3))]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        series = compare_models(
            models, Settings(0, 4, 1.0, "euler", "simple"), conditioning(1), conditioning(2), empty_latent(256, 256), repeats=3
        )
    finally:
        torch.set_num_threads(threads)
    factor = series.last.arms[1].per_step / series.last.arms[0].per_step
    assert 2.4 < factor < 3.6 and series.last.speedup < 0.6 and "slower" in series.last.verdict()


def test_four_arms_and_several_sizes(base, ttt):
    out = compare(base, ttt, model_c=base, model_d=ttt, label_c="again", sizes="64 96x128", steps=2, repeats=1, cfg=1.0)
    assert out["latent_c"]["samples"].shape[-2:] == (16, 12) and torch.equal(out["latent_c"]["samples"], out["latent_a"]["samples"])
    assert torch.equal(out["latent_d"]["samples"], out["latent_b"]["samples"])
    assert "64 x 64" in out["table"] and "96 x 128" in out["table"]
    for label in ("TTT", "again", "fourth"):  # which of its sentences comes is up to the machine
        assert any(f"{label} {words}" in out["table"] for words in ("breaks even", "is at least as fast", "is not faster", "against softmax:"))
    assert torch.equal(out["latent_b"]["samples"], sample(ttt, width=96, height=128))


def test_the_same_bookkeeping_in_both_arms_changes_neither(base):
    """Two TTT models that replace different blocks: each gets empty replacements for the other's blocks."""
    from comfy_ttt.ttt_core.hosts import comfy as host

    models = []
    for attentions in ("self:0", "joint:2"):
        model = host.linearize(base, TTTSpec(attentions))
        trained(host.attached(model).weights)
        models.append(model)
    out = compare(*models, steps=2, repeats=1, warmup=0, cfg=1.0)
    assert torch.equal(out["latent_a"]["samples"], sample(models[0])) and torch.equal(out["latent_b"]["samples"], sample(models[1]))
    assert not torch.equal(out["latent_a"]["samples"], out["latent_b"]["samples"])


def test_a_missing_arm_blocks_what_hangs_on_it(base, ttt):
    assert type(compare(base, ttt, steps=1, repeats=1, warmup=0)["latent_c"]).__name__ == "ExecutionBlocker"


def test_numbers_are_written(base, ttt):
    from comfy_ttt.ttt_core.hosts.comfy_sampling import results_folder

    before = set(results_folder().glob("*"))
    compare(base, ttt, steps=1, repeats=1, warmup=0)
    new = sorted(set(results_folder().glob("*")) - before)
    assert [p.suffix for p in new] == [".csv", ".json"]
    assert json.loads(new[1].read_text())["sizes"][0]["arms"][1]["label"] == "TTT"


def test_with_a_vae_the_pictures_are_decoded(base, ttt):
    from pathlib import Path

    import folder_paths
    import nodes

    write_vae(Path(folder_paths.get_folder_paths("vae_approx")[0]))
    vae = nodes.VAELoader().load_vae("taesd3")[0]
    out = compare(base, ttt, vae=vae, steps=1, repeats=1, warmup=0, latent=empty_latent(320, 256))
    assert out["side_by_side"].shape[2] == 2 * 320 + 8 and out["side_by_side"].shape[1] > 256


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sizes": "500"}, "not a multiple of 16"),
        ({"sizes": "1024"}, "position table, which ends at 768"),
        ({"sizes": "128", "latent": {"samples": torch.randn(1, 16, 8, 8)}}, "needs an empty latent"),
        ({"repeats": 0}, "at least 1 step and 1 repeat"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(base, ttt, changes, says):
    with pytest.raises(TTTError, match=says):
        compare(base, ttt, **changes)


def test_two_compiled_arms_do_not_answer_for_each_other(base, ttt):
    """Core's compile node drops the guards on transformer_options: without a reset TTT answers with softmax's code."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    compiled = []
    for model in (base, ttt):
        model = model.clone()
        set_torch_compile_wrapper(model, "eager", options={"guard_filter_fn": _drop_transformer_options})
        compiled.append(model)
    out = compare(*compiled, steps=1, cfg=1.0)
    torch._dynamo.reset()
    plain = compare(base, ttt, steps=1, cfg=1.0)
    for name in ("latent_a", "latent_b"):
        assert torch.allclose(out[name]["samples"], plain[name]["samples"], atol=1e-4), name
    assert not torch.allclose(plain["latent_a"]["samples"], plain["latent_b"]["samples"], atol=1e-2)
    assert "thrown away and rebuilt" in out["table"] and "thrown away" not in plain["table"]


def _drop_transformer_options(guards):
    return ["transformer_options" not in guard.name for guard in guards]


def test_it_can_be_cancelled(base, ttt):
    import comfy.model_management as management

    management.interrupt_current_processing()
    with pytest.raises(management.InterruptProcessingException):
        compare(base, ttt)
    management.interrupt_current_processing(False)
