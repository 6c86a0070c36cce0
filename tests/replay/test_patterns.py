"""Models that do odd things: each step is exact by an independent oracle, and is replayed or says why it is not."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path

import patterns
import pytest
import torch
from oracle import Verdict, judge
from patterns import Pattern
from replay_models import BASE, RHO, Plain, differences, snapshot

from sparsam import SAM, SuffixMask

STEPS = 6
EXACT = {torch.float64: 1e-9, torch.float32: 1e-6}
PROVEN = [3, 3, 2, 2, 2, 2]
"""Calls of the closure in each step: the first two on a path prove it."""

AROUND = "what is computed before 'body' is used after it, and not through its input"
CHANGED = "the output of 'stem' is changed in place after it, by code between the modules"
ROOT = Path(__file__).parents[2]
ENDS = "a pass that ends at 'body' is not equal to a whole one: "
STARTS = "a pass from 'body' is not equal to a whole one: "
OTHER_LOSS = "its loss is another one"
CHANGED_INPUT = "the input of 'body' was changed after the first pass"
OTHER_VALUES = "what comes to 'body' has other values than in the first pass"
OTHER_NUMBERS = "two whole passes differ. Does the closure take another batch in each call?"
FILLED = "the input of 'body' is a list or dict, which the module may change"

REPLAYED: dict[type[Pattern], list[int]] = {
    Pattern: PROVEN,
    patterns.TwoTasks: PROVEN,
    patterns.TakesTurns: PROVEN,
    patterns.FunctionalCall: PROVEN,
    patterns.StopGradient: PROVEN,
    patterns.LateStopGradient: PROVEN,
    patterns.LateStopGradientFirst: PROVEN,
    patterns.LayersOneByOne: [3, 3, 3, 2, 2, 2],  # the first step finds out that the stem is called by its parts
    patterns.NeverCalled: PROVEN,
    patterns.NeverCalledTwice: PROVEN,
    patterns.Experts: [3, 3, 3, 3, 2, 2],  # two paths
    patterns.GateBefore: PROVEN,
    patterns.NumberAround: PROVEN,
    patterns.LateSkip: PROVEN,
    patterns.BatchChanged: PROVEN,
    patterns.TiedWithoutGradient: PROVEN,
    patterns.TokenOnSomeBatches: [3, 3, 3, 2, 2, 2],  # two paths
    patterns.StemWithoutGradient: PROVEN,
    patterns.FrozenStem: PROVEN,
    patterns.FrozenStemNoGrad: PROVEN,
    patterns.FrozenStemInference: PROVEN,
    patterns.InferenceAtTheCut: PROVEN,
    patterns.GradientInTheStem: PROVEN,
    patterns.GradientBetween: PROVEN,
    patterns.PenaltyOfTheHead: PROVEN,
    patterns.OwnFunction: PROVEN,
    patterns.Checkpointing: PROVEN,
    patterns.CutInsideCheckpoint: PROVEN,
    patterns.MovingCodesBehind: PROVEN,
    patterns.GradientsMeasuredBehind: PROVEN,
    patterns.WeightNorm: PROVEN,
    patterns.Orthogonal: PROVEN,
    patterns.WeightStandardisation: PROVEN,
    patterns.MixesBySeed: PROVEN,
    patterns.Recurrent: PROVEN,
    patterns.RecurrentState: PROVEN,
    patterns.TransformerLayers: PROVEN,
    patterns.EncoderDecoder: PROVEN,
    patterns.Scripted: PROVEN,
    patterns.Traced: PROVEN,
    patterns.SparseEdges: PROVEN,
    patterns.SparseEdgesAnew: PROVEN,
    patterns.CompressedEdgesAnew: PROVEN,
    patterns.BatchAnew: PROVEN,
    patterns.BatchWithoutNaN: PROVEN,
    patterns.Jagged: PROVEN,
    patterns.Array: PROVEN,
    patterns.MixedPrecision: PROVEN,
    patterns.ChangesPrecision: [3, 3, 2, 3, 3, 2],  # two paths
}
"""How often the closure is called in each step."""

FALLS_BACK: dict[type[Pattern], str] = {
    # ---- a rule notices it in a first pass
    patterns.SeesAView: AROUND,
    patterns.SideHead: AROUND,
    patterns.SideHeadFirst: AROUND,
    patterns.Skip: AROUND,
    patterns.SkipBeforeModules: AROUND,
    patterns.GateAround: AROUND,
    patterns.Forces: AROUND,
    patterns.ForcesAndSkip: AROUND,
    patterns.CodebookBefore: AROUND,
    patterns.PenaltyInAList: AROUND,
    patterns.PenaltiesInAList: AROUND,
    patterns.PenaltiesFromAllBlocks: AROUND,
    patterns.StateInADict: "'stem' changes a list or dict that it is given",
    patterns.StateInADictPassedOn: "'stem' changes a list or dict that it is given",
    patterns.ResultInADict: FILLED,
    patterns.ComparedAfterChange: CHANGED,
    patterns.RoutedAfterChange: CHANGED,
    patterns.CountedAfterChange: CHANGED,
    patterns.ClampedInPlace: CHANGED,
    patterns.LateSkipOfChanged: CHANGED,
    patterns.LateChange: CHANGED,
    patterns.OwnCall: "the first pass did not call 'body' where it can be seen",
    patterns.CheckpointingReentrant: "gradients were off where 'body' was called",
    patterns.CutAmidCheckpoint: "'body.0' lies inside a part that is checkpointed; cut at that part's input",
    # ---- a rule notices it in a second pass
    patterns.SharedActivation: "it calls 'stem' where the first pass did not",
    patterns.JaggedAnew: "the closure gave the model another batch in its second call",
    patterns.ArrayAnew: "the closure gave the model other arguments in its second call",
    # ---- the proof notices it
    patterns.DependsOnRequiresGrad: ENDS + OTHER_LOSS,
    patterns.PenaltyOfFeatures: ENDS + OTHER_LOSS,
    patterns.PenaltyOfAllWeights: ENDS + OTHER_LOSS,
    patterns.OwnGenerator: ENDS + OTHER_NUMBERS,
    patterns.MixesByNumPy: ENDS + OTHER_NUMBERS,
    patterns.SkipsLayersAtRandom: ENDS + "it took another path",
    patterns.EntryReplaced: STARTS + OTHER_LOSS,
    patterns.ChangedThroughData: STARTS + OTHER_VALUES,
    patterns.ChangedThroughDataAtTheCut: STARTS + CHANGED_INPUT,
    patterns.Context: "'stem' changes a list or dict that it is given",
    patterns.NotesInAList: STARTS + OTHER_LOSS,
    patterns.FeaturesFromAHook: STARTS + OTHER_LOSS,
    patterns.DetachedWeightAdded: STARTS + OTHER_VALUES,
    patterns.Generator: STARTS + OTHER_VALUES,
    patterns.LocalLearning: "'stem' computes gradients itself",
    patterns.LocalLearningBetween: "'stem' computes gradients itself, or code between the modules before 'body'",
    patterns.MovingCodesBefore: STARTS + OTHER_LOSS,
    patterns.GradientsMeasuredBefore: ENDS + "its buffer 'stem.mean' is another one",
    patterns.CountedBehind: STARTS + "its buffer 'head.count' is another one",
    patterns.SpectralNorm: STARTS + OTHER_LOSS,
    patterns.DetachedWeight: STARTS + OTHER_VALUES,
    patterns.WeightsMultiplied: STARTS + OTHER_VALUES,
    patterns.SkipInAnObject: STARTS + "RuntimeError: Trying to backward through the graph a second time",
    patterns.TermOfTheStem: STARTS + "RuntimeError: Trying to backward through the graph a second time",
}
"""What the one warning says."""

LATE = [
    patterns.LateContext,
    patterns.LateThroughData,
    patterns.LateDetachedWeight,
    patterns.LateLocalLearning,
    patterns.LateNoise,
    patterns.ContextProofStopped,
]
"""Do what the proof would notice, but only after it, or in a step in which it could not look."""

NOT_NOTICED = [patterns.LateNotes]
"""The limit of any proof: code that keeps something in Python, and begins to only after the path is trusted."""

NOTICED_BY_THE_PROOF_ALONE = [
    pattern
    for pattern, why in FALLS_BACK.items()
    if why.startswith((ENDS, STARTS))
    and "Error" not in why
    and OTHER_VALUES not in why
    and CHANGED_INPUT not in why
    and pattern is not patterns.OwnGenerator  # which the values at the cut show too
    and "another path" not in why
    and pattern is not patterns.SkipsLayersAtRandom  # the order of its calls tells too
]

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.\\w+` is deprecated")


def name_of(pattern: type[Pattern]) -> str:
    return pattern.__name__


def judged(pattern: type[Pattern], **options: bool) -> Verdict:
    torch.manual_seed(0)
    model = pattern().to(pattern.dtype)
    return judge(model, pattern.loss, pattern.cut, steps=STEPS, duplicate=pattern.duplicate, **options)


@pytest.mark.parametrize("pattern", REPLAYED, ids=name_of)
def test_it_is_exact_and_replayed(pattern):
    verdict = judged(pattern)
    assert verdict.wrong < EXACT[pattern.dtype]
    assert verdict.messages == []
    assert verdict.calls == REPLAYED[pattern]


@pytest.mark.parametrize("pattern", FALLS_BACK, ids=name_of)
def test_it_is_exact_and_one_warning_says_why_it_is_not_replayed(pattern):
    verdict = judged(pattern)
    assert verdict.wrong < EXACT[pattern.dtype]
    assert len(verdict.messages) == 1
    how = "and is no repetition of the first" if OTHER_NUMBERS in FALLS_BACK[pattern] else "exact but slower"
    unseen = "and which parameters follow .* is not seen: .* The reason"
    assert re.match(
        f"the second pass is computed in full, ({how}|{unseen}): {FALLS_BACK[pattern]}", verdict.messages[0]
    )
    assert max(verdict.calls) <= 4  # two passes, one to prove the path, one to see whether whole passes are repeatable
    assert verdict.calls[2:] == [2] * (STEPS - 2)


@pytest.mark.parametrize("pattern", LATE, ids=name_of)
def test_what_is_done_on_later_batches_only_is_noticed_too(pattern):
    verdict = judged(pattern)
    assert verdict.wrong < EXACT[pattern.dtype]
    assert len(verdict.messages) <= 1


def test_random_states_are_kept_again_once_numbers_are_drawn():
    """The step in which they are drawn for the first time is computed in full, with a warning; later ones are not."""
    verdict = judged(patterns.LateNoise)
    assert verdict.calls == PROVEN
    assert [message.partition("slower: ")[2] for message in verdict.messages] == [
        "random numbers are drawn before 'body', and were not in earlier steps"
    ]


@pytest.mark.parametrize("pattern", NOT_NOTICED, ids=name_of)
def test_what_is_not_noticed_is_told_in_the_caveats(pattern):
    assert judged(pattern).wrong > EXACT[pattern.dtype]
    assert "begins to keep something in Python" in (ROOT / "docs" / "caveats.md").read_text()


@pytest.mark.parametrize("pattern", NOTICED_BY_THE_PROOF_ALONE, ids=name_of)
def test_without_the_proof_it_would_be_wrong(pattern):
    """So the tests above can fail."""
    verdict = judged(pattern, proves=False)
    assert verdict.wrong > EXACT[pattern.dtype]


def test_no_pattern_is_forgotten():
    every = {c for c in vars(patterns).values() if inspect.isclass(c) and issubclass(c, Pattern)}
    assert every - {patterns.Rebuilt} == {*REPLAYED, *FALLS_BACK, *LATE, *NOT_NOTICED}


def test_a_term_of_the_stem_whose_graph_is_retained():
    """With retain_graph=True torch does not notice that a graph of the first pass is used a second time."""
    torch.manual_seed(0)
    model = patterns.TermOfTheStem().double()
    plain = Plain(copy.deepcopy(model), ("stem.",))
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, model.cut), **BASE)

    def closure_of(model: patterns.TermOfTheStem, zero_grad):
        def closure() -> torch.Tensor:
            zero_grad()
            loss = model.loss(0)
            loss.backward(retain_graph=True)
            return loss

        return closure

    for _ in range(STEPS):
        result = snapshot(model, opt.step(closure_of(model, opt.zero_grad)))
        expected = snapshot(plain.model, plain.step(closure_of(plain.model, plain.zero_grad)))
        assert differences(result, expected) == []


def test_gradients_that_a_stem_adds_in_place_are_seen():
    """A closure that fills gradients with zeros keeps their tensors, so a stem's own backward() replaces none."""
    torch.manual_seed(0)
    model = patterns.LateLocalLearning().double()
    plain = Plain(copy.deepcopy(model), ("stem.",))
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, model.cut), **BASE)

    def closure_of(model: Pattern, zero_grad, step: int):
        def closure() -> torch.Tensor:
            zero_grad(set_to_none=False)
            loss = model.loss(step)
            loss.backward()
            return loss

        return closure

    with pytest.warns(UserWarning, match="'stem' computes gradients itself, or code between the modules before 'body'"):
        for step in range(STEPS):
            result = snapshot(model, opt.step(closure_of(model, opt.zero_grad, step)))
            expected = snapshot(plain.model, plain.step(closure_of(plain.model, plain.zero_grad, step)))
            assert differences(result, expected) == []


def test_a_model_that_fails_by_itself_fails_with_its_own_error():
    """A tensor of inference mode cannot be saved for a backward pass, with or without SAM."""

    class Fails(Pattern):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                h = self.stem(x)
            return self.behind(h)

    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        judged(Fails)


def test_tensors_in_place_of_parameters_do_not_bring_the_prefix_into_the_mask():
    torch.manual_seed(0)
    model = patterns.FunctionalCall().double()
    opt = SAM(model.parameters(), torch.optim.SGD, rho=RHO, mask=SuffixMask(model, "body"), lr=0.1)

    def closure():
        opt.zero_grad()
        loss = model.loss(0)
        loss.backward()
        return loss

    opt.step(closure)
    moved = [name for (name, _), m in zip(model.named_parameters(), opt.masks(), strict=True) if m.all()]
    assert moved == ["body.weight", "body.bias", "head.weight", "head.bias"]
