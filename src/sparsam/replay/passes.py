"""The two passes of a step whose mask has a cut: the second starts there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.passes import Closure, Passes
from sparsam.replay.modules import parameters_before_by_order
from sparsam.replay.proof import Outcome, difference, is_repeatable
from sparsam.replay.recording import Recording
from sparsam.replay.replay import Path, Replay

REMEDY = (
    "Does code beside the modules keep, change or draw something? Put it into a module, choose a cut after it, or use "
    "a mask without a cut"
)


def passes_for(model: nn.Module | None, network: nn.Module | None, cut: str | None) -> Passes:
    """Return how the passes of a step are run: in full where there is no cut. See :class:`ReplayedPasses`."""
    return Passes(model) if network is None or cut is None else ReplayedPasses(model, network, cut)


class ReplayedPasses(Passes):
    """Runs the second pass from a cut, where replay allows it, and in full elsewhere.

    Args:
        model: Whose buffers move once a step and whose random numbers are drawn once.
        network: The network that is cut: the model, or the DistributedDataParallel around it.
        cut: The name of the module whose input is the cut.
    """

    def __init__(self, model: nn.Module | None, network: nn.Module, cut: str) -> None:
        super().__init__(model)
        self.replay = Replay(network, cut)
        self._prefix: list[bool] = []  # which of the optimizer's parameters lie before the cut
        self._skipped: Iterable[nn.Module] = ()

    def first(self, closure: Closure) -> Any:
        """Run and record the first pass; its gradient ends at the cut, where that is proven to be right."""
        with self.replay.first_pass():
            loss = closure()
        self.replay.learn(loss)
        return loss

    def find_scope(self, params: Sequence[Tensor]) -> None:
        """Find out which parameters lie in the suffix.

        The recorded first pass shows it; without one the order of the modules has to do. A parameter that once was used
        before the cut stays in the prefix.
        """
        if self.replay.recording is None:
            self.replay.warn_two_step()
        prefix = self.replay.parameters_before()
        if prefix is None and len(self._prefix) != len(params):
            prefix = parameters_before_by_order(self.replay.model, self.replay.cut)
        if prefix is not None:
            known = self._prefix + [False] * (len(params) - len(self._prefix))
            self._prefix = [k or p in prefix for k, p in zip(known, params, strict=True)]

    def in_scope(self, params: Sequence[Tensor]) -> list[bool]:
        """Return for each parameter whether it lies in the suffix."""
        return [not p for p in self._prefix] + [True] * (len(params) - len(self._prefix))

    def begin_second(self) -> None:
        """Start the second pass, which leaves the buffers of the modules before the cut alone."""
        self._skipped = self.replay.skipped_modules()
        super().begin_second()

    def _keep_buffers(self, modules: Iterable[nn.Module]) -> None:
        super()._keep_buffers(module for module in modules if module not in self._skipped)

    def _keep_skipped(self) -> None:
        """Keep the buffers of skipped modules too: they are going to be called after all."""
        skipped, self._skipped = self._skipped, ()
        super()._keep_buffers(skipped)

    # ------------------------------------------------------------------------------------ the second pass

    def second(self, closure: Closure, perturbed: Sequence[Tensor]) -> None:
        """Run the second pass from the cut if the path is proven; else in full, and prove the path."""
        recording, self.replay.recording = self.replay.recording, None
        path = None if recording is None else self.replay.path(recording, perturbed)
        if recording is None or path is None:
            recording = None  # and the graph that it holds
            self._keep_skipped()
            closure()
        elif path.proven == 2:
            self._replayed(closure, recording)
        else:
            self._keep_skipped()
            self._prove(closure, recording, path, closure())

    def _replayed(self, closure: Closure, recording: Recording) -> None:
        try:
            with self.replay.second_pass(recording, self._keep_skipped):
                closure()
        except Exception as error:  # of replay or of the closure: a whole pass tells
            self.replay.give_up(f"replay from {recording.cut!r} ended with {type(error).__name__}: {error}. {REMEDY}")
            self._keep_skipped()
            self._start_again()
            closure()

    def _prove(self, closure: Closure, recording: Recording, path: Path, loss: Any) -> None:
        """Prove the next part of a path; the gradients are afterwards those of the whole pass that was just made.

        First, that a pass may end at the cut; in the next step on this path, that one may start there.
        """
        model = self.replay.model
        cut, but = recording.cut, set[str]()
        result = whole = Outcome.of(model, loss)
        rough = recording.autocast or _uses_tf32(model)
        if path.proven == 0:
            how, prefix = "a pass that ends at", path.before.parameters
            but = {name for name, p in model.named_parameters() if p in prefix}

            def attempt() -> Any:
                with self.replay.first_pass(proof=True):
                    return closure()
        else:
            how = "a pass from"

            def attempt() -> Any:
                with self.replay.second_pass(recording, lambda: None):
                    return closure()

        if self.replay.distributed:  # gradients of this process alone are compared
            whole = self._outcome(closure)
        try:
            other = self._outcome(attempt)
            reason = difference(whole, other, rough=rough, but=but)
            if reason:
                again = self._outcome(closure)
                if is_repeatable(whole, again, rough=rough):
                    reason = difference(whole, other, rough=rough, but=but, noise=again)
                else:
                    reason = "two whole passes differ: random numbers that torch does not know?"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        self.replay.recording = None
        result.put_back(model)
        if reason:
            self.replay.give_up(f"{how} {cut!r} is not equal to a whole one: {reason}. {REMEDY}")
        else:
            path.proven += 1

    def _outcome(self, run: Callable[[], Any]) -> Outcome:
        """Run a pass once more, from where the second pass started."""
        self._start_again()
        with self.replay.alone(), torch.enable_grad():
            return Outcome.of(self.replay.model, run())

    def _start_again(self) -> None:
        for buffers in self._buffers:
            buffers.restore()
        self._rewind()
        torch.clear_autocast_cache()

    def forget(self) -> None:
        """Let go of the recording of a first pass that no second one followed."""
        self.replay.recording = None
        self._skipped = ()

    def state(self) -> dict[str, Any]:
        """Return which parameters lie before the cut."""
        return {"prefix": list(self._prefix)}

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""
        self._prefix = list(state["prefix"])


def _uses_tf32(model: nn.Module) -> bool:
    allowed = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return allowed and any(p.is_cuda for p in model.parameters())
