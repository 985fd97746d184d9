"""The demo command's run without ComfyUI: pictures, chart and table of the same model and comparison."""

import pytest
from matplotlib.image import imread

from comfy_ttt.demo import quickstart


def test_without_a_ui(tmp_path):
    picture, chart, table = quickstart.without_ui(128, tmp_path, repeats=1, steps=2)
    assert imread(picture).std() > 0.05 and imread(chart).std() > 0.05
    assert "128 x 128" in table and "softmax" in table and "TTT" in table


def test_a_size_that_cannot_be_sampled_is_refused(capsys):
    with pytest.raises(SystemExit):
        quickstart.main(["--size", "100"])
    assert "multiple of 16" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused(capsys, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        quickstart.main(["--out", str(tmp_path / "file")])
    assert "cannot be made a folder" in capsys.readouterr().err
