"""The two passes of a step whose mask has a cut: the second starts there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.passes import Closure, Passes
from sparsam.perturbation import gradient_norm
from sparsam.replay.modules import parameters_before_by_order
from sparsam.replay.replay import Replay


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
        """Run and record the first pass; its gradient ends at the cut."""
        with self.replay.first_pass():
            return closure()

    def find_scope(self, params: Sequence[Tensor]) -> None:
        """Find out which parameters lie in the suffix.

        The recorded first pass shows it; without one the order of the modules has to do. It is found once: a first
        pass that takes another path later is noticed in its second pass.
        """
        if self.replay.recording is None:
            self.replay.warn_two_step()
        if len(self._prefix) != len(params):
            prefix = self.replay.parameters_before()
            if prefix is None:
                prefix = parameters_before_by_order(self.replay.model, self.replay.cut)
            self._prefix = [p in prefix for p in params]

    def in_scope(self, params: Sequence[Tensor]) -> list[bool]:
        """Return for each parameter whether it lies in the suffix."""
        return [not p for p in self._prefix] + [True] * (len(params) - len(self._prefix))

    def begin_second(self) -> None:
        """Start the second pass, which leaves the buffers of the modules before the cut alone."""
        self._skipped = self.replay.skipped_modules()
        super().begin_second()

    def _keep_buffers(self, modules: Iterable[nn.Module]) -> None:
        super()._keep_buffers(module for module in modules if module not in self._skipped)

    def _compute_skipped(self) -> None:
        """Keep the buffers of skipped modules too: they are going to be called after all."""
        skipped, self._skipped = self._skipped, ()
        super()._keep_buffers(skipped)

    def second(self, closure: Closure, perturbed: Sequence[Tensor]) -> None:
        """Run the second pass from the cut; once more in full if it has read values that it did not have."""
        with self.replay.second_pass(perturbed, self._compute_skipped):
            closure()
        if self._read_placeholders():
            self._compute_skipped()
            self._rewind()
            closure()

    def _read_placeholders(self) -> bool:
        """Tell whether a second pass has used values that it did not have.

        A tensor that code between modules changed in place is handed out as NaN in the second pass. That is harmless
        unless the suffix uses its values, and then the gradients are NaN. Each path is checked once, because it takes
        waiting for the device.
        """
        if not self.replay.check_placeholders:
            return False
        self.replay.check_placeholders = False
        params = [p for p in self.replay.model.parameters() if p.grad is not None]
        if not params or torch.isfinite(gradient_norm(params, [p.grad for p in params], adaptive=False)):  # type: ignore[misc]
            return False
        self.replay.give_up("values from before the cut, changed in place there, are used after it")
        return True

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
