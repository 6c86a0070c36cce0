"""Tables as data: names of rows, what --only keeps, files of one's own, and what is refused."""

from __future__ import annotations

import pytest
from commands import ROOT

from sparsam.reproduce.experiments import Row, chosen, find_experiments
from sparsam.reproduce.plan import part_of, plan_runs, without_known
from sparsam.runs.directory import RunDirectory
from sparsam.runs.run import read_run
from sparsam.runs.schema import RecipeError
from sparsam.training.planned import PlannedRun


def test_a_row_is_named_after_what_it_changes():
    row = Row("cifar10-resnet18-ssam-d", ("mask.sparsity=0.9", "mask.interval_epochs=none", "mask.criterion=sharpest"))
    assert row.name == "cifar10-resnet18-ssam-d-sparsity0.9-interval-none-sharpest"
    # what says where and how to compute is in no name
    assert row.recipe(["data.root=elsewhere", "train.precision=bf16", "train.epochs=30"]).name == f"{row.name}-epochs30"


@pytest.mark.parametrize(("epochs", "name"), [("2", "-ramp2"), ("0.5", "-ramp0.5"), ("0", "")])
def test_a_ramp_is_in_the_name_of_a_row(epochs, name):
    row = Row("cifar100-resnet18-thrifty", (f"sam.ramp_epochs={epochs}",))
    assert row.name == f"cifar100-resnet18-thrifty{name}"


def test_a_committed_run_stands_for_the_recipe_without_a_ramp_alone():
    """Its recipe.json is older than the setting."""
    folder = ROOT / "results" / "thrifty" / "search" / "thrifty-layer3-fraction0.304-rho0.2-seed0"
    run = read_run(folder)
    assert "ramp_epochs" not in run.recipe["sam"]
    assert RunDirectory(folder).recipe().sam.ramp_epochs == 0
    changes = ["train.epochs=60", "data.validation=5000", "train.refresh_batchnorm=100"]
    plain, ramped = (Row("cifar100-resnet18-thrifty", own).recipe(changes) for own in ((), ("sam.ramp_epochs=2",)))
    planned = [PlannedRun(recipe, ROOT / recipe.name) for recipe in (plain, ramped)]
    assert without_known(planned, [run]) == (planned[1:], [run])


def test_names_of_tables_and_groups():
    assert [e.name for e in find_experiments(["table3", "figure1", "table3"])] == ["table3", "figure1"]
    assert [e.name for e in find_experiments(["tables"])] == [f"table{i}" for i in range(1, 10)]
    assert len(find_experiments(["all"])) == 14


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tabel1", r"there is no table or figure named 'tabel1'; did you mean table1\?"),
        ("xyz", "no table or figure named 'xyz'; known: table1, table2.*or a file"),
        ("none.toml", "there is no file none.toml"),
    ],
)
def test_a_name_that_is_none(name, message):
    with pytest.raises(RecipeError, match=message):
        find_experiments([name])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "# only a comment",
            r"own\.toml has no table; a table is \[NAME\], and below it rows, such as rows = \[{ recipe = \"digits-sam\" }\]$",
        ),
        ("[t]\nrows = []", r"t in .*own\.toml has no row; a table needs rows, such as rows = \[{ recipe ="),
        (
            "[s]\nrows = [{ recipe = 'digits-sgd' }]\n[t]\nrows_of = ['s']",
            "t in .* has no row; .*, or rows_of tables whose rows have a paper number$",
        ),
        ("[t]\ntitle = 'x'", "t in .* must be a table with rows or rows_of"),
        (
            "[t]\nother = 1\nrows = [{ recipe = 'digits-sgd' }]",
            "has an unknown key other; known: title, shows, rows, rows_of, against",
        ),
        (
            "[t]\nagainst = 'digits-sam'\nrows = [{ recipe = 'digits-sgd' }]",
            r"against of t in .* must be the name of one of its rows \(digits-sgd\), but is 'digits-sam'",
        ),
        (
            "[t]\nshows = 'x'\nrows = [{ recipe = 'digits-sgd' }]",
            "shows of t in .* must be one of curves, .*but is 'x'",
        ),
        (
            "[t]\nrows = [{ paper = 1.0 }]",
            "row 1 of t in .* must have a recipe, but is",
        ),
        ("[t]\nrows = [{ recipe = 'digits-sgd', papr = 1.0 }]", "has an unknown key papr; known: recipe, set, paper"),
        (
            "[t]\nrows = [{ recipe = 'digits-sgd', paper = '1' }]",
            "paper of row 1 of t in .* must be a number, but is '1'",
        ),
        ("[t]\nrows = ['digits-sgd']", "row 1 of t in .* must have a recipe, but is 'digits-sgd'"),
        (
            "[t]\nrows = [{ recipe = 'digits-sgd', set = [1] }]",
            r"set of row 1 of t in .* must be a list of texts, but is \[1\]",
        ),
        (
            "[t]\nrows = [{ recipe = 'digits-sgd' }, { recipe = 'digits-sam', set = ['sam.roh=1'] }]",
            r"^row 2 of t in .*own\.toml: unknown key sam\.roh; did you mean sam\.rho\?$",
        ),
        ("[t]\nrows_of = ['t']", "rows_of of t in .* must name other tables of the file, but has 't'"),
        ("[t", "is not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, text, message):
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=message):
        find_experiments([str(file)])


def test_only_keeps_rows_by_a_text_in_their_names():
    (table,) = chosen(find_experiments(["table1"]), ["cifar10-*ssam-f", "cifar100-*sgd"])
    names = [row.name for row in table.rows]
    assert len(names) == 8
    assert all("cifar10-resnet18-ssam-f" in name or "cifar100-resnet18-sgd" in name for name in names)
    (table,) = chosen(find_experiments(["table1"]), ["cifar100-resnet18-sgd"])  # the name of a row: that row alone
    assert [row.name for row in table.rows] == ["cifar100-resnet18-sgd"]
    with pytest.raises(RecipeError, match="--only nothing leaves no row"):
        chosen(find_experiments(["table1"]), ["nothing"])


def test_tables_share_runs(tmp_path):
    """Tables 1, 8 and 9 have SSAM-F at sparsity 0.5 with 128 samples and a new mask each epoch."""
    together = plan_runs(find_experiments(["table1", "table8", "table9"]), 2, tmp_path)
    names = [run.path.name for run in together]
    assert len(set(names)) == len(names) == 2 * (32 + 10 + 20)
    assert names[:2] == ["cifar10-resnet18-sgd-seed0", "cifar10-resnet18-sgd-seed1"]
    assert [run.recipe.train.seed for run in together[:2]] == [0, 1]


def test_a_setting_without_a_meaning_is_refused(tmp_path):
    experiments = chosen(find_experiments(["table1"]), ["sgd"])
    with pytest.raises(RecipeError, match=r"mask\.sparsity has no meaning for any of the recipes"):
        plan_runs(experiments, 1, tmp_path, ["mask.sparsity=0.5"])


def test_a_setting_goes_to_the_rows_that_it_has_a_meaning_for(tmp_path):
    (tmp_path / "own.toml").write_text(
        """[[table1.rows]]
        recipe = "digits-sgd"
        [[table1.rows]]
        recipe = "digits-sam"
        [[table1.rows]]
        recipe = "digits-sgd"
        set = ["sam.enabled=true", "mask.name=random"]
        [[table1.rows]]
        recipe = "digits-sam"
        set = ["sam.enabled=false", "optimizer.lr=0.1"]
        """
    )
    planned = plan_runs(
        find_experiments([str(tmp_path / "own.toml")]), 1, tmp_path, ["sam.rho=0.3", "mask.sparsity=0.9"]
    )
    assert [(run.recipe.sam.enabled, run.recipe.sam.rho, run.recipe.mask.sparsity) for run in planned] == [
        (False, 0.1, None),
        (True, 0.3, None),
        (True, 0.3, 0.9),
        (False, 0.1, None),
    ]


def test_a_setting_that_rows_differ_in_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"mask\.sparsity is what rows differ in; choose rows with --only"):
        plan_runs(find_experiments(["table1"]), 1, tmp_path, ["mask.sparsity=0.7"])


def test_parts_have_all_runs_between_each_other(tmp_path):
    planned = plan_runs(find_experiments(["table3"]), 1, tmp_path)
    parts = [part_of(planned, f"{k}/3") for k in range(3)]
    assert sorted(run.path for part in parts for run in part) == sorted(run.path for run in planned)
    for text in ("3/3", "1", "a/b", "-1/3"):
        with pytest.raises(RecipeError, match="--part must be K/N"):
            part_of(planned, text)


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/*.toml")), ids=lambda path: path.stem)
def test_the_tables_of_our_own_runs_can_be_read(path):
    experiments = find_experiments([str(path)])
    assert len({row.name for experiment in experiments for row in experiment.rows}) > 3
