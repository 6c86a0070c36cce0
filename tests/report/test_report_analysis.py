"""What of the analysis is on the report's page: numbers, files and figures of runs that were really trained."""

import base64
import json
import shutil
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import numpy as np
import pytest
from commands import invoke
from html_elements import Elements
from report_runs import HOSTILE, PLACE, make_run

from sparsam.analysis import Landscape
from sparsam.errors import UserValueError
from sparsam.report import write_report

SHARED = ("landscape-contour", "landscape-surface", "landscape-line", "hessian", "gradients", "masks")


def read(page):
    return Elements(page.read_text(encoding="utf-8"))


def targets(page):
    """The files that links lead to, found as a browser does."""
    links = [urljoin(page.absolute().as_uri(), attributes["href"]) for attributes, _ in read(page).of("a")]
    return [Path(unquote(urlsplit(link).path)) for link in links]


def numbers(page):
    """The numbers of each run: {file: {name: number}}."""
    runs = []
    for tag, attributes, text in read(page).found:
        if attributes.get("class") == "settings results":
            runs.append({})
        elif attributes.get("class") == "settings":
            inside = None
        elif runs and tag == "a":
            inside = runs[-1][text.removeprefix("analysis/")] = {}
        elif runs and tag == "dt" and inside is not None:
            name = text
        elif runs and tag == "dd" and inside is not None:
            inside[name] = text
    return runs


def pictures(page):
    return {
        a["alt"]: base64.b64decode(a["src"].removeprefix("data:image/png;base64,")) for a, _ in read(page).of("img")
    }


def loaded(run, name):
    return json.loads((run / "analysis" / f"{name}.json").read_text())


def test_numbers_are_those_of_the_files(analysed, tmp_path):
    found = numbers(write_report(analysed, tmp_path / "page.html"))
    assert len(found) == 2
    for run, results in zip(analysed, found, strict=True):
        hessian, gradients, sharpness = (loaded(run, name) for name in ("hessian", "gradients", "sharpness"))
        first, fifth = hessian["eigenvalues"][0], hessian["eigenvalues"][4]
        assert results["hessian.json"] == {
            "λ1": f"{first:.4g}",
            "λ5": f"{fifth:.4g}",
            "λ1/λ5": f"{first / fifth:.2f}",
            "trace": f"{hessian['trace']:.4g} ± {hessian['trace_error']:.2g}",
            "converged": "no",  # after so few products
            "images": str(hessian["samples"]),
        }
        counts, edges = np.array(gradients["counts"][""]), np.array(gradients["edges"])
        share = counts[edges[1:] < 1e-9].sum() / counts.sum()
        assert results["gradients.json"] == {
            "weights with r < 0, ρ = 0.1": f"{100 * share:.1f} %",
            "images": str(gradients["samples"]),
        }
        best = {"weights": "of the best epoch"} if run is analysed[0] else {}
        assert results["sharpness.json"] == {
            "loss rise, ρ = 0.2": f"{sharpness['worst_case']:.3g}",
            "λ1": f"{sharpness['lambda1']:.3g}",
            "images": str(sharpness["samples"]),
            **best,
        }
        for name in ("landscape.npz", "landscape-line.npz"):
            with np.load(run / "analysis" / name) as saved:
                assert results[name] == {
                    "loss at w": f"{float(saved['centre']):.4g}",
                    "median": f"{np.median(saved['losses']):.4g}",
                    "within": f"± {saved['axis'][-1]:g}",
                    "images": str(json.loads(str(saved["words"]))["settings"]["samples"]),
                }
        assert len(results) == 5


@pytest.mark.parametrize("place", [".", "elsewhere/pages", f"runs/{PLACE}"])
def test_links_lead_to_every_file(analysed, place):
    root = analysed[0].parents[2]
    folder = root / "runs" / "analysis"
    linked = targets(write_report(analysed, root / place / "page.html", folder))
    assert all(file.is_file() for file in linked)
    expected = {file for run in analysed for file in (run / "analysis").iterdir()} | set(folder.iterdir())
    assert {file.resolve() for file in linked} == {file.resolve() for file in expected}
    assert {"landscape.html", "landscape-line.html"} < {file.name for file in linked}


def test_a_path_from_where_one_stands(analysed, monkeypatch):
    root = analysed[0].parents[2]
    monkeypatch.chdir(root / "runs")
    page = write_report([Path(PLACE) / run.name for run in analysed], Path("relative.html"))
    assert all("://" not in attributes["href"] for attributes, _ in read(page).of("a"))
    assert len(targets(page)) == 10 + len(list((root / "runs" / "analysis").iterdir()))
    assert all(file.is_file() for file in targets(page))


def test_figures_are_in_the_page(analysed, tmp_path):
    folder = analysed[0].parents[1] / "analysis"
    page = write_report(analysed, tmp_path / "page.html", folder)
    own = [f"gradients-{run.name}" for run in analysed]
    found = pictures(page)
    assert list(found.values()) == [(folder / f"{name}.png").read_bytes() for name in (*SHARED, *own)]
    assert list(found)[-2:] == [f"Gradients by layer: {run.name}" for run in analysed]
    for attributes, _ in read(page).of("img"):
        data = found[attributes["alt"]]
        size = [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)]
        assert [int(attributes["width"]), int(attributes["height"])] == [round(0.6 * pixels) for pixels in size]


def test_figures_of_other_runs_are_left_out(analysed, tmp_path):
    folder = analysed[0].parents[1] / "analysis"
    titles = list(pictures(write_report(analysed[:1], tmp_path / "page.html", folder)))
    assert "Masks by layer, and how they move" not in titles  # SGD has none
    assert [title for title in titles if "by layer" in title] == ["Gradients by layer: digits-sgd-seed0"]
    other = make_run(tmp_path)
    page = write_report([other], tmp_path / "page.html", folder)
    assert not {"a", "img"} & {tag for tag, _, _ in read(page).found}
    (other / "analysis").mkdir()
    shutil.copy(analysed[0] / "analysis" / "hessian.json", other / "analysis")
    assert list(pictures(write_report([other], tmp_path / "page.html", folder))) == ["Eigenvalues of the Hessian"]


@pytest.mark.parametrize(
    ("page", "analysis"),
    [
        ("page.html", "analysis"),
        ("elsewhere/page.html", "elsewhere/analysis"),
        ("elsewhere/page.html", "runs/demo/analysis"),
        ("elsewhere/page.html", "runs/analysis"),
        ("runs/demo/report.html", "runs/analysis"),
    ],
)
def test_where_figures_are_looked_for(analysed, tmp_path, page, analysis):
    runs = [tmp_path / "runs" / "demo" / run.name for run in analysed]
    for run, copy in zip(analysed, runs, strict=True):
        shutil.copytree(run, copy)
    assert pictures(write_report(runs, tmp_path / page)) == {}
    shutil.copytree(analysed[0].parents[1] / "analysis", tmp_path / analysis)
    assert len(pictures(write_report(runs, tmp_path / page))) == 8
    (tmp_path / "empty").mkdir()
    assert pictures(write_report(runs, tmp_path / page, tmp_path / "empty")) == {}


def test_nothing_where_nothing_was_looked_at(tmp_path):
    page = read(write_report([make_run(tmp_path)], tmp_path / "page.html"))
    assert not {"a", "img"} & {tag for tag, _, _ in page.found}
    assert not any(a.get("id") == "minima" or "results" in a.get("class", "") for _, a, _ in page.found)


@pytest.fixture
def spoiled(analysed, tmp_path):
    """A copy of one run, and of the figures, for tests that change files."""
    shutil.copytree(analysed[1], tmp_path / "run")
    shutil.copytree(analysed[0].parents[1] / "analysis", tmp_path / "analysis")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run/analysis/hessian.json", b'{"eigenvalues": [1', "is not valid JSON: Expecting"),
        ("run/analysis/hessian.json", b"{}", "has no 'eigenvalues'$"),
        ("run/analysis/hessian.json", b'{"eigenvalues": 7}', "eigenvalues must be a list of numbers, but is 7$"),
        ("run/analysis/hessian.json", b'{"eigenvalues": []}', r"eigenvalues must be a list of numbers, but is \[\]$"),
        ("run/analysis/gradients.json", b"[]", r"must hold a JSON object, but holds \[\]$"),
        ("run/analysis/gradients.json", b'{"below_zero": {"stem": 1}}', "has no 'below_zero.'$"),
        ("run/analysis/sharpness.json", b'{"rho": "x"}', "rho must be a number, but is 'x'$"),
        ("run/analysis/landscape.npz", b"PK", "cannot be read as a landscape: "),
        ("analysis/hessian.png", b"", "is not a PNG picture$"),
        ("analysis/hessian.png", b"\x89PNG\r\n\x1a\n", "is not a PNG picture$"),
    ],
)
def test_error_names_the_file(spoiled, name, content, message):
    file = spoiled.parent / name
    file.write_bytes(content)
    with pytest.raises(UserValueError, match=message) as caught:
        write_report([spoiled], spoiled.parent / "page.html")
    assert str(file) in str(caught.value)
    assert not (spoiled.parent / "page.html").exists()


def test_error_about_the_folder(spoiled):
    with pytest.raises(UserValueError, match=r"figures must be a folder, but .*nowhere is not$"):
        write_report([spoiled], spoiled.parent / "page.html", spoiled / "nowhere")


def test_files_may_have_vanished(spoiled):
    shutil.rmtree(spoiled / "analysis")
    (spoiled.parent / "analysis" / "masks.svg").unlink()
    page = write_report([spoiled], spoiled.parent / "page.html")
    assert [file.name for file in targets(page)] == ["masks.png"]
    assert numbers(page) == []


def test_results_that_are_not_whole(spoiled):
    values = loaded(spoiled, "hessian")
    values.update(eigenvalues=[2.5], ratio=None, trace=9.0, trace_error=None, converged=True, weights="best")
    (spoiled / "analysis" / "hessian.json").write_text(json.dumps(values))
    part = Landscape.load(spoiled / "analysis" / "landscape.npz").__dict__
    Landscape(**{**part, "finished": 3}).save(spoiled / "analysis" / "landscape.npz")
    (results,) = numbers(write_report([spoiled], spoiled.parent / "page.html"))
    assert results["hessian.json"] == {
        "λ1": "2.5",
        "λ5": "–",
        "λ1/λ5": "–",
        "trace": "9",
        "images": str(values["samples"]),
        "weights": "of the best epoch",
    }
    assert results["landscape.npz"] == {
        "loss at w": f"{part['centre']:.4g}",
        "median": "–",
        "points": "3 of 16",
        "within": "± 1",
        "images": str(part["settings"]["samples"]),
    }


def test_files_of_others_are_linked_and_names_stay_names(spoiled):
    name = HOSTILE.replace("/", ":").replace("window", "javascript:window") + "?x=1#y%20.json"
    (spoiled / "analysis" / name).write_text("not JSON at all")
    (spoiled / "analysis" / "hessian.json.unfinished").write_text("{")
    hostile = spoiled.with_name("'\"><img src=x>")
    spoiled.rename(hostile)
    shutil.move(
        spoiled.parent / "analysis" / "masks.png", spoiled.parent / "analysis" / f"gradients-{hostile.name}.png"
    )
    page = write_report([hostile], spoiled.parent / "page.html")
    assert numbers(page)[0][name] == {}
    assert "hessian.json.unfinished" not in numbers(page)[0]
    assert all(file.is_file() for file in targets(page))
    assert hostile / "analysis" / name in targets(page)
    assert f"Gradients by layer: {hostile.name}" in pictures(page)
    assert len(read(page).of("script")) == 2


def test_command(analysed, tmp_path):
    folder = analysed[0].parents[1] / "analysis"
    invoke("report", *analysed, "-o", tmp_path / "page.html", "--figures", folder)
    assert len(pictures(tmp_path / "page.html")) == 8
    done = invoke("report", *analysed, "-o", tmp_path / "page.html", "--figures", tmp_path / "nowhere", code=1)
    assert "error: figures must be a folder, but" in done.stderr
