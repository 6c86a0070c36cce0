"""What a run notes of where it ran."""

from __future__ import annotations

import subprocess

import pytest

from sparsam.training import environment


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a checkout of its own; the working directory is elsewhere."""
    package = tmp_path / "checkout" / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    checkout = package.parents[1]
    (checkout / "README.md").write_text("one")
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "all")
    monkeypatch.setattr(environment, "PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    return package


def git(folder, *arguments):
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_package(package):
    assert environment.git_commit() == git(package, "rev-parse", "--short=12", "HEAD")


@pytest.mark.parametrize("changed", ["__init__.py", "new_mask.py", "../../README.md"])
def test_changes_and_new_files_of_the_package_show(package, changed):
    (package / changed).write_text("two")
    assert environment.git_commit() == git(package, "rev-parse", "--short=12", "HEAD") + "+"


def test_a_new_file_elsewhere_does_not_show(package):
    (package.parents[1] / "run.json").write_text("{}")
    assert not environment.git_commit().endswith("+")


def test_an_installed_package_has_no_commit(package, monkeypatch):
    """It lies in an environment that somebody keeps beside a program of theirs."""
    installed = package.parents[1] / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    monkeypatch.setattr(environment, "PACKAGE", installed)
    assert environment.git_commit() is None
