"""How methods look: one style a method, in every figure and on every page, SGD first."""

from __future__ import annotations

import json
import re

import pytest
from html_elements import Elements
from report_runs import make_run
from small_landscapes import landscapes

from sparsam.cli.names import ordered
from sparsam.report import collect, write_report
from sparsam.report.convergence_figure import METHODS as CONVERGENCE_METHODS
from sparsam.report.landscape_page import write_landscapes
from sparsam.report.styles import COLOURS, DASHES, METHODS, place, style, style_sheet, styles


def test_methods_of_the_table_differ():
    assert len(set(METHODS.values())) == len(METHODS)
    assert next(iter(METHODS)) == "SGD"
    assert set(CONVERGENCE_METHODS.values()) < METHODS.keys()
    for last in ("SSAM-C", "Thrifty SAM"):
        usual = [METHODS[name] for name in ("SGD", "SAM", "SSAM-F", "SSAM-D", last)]
        assert len({look.colour for look in usual}) == len({look.dash for look in usual}) == 5


@pytest.mark.parametrize("name", ["SGD", "SAM", "ASSAM-D", "mine", "<b>"])
def test_a_style_depends_on_the_method_alone(name):
    for others in ([], ["SGD", "SAM"], ["SSAM-F"] * 3):
        mixed = [m for m in others if m != name]
        assert styles([name, *mixed])[0] == styles([*mixed, name])[-1] == style(name)


def test_lines_of_one_chart_differ():
    assert len(set(styles(["SAM"] * 5))) == 5
    assert len({look.colour for look in styles(["SAM"] * 5)}) == 1
    many = [f"method {i % 12}" for i in range(35)]
    assert len(set(styles(many))) == len(COLOURS) * len(DASHES) == 35
    assert len(styles(many * 2)) == 70
    assert styles(["SAM", "SAM", "ASAM"])[2] == style("ASAM")  # which the second SAM leaves alone


def test_the_style_sheet_has_every_class():
    sheet = style_sheet()
    for look in METHODS.values():
        colour, dash = look.classes.split()
        light, dark = COLOURS[look.colour]
        assert f".{colour} {{ --line: light-dark({light}, {dark}); }}" in sheet
        assert (f".{dash} {{" in sheet) == (look.dash != "solid")
        assert look.line["color"] == light


def test_the_order_is_not_that_of_the_arguments(tmp_path):
    runs = [make_run(tmp_path, name, seed) for seed in (1, 0) for name in ("ssam-f", "sgd", "sam")]
    mine = make_run(tmp_path, "sam", summary={"method": "mine"}, recipe={"name": "mine"})
    assert [m.label for m in collect([mine, *runs])] == ["SGD", "SAM", "SSAM-F", "mine"]
    found = [json.loads((run / "recipe.json").read_text()) for run in ordered(runs)]
    assert [(r["name"], r["train"]["seed"]) for r in found] == [
        (name, seed) for name in ("sgd", "sam", "ssam-f") for seed in (0, 1)
    ]
    assert sorted(["SSAM-F", "other", "ASAM", "SGD"], key=place) == ["SGD", "ASAM", "SSAM-F", "other"]


def test_both_pages_show_a_method_alike(tmp_path):
    report = write_report([make_run(tmp_path, "sam"), make_run(tmp_path, "sgd")], tmp_path / "report.html")
    drawn = write_landscapes(landscapes(1, points=3), tmp_path / "landscape.html")
    shown = {}
    for page, key in ((report, "methods"), (drawn, "runs")):
        text = page.read_text(encoding="utf-8")
        data = json.loads(next(inside for a, inside in Elements(text).of("script") if "type" in a))
        shown[key] = {line["label"]: line["style"] for line in data[key]}
        assert style_sheet() in text
    assert shown["methods"] == {name: style(name).classes for name in ("SGD", "SAM")}
    assert shown["runs"].items() > shown["methods"].items()
    swatches = re.findall(r'<svg class="swatch ([^"]*)"', report.read_text(encoding="utf-8"))
    assert swatches == [style(name).classes for name in ("SGD", "SAM")] * 2  # the table, and the runs
