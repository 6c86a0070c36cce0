"""Fixtures that several test files share. conftest.py makes them known."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image folder that a test may change."""
    from image_folders import make_folder

    return make_folder(tmp_path / "images")


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder that no test changes."""
    from image_folders import make_folder

    return make_folder(tmp_path_factory.mktemp("shared") / "images")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run of SGD and one of SAM, an epoch each."""
    from trained_runs import train_digits

    place = tmp_path_factory.mktemp("runs")
    for method in ("sgd", "sam"):
        train_digits(place / method, method)
    return place


@pytest.fixture(scope="session")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs in runs/PLACE, really trained, with all that the commands measure of them and draw in runs/analysis."""
    from report_runs import PLACE, analysed_runs

    place = tmp_path_factory.mktemp("analysed") / "runs"
    return analysed_runs(place / PLACE, place / "analysis")
