"""Inspection: the numbers against direct computation, and the whole on a tiny model through diffusers."""

import pytest
import torch

from comfy_ttt.ttt_core import TTTAttention, TTTError, TTTSpec
from comfy_ttt.ttt_core.geometry import AttentionId
from comfy_ttt.ttt_core.inspect import InspectSettings, inspect_model, key_shift, planned_calls, softmax_row, value_influence
from comfy_ttt.ttt_core.inspect_plots import inspection_chart, inspection_maps
from comfy_ttt.ttt_core.trainable import Record

HEADS, DIM, GRID, TEXT = 2, 8, (3, 5), 4


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(3)
    return [torch.randn(1, TEXT + 15, HEADS * DIM, generator=g) for _ in range(3)]


def test_key_shift_of_equal_keys_is_one_and_of_opposite_keys_zero():
    one = torch.randn(1, 1, HEADS * DIM)
    assert key_shift(one.expand(1, 6, -1), HEADS) == pytest.approx(1, abs=1e-5)
    assert key_shift(torch.cat([one, -one], 1), HEADS) == pytest.approx(0, abs=1e-6)


def test_key_shift_by_hand():
    k = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])  # mean (1.5, 2): 2.5; mean length 3.5
    assert key_shift(k, 1) == pytest.approx(2.5 / 3.5)


def test_softmax_row_is_the_jacobian_of_attention(tensors):
    q, k, v = tensors
    v = v.clone().requires_grad_(True)

    def row_of(v):
        by_head = [x.unflatten(2, (HEADS, DIM)).transpose(1, 2) for x in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*by_head).transpose(1, 2).flatten(2)[0, 7]

    jacobian = torch.autograd.functional.jacobian(row_of, v)[:, 0]  # [C, N, C]
    sizes = jacobian.square().sum((0, 2)).sqrt()
    ours = softmax_row(q, k, HEADS, 7)
    assert torch.allclose(ours / ours.sum(), sizes / sizes.sum(), atol=1e-5)


def test_value_influence_estimates_the_jacobian_of_the_ttt_layer(tensors):
    q, k, v = tensors
    layer = TTTAttention(HEADS, DIM, TTTSpec("all"), seed=0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    record = Record(AttentionId("joint", 0), q, k, v, v, GRID, TEXT)
    jacobian = torch.autograd.functional.jacobian(lambda v: layer(q, k, v, grid=GRID, text_tokens=TEXT, backend="torch")[0, 9], v)[:, 0]
    sizes = jacobian.square().sum((0, 2)).sqrt()
    few, many = (value_influence(layer, record, 9, probes=n) for n in (16, 2000))
    assert torch.allclose(many, sizes, rtol=0.05)
    assert torch.allclose(few, sizes, rtol=0.6) and few.shape == (TEXT + 15,)


class _Fake:
    """What inspect_model asks of a model, with two attentions, one of which does nothing for the prediction."""

    latent_channels, flow_shift, device = 16, 3.0, torch.device("cpu")

    def __init__(self):
        from comfy_ttt.ttt_core.geometry import Geometry

        self.geometry, self.layers, self.sink, self.calls = Geometry(2, (), HEADS * DIM, HEADS, DIM), {}, None, 0

    def velocity(self, x, sigma, conditionings):
        self.calls += 1
        tokens = x.flatten(2).transpose(1, 2)[:, :15].repeat(1, 2, 1)[:, : TEXT + 15]  # [1, 19, 16]
        total = 0
        for attention in self.geometry.attentions:
            q, k, v = tokens, tokens + attention.block, tokens * 2
            layer = self.layers.get(attention)
            out = layer(q, k, v, grid=GRID, text_tokens=TEXT) if layer else v
            if self.sink:
                self.sink(Record(attention, q, k, v, out, GRID, TEXT))
            total = total + out.mean() * attention.block
        return x + total

    def _with(self, **values):
        from contextlib import contextmanager

        @contextmanager
        def change():
            before = {k: getattr(self, k) for k in values}
            vars(self).update(values)
            yield
            vars(self).update(before)

        return change()

    def running(self, layers):
        return self._with(layers=layers)

    def recording(self, attentions, sink):
        return self._with(sink=sink)


def weights_for(model):
    from types import SimpleNamespace

    layers = {a: TTTAttention(HEADS, DIM, TTTSpec("all"), seed=1) for a in model.geometry.attentions}
    return SimpleNamespace(layers=layers)


@pytest.mark.parametrize("settings", [InspectSettings(), InspectSettings(at=0.0), InspectSettings(steps=3, at=1.0, importance=False)])
def test_the_cost_is_what_was_planned_and_the_rows_are_right(settings):
    model = _Fake()
    weights = weights_for(model)
    told = []
    found = inspect_model(model, weights, None, (6, 10), settings, lambda: told.append(1))
    assert model.calls == found.calls == len(told) == planned_calls(weights, settings)
    assert [r.attention.block for r in found.rows] == [0, 1]
    assert found.rows[1].shift > found.rows[0].shift  # its keys were shifted by one
    assert all(r.fit is not None for r in found.rows)
    if settings.importance:
        assert found.rows[0].change == 0 and found.rows[1].change > 0  # block 0 has no part in the prediction
        assert found.text().index("joint:1") < found.text().index("joint:0")
    for m in found.maps:
        assert m.softmax.shape == GRID and float(m.softmax.sum()) == pytest.approx(1, abs=1e-5) and float(m.ttt.sum()) == pytest.approx(1, abs=1e-4)
        assert m.token == (1, 2) and 0 <= m.softmax_text < 1
    for picture in (inspection_chart(found), inspection_maps(found)):
        assert picture.ndim == 3 and picture.std() > 0.01


def test_a_plain_model_is_inspected_without_layers():
    found = inspect_model(_Fake(), None, None, (6, 10), InspectSettings(maps="joint:1"))
    assert [str(m.attention) for m in found.maps] == ["joint:1"] and found.maps[0].ttt is None
    assert all(r.fit is None and r.change is None for r in found.rows)
    assert inspection_maps(found).std() > 0.01 and inspection_chart(found).std() > 0.01


@pytest.mark.parametrize(("settings", "says"), [(InspectSettings(at=1.5), "from 0 to 1"), (InspectSettings(maps="joint:9"), "blocks 0 to 1"), (InspectSettings(steps=0), "at least 1")])
def test_bad_settings_are_refused(settings, says):
    with pytest.raises(TTTError, match=says):
        inspect_model(_Fake(), None, None, (6, 10), settings)


def test_reach_is_the_mean_distance():
    from comfy_ttt.ttt_core.inspect import AttentionMap

    field = torch.zeros(3, 5)
    field[1, 2], field[1, 4] = 0.5, 0.5
    assert AttentionMap(AttentionId("self", 0), (1, 2), field, None, 0.0).reach(field) == pytest.approx(1.0)
