"""Random programs, cut anywhere: replayed or not, each step is the oracle's, or an error says why there is none."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from textwrap import indent

import pytest
from oracle import judge
from programs import STEPS, Case, Witness, draw

from sparsam.errors import UserError

QUICK, ALL, CHUNK = 100, 2000, 20
EXACT = 1e-8


@dataclass
class Result:
    """What became of a program."""

    wrong: float = 0.0
    fallbacks: int = 0  # warnings that a pass is computed in full
    replayed: bool = False  # whether the last step called fewer modules in its second pass
    error: str = ""  # not one that tells a user what to do

    @property
    def fault(self) -> str:
        """What must not be."""
        if self.error or self.fallbacks > 1:
            return self.error or f"{self.fallbacks} warnings"
        return f"differs by {self.wrong:.2g}" if self.wrong >= EXACT else ""


# Programs that were once wrong, or ended with a raw error: with seed 1 x.sum() > 0 holds on the last batches only.
FOUND = {
    "a branch of later steps changes data in place": "h = self.p0(x)\nif x.sum() > 0:\n    h.data.mul_(1.5)",
    "a branch of later steps moves a buffer": (
        "h = self.p0(x - self.mean)\nif x.sum() > 0:\n    self.mean = self.mean.lerp(x.mean(0), 0.1)"
    ),
    "a view without gradient": "h = self.p0(x) + 1\nwith torch.no_grad():\n    h = h.T\nh = self.p2(h)",
}


@functools.cache
def result_of(seed: int, *, proves: bool = True) -> Result:
    return result_of_case(draw(seed), proves=proves)


def result_of_case(case: Case, *, proves: bool = True) -> Result:
    model = case.build()
    witness = Witness(case, model)
    try:
        verdict = judge(model, witness.loss, case.cut, steps=STEPS, proves=proves)
    except UserError as error:
        return Result(error="" if len(str(error)) > 20 else f"says no more than {error!r}")
    except Exception as error:
        return Result(error="" if witness.refused_by_torch() else f"ends with {error!r}")
    fallbacks = sum("in full" in message for message in verdict.messages)
    replayed = not fallbacks and verdict.calls[-1] == 2 and witness.saved > 0
    return Result(max(verdict.wrong, witness.wrong_buffers), fallbacks, replayed)


def check(seeds: range) -> None:
    faults = {seed: result.fault for seed in seeds if (result := result_of(seed)).fault}
    shown = [f"{fault}\n{draw(seed)}" for seed, fault in faults.items()]
    assert not faults, f"{len(faults)} of {len(seeds)} programs\n\n" + "\n\n".join(shown)


@pytest.mark.parametrize("first", range(0, QUICK, CHUNK))
def test_programs_are_exact(first):
    check(range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, ALL, CHUNK))
def test_many_programs_are_exact(first):
    check(range(first, first + CHUNK))


@pytest.mark.parametrize("lines", FOUND.values(), ids=FOUND)
def test_programs_that_were_found(lines):
    source = indent(f"{lines}\nreturn self.head(self.p1(h).tanh()), []", "    ")
    kinds = dict.fromkeys(("p0", "p1", "p2"), "Linear")
    result = result_of_case(Case(kinds, f"def forward(self, x, odd):\n{source}", seed=1, cut="p1"))
    assert not result.fault


def test_a_third_of_the_programs_is_replayed():
    assert sum(result_of(seed).replayed for seed in range(QUICK)) >= QUICK / 3


@pytest.mark.slow
def test_without_the_proof_programs_are_silently_wrong():
    silent = (
        seed
        for seed in range(5 * QUICK)
        if (result := result_of(seed, proves=False)).wrong >= EXACT and not result.fallbacks
    )
    assert len(list(itertools.islice(silent, 3))) == 3
