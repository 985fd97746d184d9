"""The digit demo: prompts, pictures and latents, and the shipped model's own word for how it was made."""

import pytest
import torch
from safetensors import safe_open

from comfy_ttt.demo import digits
from comfy_ttt.ttt_core.geometry import read_geometry
from comfy_ttt.ttt_core.weights import read_tensor_shapes


@pytest.mark.parametrize("text, digit", [("7", 7), (" 0\n", 0), ("", None), ("  ", None)])
def test_prompt(text, digit):
    assert digits.parse_prompt(text) == digit
    context, pooled = digits.encode_prompt(text)
    assert context.shape == (1, 8, 64) and pooled.shape == (1, 64)
    assert bool(context.any()) == (digit is not None)


@pytest.mark.parametrize("text", ["cat", "10", "-1", "7.", "\u0663", "²"])
def test_bad_prompt_is_one_clear_sentence(text):
    with pytest.raises(ValueError, match="must be a digit 0-9 or empty, got"):
        digits.encode_prompt(text)


def test_digits_are_orthogonal():
    pooled = digits.encode_digits(list(range(10)))[1]
    assert torch.equal(pooled @ pooled.T, 64 * torch.eye(10))


@pytest.mark.parametrize("height, width", [(4, 4), (64, 64), (96, 128), (100, 172)])
def test_picture_and_latent_are_exact_inverses(height, width):
    levels = torch.randint(0, 256, (2, height, width, 1), generator=torch.Generator().manual_seed(0)) / 255
    picture = levels.expand(-1, -1, -1, 3)
    samples = digits.picture_to_samples(picture)
    assert samples.shape == (2, 16, height // 4, width // 4)
    back = digits.samples_to_picture(samples)
    assert back.shape == picture.shape
    assert torch.equal((back * 255).round(), picture * 255)
    assert (back - picture).abs().max() < 1e-6


def test_latent_channels_are_the_pixels_of_a_4x4_square():
    picture = torch.zeros(1, 8, 8, 3)
    picture[0, 4 + 1, 2] = 1.0  # row 1, column 2 of the lower left square
    latent = digits.samples_to_model(digits.picture_to_samples(picture))
    assert latent[0, 4 * 1 + 2, 1, 0].item() == pytest.approx(1.0, abs=1e-6)
    assert (latent > 0).sum() == 1


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="multiples of 4, got 30 x 64"):
        digits.picture_to_samples(torch.zeros(1, 64, 30, 3))
    with pytest.raises(ValueError, match="16, h, w"):
        digits.samples_to_picture(torch.zeros(1, 4, 8, 8))


def test_sampling_schedule_is_sd3s():
    sigmas = digits.flow_sigmas(4)
    assert sigmas.tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0])


def test_recogniser_reads_the_hold_out():
    pytest.importorskip("sklearn")
    cells, labels = digits.load_digits(hold_out=True)
    assert len(cells) == 180 and cells.min() == 0 and cells.max() == 1
    picture = digits.draw(cells, 96, 128)[:, 0, :, :, None].expand(-1, -1, -1, 3)
    assert (digits.recogniser()(picture) == labels).float().mean() > 0.93


def test_shipped_model_says_how_it_was_made():
    shapes = read_tensor_shapes(digits.MODEL)
    geometry = read_geometry(shapes)
    assert (geometry.blocks, geometry.self_blocks, geometry.heads, geometry.head_dim) == (3, (0, 1), 3, 64)
    with safe_open(digits.MODEL, framework="pt") as file:
        facts = file.metadata()
    assert int(facts["steps"]) > 0 and 0 < float(facts["hold_out_flow_loss"]) < 0.25
    assert "load_digits" in facts["data"]


def test_training_script_runs(tmp_path):
    pytest.importorskip("diffusers")
    pytest.importorskip("sklearn")
    from comfy_ttt.demo import train_digits

    cells, labels = digits.load_digits(hold_out=False)
    model = train_digits.build(seed=0)
    generator = torch.Generator().manual_seed(0)
    loss = train_digits.flow_loss(model, cells[:2], labels[:2], (16, 20), generator)
    loss.backward()
    assert 1.0 < loss.item() < 3.0  # an output of zero: E|noise - picture|^2
    train_digits.save(model, tmp_path / "model.safetensors", {"steps": 0})
    assert set(read_tensor_shapes(tmp_path / "model.safetensors")) == set(read_tensor_shapes(digits.MODEL))
