"""benchmarks/front_page.py: what it does without runs, with a single seed and without markers."""

from __future__ import annotations

import pytest
from committed import front_page
from front_page import METHODS, SAM, SGD, Measured

ONE = Measured("one", "SSAM-F", 2.0, None, (0.8,))
TWO = Measured(SGD, "SGD", 1.0, None, (0.5, 0.7))


def test_methods_without_runs_are_left_out():
    without = {"none": "cifar10-resnet18-sgd", SAM: METHODS[SAM]}
    assert [method.name for method in front_page.measure(without)] == [SAM]


def test_a_single_seed_has_no_interval():
    rows = front_page.table([TWO, ONE]).splitlines()
    assert rows[2] == "| SGD | 1.00 | 60.00 ± 14.14 | 2 | – | – |"
    assert rows[3] == "| one | 2.00 | 80.00 | 1 | +20.00 (–) | – |"
    assert ONE.interval == (ONE.mean, ONE.mean)


def test_the_interval_of_a_mean_is_that_of_the_t_distribution():
    assert TWO.mean == pytest.approx(60)
    assert TWO.interval == pytest.approx((60 - 12.706205 * 10, 60 + 12.706205 * 10))  # 10: the standard error


def test_a_page_needs_the_markers():
    page = f"before\n{front_page.START}old\n{front_page.END}\nafter\n"
    assert front_page.readme(page, [TWO]).endswith("| – | – |\n\n<!-- end of results -->\nafter\n")
    with pytest.raises(SystemExit, match=r"README\.md must have the lines"):
        front_page.readme("no markers", [TWO])
