"""TTT Inspect in a real ComfyUI: its numbers, its pictures, and that nothing is changed by looking."""

import pytest
import torch
from comfy_helpers import conditioning, empty_latent, load, run_node, sample, trained
from tiny import write_checkpoint

from comfy_ttt.ttt_core import TTTSpec

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def base(comfyui, tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect") / "tiny.safetensors"
    write_checkpoint(path)
    return load(path)


def inspect(model, **changes):
    from comfy_ttt.nodes.inspect import TTTInspect

    return run_node(TTTInspect, model=model, positive=conditioning(1), latent=empty_latent(), **{"steps": 2} | changes)


def test_a_ttt_model_is_inspected_and_nothing_changes(base):
    from comfy_ttt.ttt_core.hosts import comfy as host

    model = host.linearize(base, TTTSpec("paper"))
    trained(host.attached(model).weights)
    plain, ttt = sample(base), sample(model)
    chart, maps, report = inspect(model)
    assert torch.equal(sample(base), plain) and torch.equal(sample(model), ttt)
    for picture in (chart, maps):
        assert picture.dim() == 4 and picture.shape[-1] == 3 and float(picture.std()) > 0.01
    rows = {line.split()[0]: line.split()[1:] for line in report.splitlines() if line.startswith(("self:", "joint:"))}
    assert set(rows) == {"self:0", "self:1", "joint:0", "joint:1", "joint:2"}
    replaced = {str(a) for a in host.attached(model).weights.layers}
    for name, (shift, fit, change) in rows.items():
        assert 0 < float(shift) < 1 and (fit != "-") == (change != "-") == (name in replaced)
    assert "grid 8 x 6 tokens" in report and "reach of self:0" in report and "cost: 6 model calls" in report


def test_what_it_calls_fit_is_what_calibration_measures(base):
    """The same layer judged by both: a layer that is exactly zero has an error of exactly 100 %."""
    from comfy_ttt.ttt_core.hosts import comfy as host

    model = host.linearize(base, TTTSpec("self"))
    with torch.no_grad():
        for layer in host.attached(model).weights.layers.values():
            layer.w3.zero_(), layer.w1.zero_()
    _, _, report = inspect(model)
    assert report.count("100.0%") == 2


def test_a_plain_model_has_no_ttt_columns(base):
    _, _, report = inspect(base, maps="joint:0 self:1")
    assert "%" not in report and "reach of joint:0: softmax" in report and "TTT 0" not in report


def test_it_can_be_cancelled(base):
    import comfy.model_management as management

    management.interrupt_current_processing()
    with pytest.raises(management.InterruptProcessingException):
        inspect(base)
    management.interrupt_current_processing(False)
