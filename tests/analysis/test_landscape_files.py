"""Landscapes in files: interrupted ones go on bit for bit, and other settings are refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cases import task
from sparsam.analysis.landscape import Landscape, loss_landscape


def stopping_at(count, error=KeyboardInterrupt):
    def progress(finished, total):
        assert total == 25
        if finished == count:
            raise error

    return progress


@pytest.mark.parametrize("stops", [(1,), (7, 24), (10, 11, 20)])
def test_an_interrupted_grid_goes_on_bit_for_bit(tmp_path, stops):
    t = task(torch.float32)
    whole = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=5)
    file, calls = tmp_path / "some" / "landscape.npz", []

    def loss_fn(outputs, targets):
        calls.append(len(targets))
        return F.cross_entropy(outputs, targets)

    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            loss_landscape(t.model, loss_fn, (t.x, t.y), points=5, file=file, progress=stopping_at(stop))
        kept = Landscape.load(file)
        assert (kept.finished, kept.complete, kept.gaps) == (stop, False, 0)
        assert (kept.losses.ravel()[:stop] == whole.losses.ravel()[:stop]).all()
        assert np.isnan(kept.losses.ravel()[stop:]).all()
    found = loss_landscape(t.model, loss_fn, (t.x, t.y), points=5, file=file)
    assert (found.losses == whole.losses).all()
    assert len(calls) == 25 + len(stops) + 1  # no point twice; the centre once each time
    assert [f.name for f in file.parent.iterdir()] == ["landscape.npz"]
    again = loss_landscape(t.model, loss_fn, (t.x, t.y), points=5, file=file)
    assert (again.losses == whole.losses).all()
    assert len(calls) == 25 + len(stops) + 2


def test_what_is_finished_is_kept_after_an_error_too(tmp_path):
    t, calls = task(), []

    def loss_fn(outputs, targets):
        calls.append(0)
        if len(calls) == 1 + 9:
            raise ZeroDivisionError
        return F.cross_entropy(outputs, targets)

    with pytest.raises(ZeroDivisionError):
        loss_landscape(t.model, loss_fn, (t.x, t.y), points=5, file=tmp_path / "l.npz")
    assert Landscape.load(tmp_path / "l.npz").finished == 8


def test_points_are_saved_on_the_way(tmp_path):
    t, file, seen = task(), tmp_path / "l.npz", []

    def progress(finished, total):
        seen.append(Landscape.load(file).finished if file.exists() else 0)

    loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=5, file=file, save_every=0, progress=progress)
    assert seen == [0, *range(25)]  # each time what the point before had left


def test_another_setting_does_not_mix(tmp_path):
    t, file = task(), tmp_path / "l.npz"

    def landscape(**options):
        given = {"points": 5, "file": file, **options}
        return loss_landscape(given.pop("model", t.model), F.cross_entropy, given.pop("data", (t.x, t.y)), **given)

    landscape()
    before = file.read_bytes()
    for options, difference in [
        ({"points": 6}, r"points 5, now 6\."),
        ({"range": 2}, r"range 1.0, now 2.0\."),
        ({"seed": 1}, r"seed 0, now 1\."),
        ({"dimensions": 1}, r"dimensions 2, now 1\."),
        ({"precision": "bf16"}, r"precision fp32, now bf16\."),
        ({"data": (t.x[:9], t.y[:9])}, r"samples 24, now 9\."),
        ({"data": (t.x + 1, t.y)}, r"loss at the centre .*, now .* \(other data, or another loss function\)"),
        ({"model": task(seed=1).model}, r"weights \w{16}, now \w{16}\."),
        ({"points": 4, "seed": 3}, r"points 5, now 4; seed 0, now 3\."),
    ]:
        with pytest.raises(ValueError, match=rf"{re.escape(str(file))} holds .* cannot be continued: {difference}"):
            landscape(**options)
    assert file.read_bytes() == before


def test_a_file_holds_the_whole_landscape(tmp_path):
    t = task()
    about = {"label": "SAM", "seed": 3}
    found = loss_landscape(t.model, F.cross_entropy, (t.x, t.y), points=3, file=tmp_path / "l.npz", about=about)
    read = Landscape.load(tmp_path / "l.npz")
    for key, value in vars(found).items():
        assert np.array_equal(value, getattr(read, key)), key
    with np.load(tmp_path / "l.npz") as arrays:  # numbers and text, no pickles
        assert set(arrays) == {"losses", "axis", "centre", "finished", "path", "words"}
        assert json.loads(str(arrays["words"]))["settings"]["samples"] == 24
    (tmp_path / "l.npz").write_bytes((tmp_path / "l.npz").read_bytes()[:99])
    with pytest.raises(ValueError, match=r"l\.npz cannot be read as a landscape"):
        Landscape.load(tmp_path / "l.npz")
    with pytest.raises(ValueError, match="there is no landscape at nowhere"):
        Landscape.load("nowhere")
