"""`sparsam reproduce`, as a user types it, on tables of short runs on the digits."""

from __future__ import annotations

import csv
import json
import re
import shutil
from statistics import fmean, stdev

import pytest
from commands import ROOT, invoke
from digits_runs import numbers
from killed_runs import start, wait_for
from scipy import stats

from sparsam.reproduce.comparison import Difference
from sparsam.reproduce.experiments import find_experiments
from sparsam.runs.directory import RunDirectory
from sparsam.training import turns

OWN = """
[table1]
title = "Digits"
against = "digits-sam"
rows = [
  { recipe = "digits-sgd", paper = 90.00, flops = 1.00 },
  { recipe = "digits-ssam-f", set = ["mask.samples=16"], paper = 95.50, flops = 1.65, seconds = 1.49 },
  { recipe = "digits-sam" },
]

[figure1]
shows = "gradients"
rows = [{ recipe = "digits-sam" }]

[figure2]
shows = "curves"
rows = [{ recipe = "digits-sgd" }, { recipe = "digits-sam" }]

[figure3]
shows = "sparsity"
rows_of = ["table1"]

[figure4]
shows = "landscape"
rows = [{ recipe = "digits-sam" }]
"""
NAMES = ("digits-sgd", "digits-ssam-f-samples16", "digits-sam")
SHORT = ["train.max_steps=1"]  # of rows that are trained in a second
QUICK = ("--set", "train.deterministic=true", "--device", "cpu", "--rounds", 2)
WHOLE = ("--epochs", 2, "--seeds", 2, "--samples", 128, "--points", 3, *QUICK)
WIDE = 160  # columns, for all of table1


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("tables") / "own.toml"
    file.write_text(OWN)
    return file


@pytest.fixture(scope="module")
def reproduced(own):
    output = own.parent / "runs"
    return output, invoke("reproduce", own, *WHOLE, "-o", output, width=WIDE).stdout


def accuracy(output, name, seeds=2):
    return [100 * summary(output, name, seed)["test_accuracy"] for seed in range(seeds)]


def summary(output, name, seed=0):
    return json.loads((output / f"{name}-seed{seed}" / "summary.json").read_text())


def last_line(output, name, seed=0):
    return json.loads((output / f"{name}-seed{seed}" / "metrics.jsonl").read_text().splitlines()[-1])


def test_the_table_has_the_paper_ours_and_the_difference(reproduced):
    output, text = reproduced
    assert "table1: Digits (scaled down: train.epochs 2 instead of 15)" in text
    rows = list(csv.DictReader((output / "table1-epochs2.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == [f"{name}-epochs2" for name in NAMES]
    for row, name, paper in zip(rows, NAMES, ("90", "95.5", ""), strict=True):
        found, line = (
            accuracy(output, f"{name}-epochs2"),
            next(line for line in text.splitlines() if line.startswith(f" {name} ")),
        )
        assert (row["row"], row["paper"], row["n"]) == (name, paper, "2")
        assert float(row["ours"]) == pytest.approx(fmean(found), abs=1e-4)
        assert float(row["deviation"]) == pytest.approx(stdev(found), abs=1e-4)
        losses = [last_line(output, f"{name}-epochs2", seed)["train_loss"] for seed in (0, 1)]
        assert float(row["train_loss"]) == pytest.approx(fmean(losses), rel=1e-4)
        assert f" {fmean(found):.2f} ± {stdev(found):.2f} " in line
        if paper:
            assert float(row["difference"]) == pytest.approx(fmean(found) - float(paper), abs=1e-4)
            assert f" {fmean(found) - float(paper):+.2f} " in line
        ratio = summary(output, f"{name}-epochs2")["step_ratio"]
        assert float(row["time_ratio"]) == pytest.approx(ratio["median"], abs=1e-4)
        assert f" {ratio['median']:.2f}× ± {(ratio['high'] - ratio['low']) / 2:.2f} " in line
    assert [float(row["flops"]) for row in rows] == pytest.approx([1, 1.647, 2], abs=1e-3)
    seconds = [summary(output, f"{NAMES[1]}-epochs2", seed)["extra"]["Fisher information, s"] for seed in (0, 1)]
    assert seconds[0] == seconds[1] > 0
    assert [row["fisher_seconds_paper"] for row in rows] == ["", "1.49", ""]
    assert [row["fisher_seconds"] for row in rows] == ["", f"{seconds[0]:.6g}", ""]
    assert "6 runs: 0 finished, 0 to go on with, 6 new" in text


def test_rows_are_set_against_one_of_them_with_an_interval(reproduced):
    output, text = reproduced
    rows = list(csv.DictReader((output / "table1-epochs2.csv").read_text().splitlines()))
    others = accuracy(output, "digits-sam-epochs2")
    for row, name in zip(rows[:2], NAMES, strict=False):
        ours = accuracy(output, f"{name}-epochs2")
        value = fmean(ours) - fmean(others)
        low, high = stats.ttest_ind(ours, others, equal_var=False).confidence_interval(0.95)
        found = [float(row[key]) for key in ("advantage", "advantage_low", "advantage_high")]
        assert found == pytest.approx([value, low, high], rel=1e-4, abs=1e-4)
        shown = f" {value:+.2f} ({low:+.2f} to {high:+.2f}) "
        assert shown in next(line for line in text.splitlines() if f" {name} " in line)
    assert rows[2]["advantage"] == ""
    assert "| Minus digits-sam (95 % interval) |" in (output / "table1-epochs2.md").read_text()


@pytest.mark.filterwarnings("ignore:Precision loss")
@pytest.mark.parametrize("others", [[0.9, 0.92, 0.97], [0.9, 0.9], [0.5, 0.75, 0.7, 0.9, 0.6]])
def test_an_interval_is_that_of_scipy(others):
    ours = [0.91, 0.95, 0.93, 0.99]
    interval = stats.ttest_ind(ours, others, equal_var=False).confidence_interval(0.95)
    assert Difference.of(ours, others).interval == pytest.approx([100 * bound for bound in interval])


@pytest.mark.filterwarnings("error")
def test_where_no_seed_differs_there_is_no_interval():
    assert Difference.of([0.95, 0.95, 0.95], [0.9, 0.9]) == Difference(pytest.approx(5), None)
    assert Difference.of([0.95, 0.95, 0.95], [0.9, 0.91]).interval is not None


def test_what_a_table_is_set_against_need_not_be_chosen(own, reproduced):
    shown = invoke("reproduce", own, "--epochs", 2, "--from", reproduced[0], "--only", "digits-sgd")
    rows = list(csv.DictReader((reproduced[0] / "table1-epochs2.csv").read_text().splitlines()))
    assert f"{float(rows[0]['advantage']):+.2f}" in shown.stdout


def test_it_is_written_as_markdown_and_on_the_page(reproduced):
    output, _ = reproduced
    title = "table1: Digits (scaled down: train.epochs 2 instead of 15)"
    text, page = (output / "table1-epochs2.md").read_text(), (output / "table1-epochs2.html").read_text()
    assert text.startswith(f"# {title}\n\n| Row |")
    assert "| Row | Reference, % | Ours, % | n |" in text
    assert title in page
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| digits")
    ]
    assert [row[0] for row in rows] == ["digits-sgd", "digits-ssam-f-samples16", "digits-sam"]
    for row in rows:
        line = next(line for line in page.splitlines() if f"<span>{row[0].partition(' ')[0]}</span>" in line)
        assert re.findall(r"<span>(.*?)</span>", line)[1:] == row[1:]


def test_a_figure_is_measured_and_drawn(reproduced):
    output, text = reproduced
    measured = json.loads((output / "digits-sam-epochs2-seed0" / "analysis" / "gradients.json").read_text())
    assert measured["samples"] == 128
    assert f"{100 * measured['below_zero']['']:.1f}" in text
    assert "\nfigure1 (scaled down" in text
    for picture in ("figure1-epochs2/gradients.png", "figure3-epochs2/sparsity.png", "figure4-epochs2/landscape.html"):
        assert (output / picture).is_file()
    assert "SAM" in (output / "figure2-epochs2" / "resnet-small-on-digits.html").read_text()


def test_again_trains_and_measures_nothing(own, reproduced):
    output, text = reproduced
    before = {file: file.stat().st_mtime_ns for file in output.rglob("*.json*")}
    again = invoke("reproduce", own, *WHOLE, "-o", output, width=WIDE)
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*.json*")} == before
    assert "6 runs: 6 finished, 0 to go on with, 0 new" in again.stdout
    assert again.stdout.splitlines()[2:] == text.splitlines()[2:]


def test_from_a_folder_shows_the_same_table_and_trains_nothing(own, reproduced):
    output, text = reproduced
    shown = invoke("reproduce", own, "--epochs", 2, "--from", output, width=WIDE).stdout
    table = shown[shown.index("table1") : shown.index("figure1")].strip()
    assert table in text
    whole = invoke("reproduce", own, "--only", "sgd", "--from", output).stdout
    where = f"There is no run of table1 in {output}. There are runs of 2 epochs: use --epochs 2."
    assert where in " ".join(whole.split())
    assert "FLOPs: " in whole  # the reference has them
    assert "Paper: " not in whole + shown


def test_a_narrow_terminal_is_told_what_shows_all_columns(own, reproduced, tmp_path):
    output, wide = reproduced
    assert "Left out for width" not in wide
    again = " ".join(invoke("reproduce", own, *WHOLE, "--only", "digits-s", "-o", output, width=60).stdout.split())
    assert re.search(r"Left out for width: [^;]*Time × SGD[^;]*; a wider terminal or the page shows them\.", again)
    scaled = " ".join(invoke("reproduce", own, "--from", output, "--epochs", 2, width=60).stdout.split())
    assert re.search(r"Left out for width: [^;]*Time × SGD[^;]*; a wider terminal shows them\.", scaled)
    file = tmp_path / "own.toml"  # rows whose own length is that of the runs: --markdown takes no --epochs
    file.write_text("[t]\nrows = [{ recipe = 'digits-sgd', set = ['train.epochs=2'], paper = 90 }]\n")
    plain = " ".join(invoke("reproduce", file, "--from", output, width=40).stdout.split())
    assert re.search(r"Left out for width: [^;]*; a wider terminal or --markdown shows them\.", plain)


def test_from_a_folder_says_which_epochs_there_are(own, reproduced, tmp_path):
    output, _ = reproduced
    for option in (("--epochs", 3), ("--set", "train.epochs=3")):
        done = invoke("reproduce", own, "--only", "digits-sgd", "--from", output, *option, code=1)
        assert not done.stdout
        assert (
            f"with train.epochs=3 there is no run of table1 in {output}. There are runs of 2 epochs: use --epochs 2."
        ) in " ".join(done.stderr.split())
    file = tmp_path / "own.toml"
    file.write_text("[t]\nrows = [{ recipe = 'digits-sgd', set = ['train.epochs=2'] }]\n")
    done = invoke("reproduce", file, "--from", output, "--epochs", 3, code=1)
    assert "There are runs of 2 epochs: leave out --epochs." in " ".join(done.stderr.split())
    assert "FLOPs: " not in invoke("reproduce", file, "--from", tmp_path).stdout


@pytest.mark.slow
def test_from_a_folder_draws_what_was_measured_without_the_weights(own, reproduced, tmp_path):
    output, _ = reproduced
    kept, drawn = tmp_path / "kept", tmp_path / "drawn"
    shutil.copytree(output, kept, ignore=shutil.ignore_patterns("checkpoints", "figure*"))
    shown = invoke("reproduce", own, "--epochs", 2, "--from", kept, "-o", drawn).stdout
    measured = json.loads((kept / "digits-sam-epochs2-seed0" / "analysis" / "gradients.json").read_text())
    assert f"{100 * measured['below_zero']['']:.1f}" in shown
    for picture in ("figure1-epochs2/gradients.png", "figure3-epochs2/sparsity.png", "figure4-epochs2/landscape.html"):
        assert (drawn / picture).is_file()
    file = kept / "digits-sam-epochs2-seed0" / "analysis" / "gradients.json"
    file.write_text(json.dumps({**measured, "epochs": 1}))
    late = invoke("reproduce", own, "--epochs", 2, "--from", kept, "-o", drawn)
    assert "was measured after epoch 1, but has 2 epochs now: measure it again" in " ".join(late.stderr.split())
    for file in kept.rglob("analysis/*"):
        file.unlink()
    again = invoke("reproduce", own, "--epochs", 2, "--from", kept, "-o", drawn).stdout
    assert "figure4: nothing was measured of these runs, and that needs their weights" in again


def test_a_page_of_all_tables(own, reproduced, tmp_path):
    output, _ = reproduced
    (output / "notes").mkdir(exist_ok=True)
    (output / "notes" / "table1.md").write_text("A known difference.\n")
    invoke("reproduce", own, "--from", output, "--markdown", tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text()
    assert "## Table 1: Digits" in text
    assert "**With 2 epochs** instead of 15:" in text
    found = accuracy(output, "digits-sgd-epochs2")
    assert f"| digits-sgd | 90.00 | {fmean(found):.2f} ± {stdev(found):.2f} | 2 |" in text
    assert text.endswith("A known difference.\n")
    assert "## Figure" not in text
    assert text.startswith(f"# Tables\n\n`sparsam reproduce {own} --from {output} ")
    assert f"`sparsam reproduce {own} --only ROW` trains one." in text
    assert "Accuracies are those of the last epoch" in text
    assert "paper" not in text.lower()


def test_a_page_names_the_commits_of_shared_starts(own, reproduced, tmp_path):
    output, _ = reproduced
    copies = tmp_path / "runs"
    shutil.copytree(output, copies, ignore=shutil.ignore_patterns("checkpoints", "figure*"))
    for i, file in enumerate(sorted(copies.glob("*/environment.json"))):
        environment = json.loads(file.read_text())
        start = {"run": "x", "steps": 3, "git": "aaaaaaaaaaaa"} if i == 0 else {"run": "x", "steps": 3}
        file.write_text(json.dumps({**environment, "git": "bbbbbbbbbbbb", "start": start}))
    invoke("reproduce", own, "--from", copies, "--markdown", tmp_path / "RESULTS.md")
    assert re.search(r"; commit aaaaaaaaaaaa,\sbbbbbbbbbbbb[;.]", (tmp_path / "RESULTS.md").read_text())


def test_the_list_has_every_row():
    text = invoke("reproduce", "--list").stdout
    words = text.split()
    for experiment in find_experiments(["all"]):
        assert f"{experiment.name}: {experiment.title}" in text.replace("\n", " ")
        for row in experiment.rows:
            assert row.name in words
    assert words.count("110.65") == 1


def test_titles_and_folders_are_printed_as_they_were_given(tmp_path):
    table, folder = tmp_path / "own.toml", tmp_path / "runs[old]"
    table.write_text('[table1]\ntitle = "rho [small] on the digits"\nrows = [{ recipe = "digits-sam" }]\n')
    folder.mkdir()
    assert "\ntable1: rho [small] on the digits\n" in invoke("reproduce", table, "--list").stdout
    text = invoke("reproduce", table, "--from", folder).stdout
    assert "\ntable1: rho [small] on the digits\n" in text
    assert text.endswith(f"\nThere is no run of table1 in {folder}.\n")


def seconds(number, unit):
    return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]


def test_a_dry_run_counts_steps_and_trains_nothing(own, reproduced, tmp_path):
    epochs = ("--epochs", 2, "--set", "data.batch_size=1")  # enough steps for the hours to be seen
    text = invoke("reproduce", own, *epochs, "--dry-run", "-o", tmp_path / "x", "--device", "cpu").stdout
    assert not (tmp_path / "x").exists()
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip().startswith("digits")}
    steps = 100 * summary(reproduced[0], "digits-sam-epochs2")["steps"]
    assert lines["digits-sam-batch_size1-epochs2-seed0"][0] == f"{steps:,}"
    total = sum(float(count.replace(",", "")) * float(ms) / 1000 for count, ms, *_ in lines.values())
    for count, ms, *time in lines.values():
        assert seconds(*time) == pytest.approx(float(count.replace(",", "")) * float(ms) / 1000, rel=0.3, abs=0.6)
    found = re.search(r"3 runs, (\S+) (\S+) on cpu, roughly", text)
    assert seconds(*found.groups()) == pytest.approx(total, rel=0.3, abs=0.6)
    arguments = ("reproduce", own, "--epochs", 2, "--dry-run", "-o", reproduced[0], *QUICK[2:])
    again = invoke(*arguments, *QUICK[:2]).stdout
    assert "0 runs, 0 s on cpu, roughly: by steps measured on random images; 3 more are finished" in again
    error = invoke(*arguments, code=1).stderr  # as without --dry-run
    assert "holds a run of another recipe, which differs in train.deterministic" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "reproduce needs the name of a table or a figure, such as table1; --list shows them"),
        (("table1", "--from", "nowhere"), "--from must be a folder with runs, but nowhere is none"),
        (("table1", "--markdown", "x.md"), "--markdown goes with --from"),
        (
            ("table1", "--from", "results", "--epochs", 9, "--markdown", "x.md"),
            "--markdown writes all runs, however many epochs they have: leave out --epochs and --set",
        ),
        (
            ("figure1", "--from", "results", "--markdown", "x.md"),
            "--markdown writes tables, but only figures are named",
        ),
        (("table1", "--only", "sgd", "--part", "4/5"), "--part 4/5 has no run: there are 4 in all"),
        (("table1", "--part", "4/4"), "--part must be K/N with K from 0 to N - 1, such as 0/4, but is '4/4'"),
        (("table1", "--only", "sgd", "--address", "auto"), "--address goes with --engine ray"),
        (("table1", "--only", "sgd", "--retries", 3), "--retries goes with --engine ray"),
        (("table1", "--only", "sgd", "--engine", "ray", "--share-start"), "--share-start goes with --engine local"),
        (("table1", "--known", "nowhere"), "--known must be a folder with runs, but nowhere is none"),
        (("figure1", "--known", "results"), "--known goes with tables: figures need the weights of all runs"),
        (
            ("table1", "--from", "results", "--seeds", 1, "--share-start", "--known", "results", "--no-resume"),
            "--from shows runs and trains nothing, so leave out --seeds, --share-start, --known, --no-resume",
        ),
        (
            ("table1", "--from", "results", "--rounds", 30, "--device", "cpu"),
            "--from measures nothing without --time-steps, so leave out --rounds, --device",
        ),
        (
            ("table1", "--from", "results", "--markdown", "x.md", "--device", "cpu"),
            "--from measures nothing without --time-steps, so leave out --device",
        ),
        (("--list", "--from", "results"), "--list shows all rows and trains nothing, so leave out --from"),
        (
            ("--list", "--epochs", 3, "-s", "a=1"),
            "--list shows all rows and trains nothing, so leave out --epochs, --set",
        ),
    ],
)
def test_what_is_refused(arguments, message):
    assert message in invoke("reproduce", *arguments, code=1).stderr.replace("\n", " ")


def test_a_row_whose_ramp_is_longer_than_a_scaled_down_run_is_named_before_anything_is_trained(tmp_path):
    table, output = tmp_path / "own.toml", tmp_path / "runs"
    rows = '{ recipe = "digits-sgd" }, { recipe = "digits-thrifty", set = ["sam.ramp_epochs=2"] }'
    table.write_text(f"[table1]\nrows = [{rows}]\n")
    for more in ((), ("--dry-run",)):
        done = invoke("reproduce", table, "--epochs", 2, "--device", "cpu", "-o", output, *more, code=1)
        error = done.stderr.replace("\n", " ")
        assert "digits-thrifty-ramp2-epochs2: sam.ramp_epochs is 2, which is 24 steps, but" in error
        assert "has 9: rho would not reach 0.2; choose at most 0.75, or train for longer" in error
        assert not output.exists()


def test_no_resume_refuses_runs_that_are_there(own, reproduced):
    output, _ = reproduced
    for more in ((), ("--dry-run",)):
        done = invoke("reproduce", own, "--epochs", 2, "--no-resume", "-o", output, *QUICK, *more, code=1)
        assert "--no-resume starts anew, but there are runs already, such as" in done.stderr


@pytest.mark.slow
def test_the_spectrum_of_a_run(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("[figure5]\nshows = 'hessian'\nrows = [{ recipe = 'digits-sam' }]\n")
    invoke("reproduce", file, "--epochs", 1, "--samples", 64, "-o", tmp_path, *QUICK)
    measured = json.loads((tmp_path / "digits-sam-epochs1-seed0" / "analysis" / "hessian.json").read_text())
    assert measured["samples"] == 64
    assert (tmp_path / "figure5-epochs1" / "hessian.png").is_file()


@pytest.mark.slow
def test_a_killed_command_goes_on_and_neither_loses_nor_repeats_an_epoch(tmp_path):
    """SIGKILL in mid-run, then the same command: all files are those of a run that was never stopped."""
    name, epochs = "digits-sam-epochs6", ("--set", "train.epochs=6")
    own = tmp_path / "own.toml"
    own.write_text("[t]\nrows = [{ recipe = 'digits-sam' }]\n")
    arguments = [own, "--epochs", 6, *QUICK[:4], "--rounds", 0, "-o", tmp_path]
    killed = start(*arguments, command="reproduce")
    metrics = tmp_path / f"{name}-seed0" / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 2)
    killed.kill()
    killed.communicate()
    assert not (metrics.parent / "summary.json").exists()
    invoke("reproduce", *arguments)
    invoke("train", "digits-sam", *epochs, *QUICK[:4], "-o", tmp_path / "whole")
    one, other = (RunDirectory(path).metrics() for path in (metrics.parent, tmp_path / "whole"))
    assert numbers(one) == numbers(other)
    assert [m["epoch"] for m in one] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    file = tmp_path / "three.toml"
    rows = ", ".join(f"{{ recipe = '{name}' }}" for name in ("digits-sgd", "cifar10-resnet18-sgd", "digits-sam"))
    file.write_text(f"[three]\nrows = [{rows}]\n")
    options = ("--epochs", 1, "--rounds", 0, "--set", "data.root=nowhere", "--device", "cpu", "-o", tmp_path / "runs")
    done = invoke("reproduce", file, *options, "--seeds", 4, code=1)
    assert "4 of 12 runs failed; the same command goes on with them" in done.stderr
    name = "cifar10-resnet18-sgd-epochs1"
    assert f"{name}, seed 0; {name}, seed 1; {name}, seed 2 and 1 more: " in done.stderr.replace("\n", " ")
    for method in ("sgd", "sam"):
        found = accuracy(tmp_path / "runs", f"digits-{method}-epochs1", seeds=4)
        line = next(line for line in done.stdout.splitlines() if f" digits-{method} " in line)
        assert f" {fmean(found):.2f} ± {stdev(found):.2f} " in line


def test_known_runs_are_not_trained_again_and_stand_in_the_table(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text("[t]\nrows = [{ recipe = 'digits-sgd' }, { recipe = 'digits-sam' }]\n")
    arguments = ("--epochs", 1, "--rounds", 0, *QUICK[:4])
    invoke("reproduce", own, *arguments, "--only", "digits-sgd", "-o", tmp_path / "known" / "deep")
    arguments = (*arguments, "--seeds", 2, "--known", tmp_path / "known", "-o", tmp_path / "new")
    assert "digits-sgd-epochs1-seed0" not in invoke("reproduce", own, *arguments, "--dry-run").stdout
    done = invoke("reproduce", own, *arguments)
    assert "1 runs are in" in done.stdout
    assert "3 runs: 0 finished, 0 to go on with, 3 new" in done.stdout
    trained = {path.name for path in (tmp_path / "new").iterdir() if path.is_dir()}
    assert trained == {"digits-sgd-epochs1-seed1", "digits-sam-epochs1-seed0", "digits-sam-epochs1-seed1"}
    row = next(csv.DictReader((tmp_path / "new" / "t-epochs1.csv").read_text().splitlines()))
    places = ("known/deep", "new")
    both = [summary(tmp_path / place, "digits-sgd-epochs1", seed) for seed, place in enumerate(places)]
    assert float(row["ours"]) == pytest.approx(100 * fmean(found["test_accuracy"] for found in both), abs=1e-3)
    again = invoke("reproduce", own, *arguments[:-4], "--known", tmp_path, "-o", tmp_path / "none")
    assert "4 runs are in" in again.stdout


def test_only_says_what_is_trained_and_the_table_keeps_the_runs_that_are_there(tmp_path):
    own = tmp_path / "own.toml"
    rows = ("{ recipe = 'digits-sgd' }", "{ recipe = 'digits-thrifty' }", "{ recipe = 'digits-sam' }")
    own.write_text(f"[t]\nagainst = 'digits-sgd'\nrows = [{', '.join(rows)}]\n")
    arguments = ("reproduce", own, "--set", "train.max_steps=1", "--rounds", 0, *QUICK[:4], "-o", tmp_path)

    def shown():
        text = (tmp_path / "t-max_steps1.csv").read_text()
        return {row["row"]: (row["n"], row["ours"]) for row in csv.DictReader(text.splitlines())}

    def expected(name, seeds):
        return str(seeds), f"{fmean(accuracy(tmp_path, f'{name}-max_steps1', seeds)):.6g}"

    invoke(*arguments, "--only", "digits-sgd", "--seeds", 2)
    assert shown() == {"digits-sgd": expected("digits-sgd", 2)}  # rows that have no run are left out
    done = invoke(*arguments, "--only", "digits-sam")
    assert "1 runs: 0 finished, 0 to go on with, 1 new" in done.stdout
    both = {"digits-sgd": expected("digits-sgd", 2), "digits-sam": expected("digits-sam", 1)}
    assert shown() == both
    assert list(shown()) == ["digits-sgd", "digits-sam"]  # in the table's order
    page = (tmp_path / "t-max_steps1.html").read_text()
    assert all(f"<span>{name}</span>" in page for name in both)
    assert "<span>digits-thrifty</span>" not in page
    file = tmp_path / "digits-sgd-max_steps1-seed1" / "recipe.json"  # a run that is not of the row any more
    recipe = json.loads(file.read_text())
    file.write_text(json.dumps({**recipe, "optimizer": {**recipe["optimizer"], "lr": 0.3}}))
    invoke(*arguments, "--only", "digits-sam")
    assert shown() == {**both, "digits-sgd": expected("digits-sgd", 1)}


def test_a_setting_of_some_rows_leaves_the_files_of_the_unchanged_table_as_they_are(tmp_path):
    """The first row is not among them: SGD has no rho."""
    own = tmp_path / "own.toml"
    rows = ("digits-sgd", "digits-sam")
    own.write_text(f"[t]\nrows = [{', '.join(f'{{ recipe = {name!r}, set = {SHORT!r} }}' for name in rows)}]\n")
    arguments = ("reproduce", own, "--rounds", 0, *QUICK[:4], "-o", tmp_path)
    invoke(*arguments)
    before = {name: (tmp_path / name).read_text() for name in ("t.md", "t.csv", "t.html")}
    changed = {name.replace(".", "-rho0.3.") for name in before}
    for more in ((), ("--only", "digits-sam")):
        text = invoke(*arguments, "--set", "sam.rho=0.3", *more).stdout
        assert str(tmp_path / "t-rho0.3.html") in text.replace("\n", "")
        assert {name: (tmp_path / name).read_text() for name in before} == before
        written = {path.name for path in tmp_path.iterdir() if path.is_file()} - {own.name}
        assert written == {*before, *changed}
        assert all(f"<span>{name}-max_steps1</span>" in (tmp_path / "t-rho0.3.html").read_text() for name in rows)


def test_a_figure_and_a_page_leave_those_of_other_settings_and_tables_as_they_are(tmp_path):
    row = f"rows = [{{ recipe = 'digits-sam', set = {SHORT!r} }}]\n"
    for name, head in (("t", "[t]\n"), ("u", "[u]\n"), ("f", "[f]\nshows = 'curves'\n")):
        (tmp_path / f"{name}.toml").write_text(head + row)
    output = tmp_path / "runs"

    def written():
        return {str(file.relative_to(output)): file.read_text() for file in output.rglob("*.html")}

    before = {}
    for name, *more in (("t",), ("u",), ("f",), ("f", "--set", "sam.rho=0.3")):
        invoke("reproduce", tmp_path / f"{name}.toml", *more, "--rounds", 0, *QUICK[:4], "-o", output)
        assert before.items() <= written().items()
        before = written()
    curves = "resnet-small-on-digits.html"
    assert set(before) == {"t.html", "u.html", f"f/{curves}", f"f-rho0.3/{curves}"}
    invoke("reproduce", tmp_path / "f.toml", "--set", "sam.rho=0.3", "--from", output, "-o", tmp_path / "drawn")
    assert [path.name for path in (tmp_path / "drawn").iterdir()] == ["f-rho0.3"]


def test_a_table_with_earlier_rows_says_what_is_changed_in_these(tmp_path):
    """The row that is trained last has the setting as its own."""
    (tmp_path / "less.toml").write_text("extends = 'digits-sgd'\noptimizer.weight_decay = 0.0005\n")
    own, rows = tmp_path / "own.toml", {"less": str(tmp_path / "less.toml"), "digits-sgd": "digits-sgd"}
    own.write_text(f"[t]\nrows = [{', '.join(f'{{ recipe = {row!r}, set = {SHORT!r} }}' for row in rows.values())}]\n")
    settings = ("--set", "optimizer.weight_decay=0.001", *QUICK[:4], "--rounds", 0)
    for name in rows:
        invoke("reproduce", own, "--only", name, *settings, "-o", tmp_path / "runs")
    text = (tmp_path / "runs" / "t-weight_decay0.001.md").read_text()
    assert text.startswith("# t (changed: optimizer.weight_decay 0.001 instead of 0.0005)\n")
    assert re.findall(r"^\| (\S+) ", text, re.M)[2:] == [f"{name}-max_steps1" for name in rows]


def test_the_accuracy_of_validation_images_is_not_set_against_the_papers(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("[t]\nrows = [{ recipe = 'digits-sgd', paper = 50.0 }]\n")
    options = ("--epochs", 1, "--rounds", 0, *QUICK[:4], "-o", tmp_path)
    invoke("reproduce", file, *options)
    invoke("reproduce", file, *options, "--set", "data.validation=200")
    tests, validation = (
        next(csv.DictReader((tmp_path / f"t-{name}.csv").read_text().splitlines()))
        for name in ("epochs1", "validation200-epochs1")
    )
    assert float(tests["difference"]) == pytest.approx(float(tests["ours"]) - 50, abs=1e-3)
    assert validation["difference"] == ""
    assert float(validation["ours"]) > 0
    texts = [(tmp_path / f"t-{name}.md").read_text() for name in ("epochs1", "validation200-epochs1")]
    assert [text.partition(" (")[0] for text in texts] == ["# t", "# t"]
    assert ["| Difference |" in text for text in texts] == [True, False]
    assert ["| Ours, % |" in text for text in texts] == [True, False]
    assert "| Ours (validation), % |" in texts[1]


def test_a_folder_that_cannot_be_written_is_named(own):
    done = invoke("reproduce", own, "--only", "digits-sgd", "--epochs", 1, *QUICK, "-o", "/dev/null/x", code=1)
    assert "/dev/null/x" in done.stderr
    assert "cannot be written" in done.stderr


def test_runs_that_share_the_device_have_no_times_of_their_own(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text("[t]\nrows = [{ recipe = 'digits-sgd' }, { recipe = 'digits-sam' }]\n")
    arguments = ("--epochs", 1, "--rounds", 0, *QUICK[:4], "-o", tmp_path)
    invoke("reproduce", own, *arguments, "--at-once", 2)
    found = [summary(tmp_path, f"digits-{method}-epochs1") for method in ("sgd", "sam")]
    assert [s["step_ms"] for s in found] == [None, None]


def test_a_dry_run_says_which_runs_share_their_start(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text("[t]\nrows = [{ recipe = 'digits-sgd' }, { recipe = 'digits-thrifty' }]\n")
    arguments = ("reproduce", own, "--epochs", 2, *QUICK[:4], "--dry-run", "-o", tmp_path / "runs")
    assert "take less" not in invoke(*arguments).stdout
    text = invoke(*arguments, "--share-start").stdout
    assert "1 of them take less, since another takes their first steps (--share-start)" in text


@pytest.mark.slow
def test_runs_that_share_their_start_have_the_numbers_of_runs_alone(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text("[t]\nrows = [{ recipe = 'digits-sgd' }, { recipe = 'digits-thrifty' }]\n")
    arguments = ("--epochs", 2, "--rounds", 0, *QUICK[:4])
    invoke("reproduce", own, *arguments, "-o", tmp_path / "alone")
    invoke("reproduce", own, *arguments, "-o", tmp_path / "shared", "--share-start")
    one, other = (RunDirectory(tmp_path / path / "digits-thrifty-epochs2-seed0") for path in ("alone", "shared"))
    assert [m["train_loss"] for m in one.metrics()] == [m["train_loss"] for m in other.metrics()]
    assert other.read("environment.json").values["start"]["run"] == "digits-sgd-epochs2-seed0"


@pytest.mark.slow
def test_a_shared_start_is_not_called_a_run_to_go_on_with(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text("[t]\nrows = [{ recipe = 'digits-sgd' }, { recipe = 'digits-thrifty' }]\n")
    arguments = ("--epochs", 2, "--rounds", 0, *QUICK[:4], "--share-start", "-o", tmp_path)
    opened = turns.open_run

    def dies(recipe, *others, **options):
        if recipe.sam.enabled:
            raise MemoryError
        return opened(recipe, *others, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(turns, "open_run", dies)
        invoke("reproduce", own, *arguments)
    text = invoke("reproduce", own, *arguments).stdout
    assert "2 runs: 1 finished, 0 to go on with, 1 whose first steps another run has taken, 0 new" in text
    assert "wait for another" not in text


def test_the_committed_page_is_that_of_the_committed_runs(tmp_path):
    page = tmp_path / "RESULTS.md"
    invoke("reproduce", "all", "--from", "results", "--markdown", page)
    assert page.read_text().replace(str(page), "RESULTS.md") == (ROOT / "RESULTS.md").read_text()
