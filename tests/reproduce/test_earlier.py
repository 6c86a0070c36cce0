"""Which rows a table has beside those that were chosen."""

from __future__ import annotations

import json
from dataclasses import replace

from sparsam.reproduce.earlier import with_earlier_rows
from sparsam.reproduce.experiments import Experiment, Row
from sparsam.runs.recipe import load_recipe


def test_rows_that_were_not_chosen_need_not_suit_the_settings(tmp_path):
    """Cuts do not go with fp16, and a row's own radius is not that of --set."""
    rows = tuple(Row(name, ("sam.rho=0.3",)) for name in ("digits-thrifty", "digits-sam"))
    table = Experiment("t", "", (Row("digits-sgd"),), whole=(*rows, Row("digits-sgd")))
    for name in ("digits-thrifty-rho0.3", "digits-sam-rho0.3", "digits-sam-rho0.2"):
        folder = tmp_path / f"{name}-seed0"
        folder.mkdir()
        recipe = load_recipe(name.rpartition("-")[0], [f"sam.rho={name[-3:]}"])
        (folder / "recipe.json").write_text(json.dumps(recipe.to_dict()))
        (folder / "summary.json").write_text("{}")
    assert with_earlier_rows(table, tmp_path, []).rows == table.whole
    assert with_earlier_rows(table, tmp_path, ["train.precision=fp16"]).rows == table.whole[1:]
    assert with_earlier_rows(table, tmp_path, ["sam.rho=0.2"]).rows == table.rows
    figure = replace(table, shows="curves")
    assert with_earlier_rows(figure, tmp_path, []) == figure
