"""benchmarks/imagefolder.py: the images it makes, what it says without torchvision, and a short run with it."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import numpy as np
import pytest
from commands import ROOT
from image_folders import COUNT, TRAIN, Image, files, opened

SCRIPT = ROOT / "benchmarks" / "imagefolder.py"


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("imagefolder_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("count", [2 * COUNT + 3, COUNT, 7])
def test_images_are_enlarged_and_repeated(script, shared_root, tmp_path, count):
    made = script.enlarge(shared_root, tmp_path, count, quality=100, threads=2)
    assert made["images"] == "enlarged to 500x375"
    assert (made["different_images"], made["images_a_round"]) == (min(count, COUNT), count)
    paths = list((tmp_path / "train").rglob("*.JPEG"))
    assert len(paths) == count
    assert len({path.stat().st_ino for path in paths}) == min(count, COUNT)
    assert made["mean_kilobytes"] == pytest.approx(np.mean([p.stat().st_size for p in paths]) / 1000, rel=0.1)
    assert {path.parent.name for path in paths} == set(TRAIN)
    if count < COUNT:
        return
    for number, (source, _) in enumerate(files(shared_root, "train")):
        wanted = opened(source).convert("RGB").resize((500, 375), Image.Resampling.BICUBIC)
        for copy in range(count // COUNT):
            got = opened(tmp_path / "train" / source.parent.name / f"{number}-{copy}.JPEG")
            assert got.format == "JPEG"
            assert got.size == (500, 375)
            assert np.abs(np.asarray(got, dtype=float) - np.asarray(wanted)).mean() < 3


def test_images_that_are_larger_are_not_called_enlarged(script, root, tmp_path):
    opened(next(root.rglob("*.png"))).resize((400, 400)).save(root / "train" / "ant" / "large.png")
    made = script.enlarge(root, tmp_path / "out", COUNT + 1, quality=90, threads=1)
    assert made["images"] == "resized to 500x375"


@pytest.fixture
def run(script, shared_root, monkeypatch):
    """Return a function that runs the benchmark, in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--images", str(shared_root), *map(str, arguments)])
        script.main()

    return run


def test_without_torchvision_it_says_what_is_missing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SystemExit, match=r"^this benchmark needs the package torchvision: pip install torchvision"):
        run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", 1], "--rounds must be at least 2, but is 1"),
        (["--workers", -1], "--workers must be at least 0, but is -1"),
        (["--workers", 100, "--batch-size", 1000000], "choose fewer --workers or a smaller --batch-size"),
        (["--images", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_impossible_options(run, monkeypatch, capsys, arguments, message):
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))  # they are refused before it is used
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    assert message in capsys.readouterr().err


def test_a_short_run(run, tmp_path, capsys):
    pytest.importorskip("torchvision", reason="the benchmark needs torchvision, which sparsam does not")
    output = tmp_path / "deep" / "out.json"
    short = ["--workers", 1, "--batch-size", 5, "--batches", 4, "--rounds", 3, "--device", "cpu"]
    run(*short, "--output", output)
    text = capsys.readouterr().out
    assert "enlarged to 500x375" in text
    result = json.loads(output.read_text())
    assert result["data"]["images_a_round"] == 20
    assert {"torch", "processor", "device", "git"} <= result["environment"].keys()
    speeds = {name: row["rounds"] for name, row in result["rows"].items()}
    assert list(speeds) == ["sparsam", "torchvision"]
    ratios = np.divide(speeds["sparsam"], speeds["torchvision"])
    assert result["rows"]["sparsam"]["ratio"]["median"] == pytest.approx(np.median(ratios))
    assert f"{np.median(ratios):.2f} (" in text
    assert result["rows"]["torchvision"]["ratio"] == {"median": 1, "low": 1, "high": 1, "n": 3}
