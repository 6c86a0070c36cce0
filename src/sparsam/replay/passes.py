"""The two passes of a step whose mask has a cut: the second starts there."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsam.distributed.groups import group_size
from sparsam.distributed.replicas import Replicas, find_ddp
from sparsam.errors import CaptureError
from sparsam.passes import Closure, Passes, is_capturing
from sparsam.perturbation import Saved
from sparsam.replay.modules import parameters_before_by_order, unwrap
from sparsam.replay.proof import Outcome, difference, is_repeatable, matched, named
from sparsam.replay.recording import Path, Recording
from sparsam.replay.replay import Replay
from sparsam.replay.reuse import OtherValuesError

GROWTH = 2.0  # a path is proven again if rho has grown by this factor since

REMEDY = (
    "Does code beside the modules keep, change or draw something? Put it into a module, choose a cut after it, or use "
    "a mask without a cut"
)


NOT_REPEATABLE = (
    "two whole passes differ. Does the closure take another batch in each call? Take it before step(closure). Or "
    "something keeps a state between passes that is no buffer (a list, a counter), changes its input or weights in "
    "place, or draws random numbers by Python, NumPy or a generator of its own (use torch's default)"
)


class NotProvenError(Exception):
    """A shorter pass was not the one that was to be proven."""


def passes_for(model: nn.Module | None, network: nn.Module | None, cut: str | None, replicas: Replicas) -> Passes:
    """Return how the passes of a step are run: in full where there is no cut. See :class:`ReplayedPasses`."""
    if network is None or cut is None:
        return Passes(network if model is None else model, replicas.first_pass)
    if replicas.ddp is not None and find_ddp(network) is None and unwrap(replicas.ddp) is unwrap(network):
        network = replicas.ddp  # the mask was given what is inside
    return ReplayedPasses(network if model is None else model, network, cut, replicas)


class ReplayedPasses(Passes):
    """Runs the second pass from a cut, where replay allows it, and in full elsewhere.

    Args:
        model: Whose buffers move once a step and whose random numbers are drawn once.
        network: The network that is cut: the model, or the DistributedDataParallel around it.
        cut: The name of the module whose input is the cut.
        replicas: The processes that train it.
    """

    def __init__(self, model: nn.Module | None, network: nn.Module, cut: str, replicas: Replicas) -> None:
        super().__init__(model)
        shared = self._inventory if model is not None and unwrap(model) is unwrap(network) else None
        self.replay, self.replicas = Replay(network, cut, shared), replicas
        self.known: Mapping[Tensor, bool] = {}  # whether a parameter lies before the cut, as far as a pass has shown
        self._looked = False  # whether a base step without a closure was seen
        self._is_alone = False  # whether the latest first pass has exchanged no gradients
        self._prefix: list[bool] = []  # which of the optimizer's parameters lie before the cut
        self._skipped: Iterable[nn.Module] = ()
        self._named: dict[str, Tensor] = {}  # the parameters whose gradients a proof compares ...
        self._own: set[Tensor] = set()  # ... and those of the optimizer

    def first(self, closure: Closure) -> Any:
        """Run and record the first pass; its gradient ends at the cut, where that is proven to be right."""
        with self.replicas.first_pass(), self.replay.first_pass(self._before_first):
            loss = closure()
        self._is_alone = self.replay.exchanges_alone
        self.replay.learn(loss)
        recording = self.replay.recording
        if recording is not None and (path := self.replay.known_path(recording)) is not None:
            self._check_capture(recording, path)  # before masks and ascents keep what no graph has computed
        return loss

    def find_scope(self, params: Sequence[Tensor]) -> None:
        """Find out which parameters lie in the suffix; let their gradients be the means over all replicas.

        The recorded first pass shows it; without one what was seen before, or the order of the modules, has to do. A
        parameter that once was used before the cut stays in the prefix. Several replicas settle it once, in their first
        step: what any of them uses before the cut.
        """
        ddp = self.replicas.ddp if self.replay.distributed else None
        together, new = ddp is not None and group_size(ddp.process_group) > 1, len(self._prefix) != len(params)
        prefix, guessed = self.replay.parameters_before(), 0
        if prefix is None and new:
            by_order = parameters_before_by_order(self.replay.model, self.replay.cut)
            prefix = frozenset(p for p in params if self.known.get(p, p in by_order))
            guessed = self._unknown(params)
        if guessed:
            self.replay.warn_by_order(f"of {guessed} parameters" if self.known else "parameters")
        elif self.replay.recording is None:
            self.replay.warn_two_step()
        if prefix is not None and (new or not together):
            known = self._prefix + [False] * (len(params) - len(self._prefix))
            self._prefix = [k or p in prefix for k, p in zip(known, params, strict=True)]
            if together:
                self.replicas.check_uneven("a cut")
                self._prefix = self.replicas.any(self._prefix, params[0].device)
        if together and (new or self.replay.settled is None):
            self.replay.settled = frozenset(p for p, before in zip(params, self._prefix, strict=True) if not before)
        if self._is_alone and not self.replicas.local:
            self.replicas.average_gradients(p for p, before in zip(params, self._prefix, strict=True) if not before)
        self._is_alone = False

    def _unknown(self, params: Sequence[Tensor]) -> int:
        """Return of how many parameters it is not known whether they lie before the cut."""
        unknown = set(self.replay.model.parameters()).difference(self.known)
        return sum(p.requires_grad and p in unknown for p in params)

    def base_step_without_closure(self, params: Sequence[Tensor]) -> None:
        """Say already now that nothing will be replayed, unless the first pass has more to say."""
        if self.known and not self._looked:
            self._looked = True  # once: walking a model takes time
            if not self._unknown(params):
                self.replay.warn_two_step()

    def in_scope(self, params: Sequence[Tensor]) -> list[bool]:
        """Return for each parameter whether it lies in the suffix."""
        return [not p for p in self._prefix] + [True] * (len(params) - len(self._prefix))

    def _keep_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Keep the buffers of all modules but those before the cut, which the second pass leaves alone."""
        self._skipped = self.replay.skipped_modules()
        super()._keep_buffers(module for module in modules if module not in self._skipped)

    def _keep_skipped(self) -> None:
        """Keep the buffers of skipped modules too: they are going to be called after all."""
        skipped, self._skipped = self._skipped, ()
        super()._keep_buffers(skipped)

    # ------------------------------------------------------------------------------------ the second pass

    def second(self, closure: Closure, params: Sequence[Tensor], perturbed: Sequence[Saved], radius: float) -> None:
        """Run the second pass from the cut if the path is proven; else in full, and prove the path."""
        recording, self.replay.recording = self.replay.recording, None
        tensors = [p for saved in perturbed for p in saved.tensors]
        path = None if recording is None else self.replay.path(recording, tensors)
        if path is not None and not self._moved <= path.moved:
            path.moved |= self._moved  # the whole second pass reads buffers that no proof has seen moved
            path.proven = min(path.proven, 1)
        if path is not None and radius > GROWTH * path.radius:
            path.proven = min(path.proven, 1)  # what weights do before the cut may be too little to see at first
        if recording is not None and path is not None:
            self._check_capture(recording, path)
            if not is_capturing():
                self.replay.latest.append(path)
        if recording is None or path is None:
            recording = None  # and the graph that it holds
            self._keep_skipped()
            closure()
        elif not self.replay.proves and path.proven < 2:
            path.proven, path.radius = 2, math.inf
            self._whole(closure)
        elif path.proven == 2:
            self._replayed(closure, recording)
        elif path.proven == 1 and not _has_moved(perturbed):
            self._whole(closure)  # at w, where nothing can be proven of w + eps
        else:
            self._named, self._own = named(self.replay.model, params), set(params)
            prove = self._prove_second if path.proven else self._prove_first
            prove(closure, recording, path)
            path.radius = max(path.radius, radius) if path.proven == 2 else path.radius

    def _check_capture(self, recording: Recording, path: Path) -> None:
        """Refuse to capture a step that has to prove its path, or that takes another one than the steps before it."""
        another = path.proven < 2 or any(latest is not path for latest in self.replay.latest)
        if another and is_capturing():
            raise CaptureError(
                f"a step that is captured in a CUDA graph must take the path to {recording.cut!r} that the two steps "
                f"before it took and proved, but takes a new one: take these steps without a graph"
            )

    def _replayed(self, closure: Closure, recording: Recording) -> Any:
        try:
            with self.replay.second_pass(recording, self._keep_skipped):
                return closure()
        except Exception as error:  # of replay or of the closure: a whole pass tells
            reason = f"replay from {recording.cut!r} was given up: {_shown(error)}. {REMEDY}"
        del recording  # and the graph that it holds
        loss = self._whole(closure)
        self.replay.give_up(reason)
        return loss

    def _prove_first(self, closure: Closure, recording: Recording, path: Path) -> None:
        """Run a whole pass, and another that ends at the cut; compare loss and gradients of the suffix."""
        prefix = path.before.parameters
        self._keep_skipped()
        result = self._outcome(closure())

        def shorter() -> Any:
            with self.replay.first_pass(self._before_first, proof=True) as shortened:
                loss = closure()
            if shortened.path is not path or shortened.open:
                raise NotProvenError(shortened.obstacle or "it took another path")
            but.update(self._growing(path))
            return loss

        but = {name for name, p in self._named.items() if p in prefix}
        whole = None if self.replay.distributed else result
        reason = self._compare(closure, shorter, whole, recording, but, up_to_scale=True)
        self.replay.recording = None
        result.put_back(self._named)
        self._conclude(path, reason, f"a pass that ends at {recording.cut!r}")

    def _prove_second(self, closure: Closure, recording: Recording, path: Path) -> None:
        """Run a pass from the cut, and a whole one, whose gradients stay; compare loss and all gradients."""

        def shorter() -> Any:
            with self.replay.second_pass(recording, self._keep_skipped) as reuse:
                loss = closure()
            if reuse.stopped:
                raise NotProvenError(reuse.stopped)
            return loss

        reason = self._compare(closure, shorter, None, recording, self._growing(path))
        if self.replay.distributed:
            self._whole(closure)  # this time with the other processes
        self._conclude(path, reason, f"a pass from {recording.cut!r}")

    def _growing(self, path: Path) -> set[str]:
        """Name weights that somebody else trains, whose gradients the closure does not clear: no two passes agree."""
        return {name for name, p in self._named.items() if p in path.uncleared and p not in self._own}

    def _compare(
        self,
        closure: Closure,
        shorter: Closure,
        whole: Outcome | None,
        recording: Recording,
        but: Collection[str],
        *,
        up_to_scale: bool = False,
    ) -> str:
        """Say in what a shorter pass differs from a whole one; nothing if it does not. The whole one is run last."""
        rough, error = bool(recording.autocast) or _uses_tf32(self.replay.model), ""
        try:
            self._start_again()
            with self.replay.alone():
                other = self._outcome(shorter())
        except Exception as exception:
            error = _shown(exception)
        if whole is None:
            with self.replay.alone():
                whole = self._outcome(self._whole(closure))
        if error:
            return error
        if up_to_scale:
            other = matched(whole, other, but)
        reason = difference(whole, other, rough=rough, but=but)
        if reason:
            with self.replay.alone():
                again = self._outcome(self._whole(closure))
            if not is_repeatable(whole, again, rough=rough, but=but):
                return NOT_REPEATABLE
            reason = difference(whole, other, rough=rough, but=but, noise=again)
        return reason

    def _outcome(self, loss: Any) -> Outcome:
        """Return what a pass has left, in buffers too: in those that are kept, because it may have moved them."""
        assert self.model is not None
        names = {module: name for name, module in self.model.named_modules()}
        kept = [place for buffers in self._buffers for place in buffers.places if place.module in names]
        kept = [place for place in kept if place.name in place.module._buffers]
        buffers = {f"{names[module]}.{name}".lstrip("."): module._buffers[name] for module, name, _ in kept}
        return Outcome.of(self._named, {name: b for name, b in buffers.items() if b is not None}, loss)

    def _conclude(self, path: Path, reason: str, what: str) -> None:
        if reason:
            remedy = "" if reason == NOT_REPEATABLE else f". {REMEDY}"
            self.replay.give_up(f"{what} is not equal to a whole one: {reason}{remedy}", exact=reason != NOT_REPEATABLE)
        else:
            path.proven += 1

    def _whole(self, closure: Closure) -> Any:
        """Run a whole pass from where the second pass started."""
        self._keep_skipped()
        self._start_again()
        return closure()

    def _start_again(self) -> None:
        for buffers in self._buffers:
            buffers.restore()
        self._rewind()
        torch.clear_autocast_cache()

    def forget(self) -> None:
        """Let go of the recording of a first pass that no second one followed."""
        self.replay.recording = None
        self._skipped, self._is_alone = (), False

    def state(self) -> dict[str, Any]:
        """Return which parameters lie before the cut."""
        return {"prefix": list(self._prefix)}

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned; a resumed run proves its paths anew."""
        self.replay.forget_paths()
        self._prefix = list(state.get("prefix", []))


def _has_moved(perturbed: Sequence[Saved]) -> bool:
    """Tell whether any weight has moved: not if rho is 0, or the gradient zero or not finite. Waits for the device."""
    pairs = [pair for saved in perturbed for pair in zip(saved.tensors, saved.copies, strict=True)]
    return not all(torch.equal(p, w) for p, w in pairs)


def _uses_tf32(model: nn.Module) -> bool:
    allowed = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return allowed and any(p.is_cuda for p in model.parameters())


def _shown(error: Exception) -> str:
    """Return the first line of an error's message, after its type where that is not replay's own."""
    if isinstance(error, (NotProvenError, OtherValuesError)):
        return str(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
