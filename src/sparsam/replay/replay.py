"""Replay: what lies before the cut is not computed twice.

A *cut* is the input of one module. What comes before it is the *prefix*, what follows it the *suffix*. If every
perturbed weight lies in the suffix, then the prefix has the same weights, inputs and random numbers in both passes of a
SAM step. So its activations and its graph can be kept:

====== ================================== ======================================================
pass   forward                            backward
====== ================================== ======================================================
first  everything                         the suffix only: the cut is detached
second the suffix only, from the recorded the suffix through its new graph, then the prefix
       input                              through the graph that the first pass left
====== ================================== ======================================================

The gradient is that of the plain masked step, bit for bit. The cost is 1 + f, with f the suffix' fraction of a pass.
All this happens inside an ordinary closure: in both passes calls of modules go through this package
(:mod:`sparsam.replay.calls`), and between steps the model is as it was.

In the second pass a module of the prefix returns what it returned in the first. The module at the cut is called with
the recorded input.

Each new *path* to the cut is proven first (:mod:`sparsam.replay.proof`), in its first two steps. A path is what can
differ from step to step: the modules that are called, arguments that are no tensors, parameters that code between the
modules uses, what is trained, and the dtype of autocast. Whatever does not fit, or is not proven, is computed in full
in the second pass: exact all the same, and one warning says why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from sparsam.distributed.shards import any_dtensor, fsdp_modules
from sparsam.errors import warn
from sparsam.inventory import Inventory, is_compiled, modules_of
from sparsam.randomness import RngState
from sparsam.replay.autograd_graph import is_parameter, node_of, parameters_of, reachable_nodes, tensors_in
from sparsam.replay.calls import intercepted
from sparsam.replay.modules import Places, places_of, unwrap
from sparsam.replay.recording import Before, EndOfGradient, Path, Recorder, Recording, runs_distributed, sums_of
from sparsam.replay.reuse import Reuse

SHARDED = (
    "the model is sharded (fully_shard, tensor parallelism), and gathers its weights anew in each pass; with "
    "DistributedDataParallel the second pass starts at the cut"
)
CROSSED = (
    "what is computed before {cut!r} is used after it, and not through its input; find_cuts(model, closure) lists "
    "where the model can be cut"
)
TWO_STEP = "only step(closure) can start it at the cut, first_step() and perturbed() cannot"
UNSEEN = "only step(closure) sees which modules are called, first_step() and perturbed() do not"
MAX_NEW_PATHS, STEPS = 16, 100  # a model with more new paths in so many steps is not replayed


class Replay:
    """Takes the two passes of a step through a model, the second from a cut.

    Args:
        model: Any module whose parts are called by Python code. Of a DistributedDataParallel, its inside.
        cut: The name of the module whose input is the cut.
        inventory: Of the model, if the caller has one.
    """

    def __init__(self, model: nn.Module, cut: str, inventory: Inventory | None = None) -> None:
        self.wrapper, self.model, self.cut = model, unwrap(model), cut
        self.distributed = isinstance(model, DistributedDataParallel)
        self.recording: Recording | None = None
        self.settled: frozenset[Tensor] | None = None  # the suffix, where other processes have agreed to it
        self.proves = True  # whether new paths are proven; tests of the other rules switch it off
        self.latest: deque[Path] = deque(maxlen=2)  # paths of the latest steps
        self._paths: dict[tuple[Any, ...], Path] = {}
        self._new: deque[int] = deque(maxlen=MAX_NEW_PATHS + 1)  # steps in which a path was new
        self._steps = 0
        self._places: Places | None = None
        self._ahead: list[tuple[str, nn.Module]] = []  # modules before the cut, from the next step on
        self._keeps_random: bool | None = None  # whether random numbers were ever drawn before the cut, as far as known
        self._inventory = inventory or Inventory(self.model)
        self._skipped: dict[Hashable, set[nn.Module]] = {}  # modules before the cut, by what is called
        self._equal_copies = False  # whether the closure makes its batch anew in each call, with the same values
        self._off: str | None = None  # why replay is not even tried
        self._sharded = False  # as the latest first pass found the model
        self._by_name: dict[str, nn.Parameter] = {}  # the parameters of a sharded model, between passes
        self.consequence = ""  # of second passes that are computed in full, in words: a part of the warning
        self._warned = False
        if self.distributed and self.wrapper.static_graph:
            self._off = "DistributedDataParallel(static_graph=True) allows one way through the graph only"

    def __getstate__(self) -> dict[str, Any]:
        # Identities of parameters and whatever a step left do not travel.
        nothing: dict[str, Any] = dict.fromkeys(("recording", "settled", "_places"))
        return {
            **self.__dict__,
            **nothing,
            **{"latest": deque(maxlen=2), "_paths": {}, "_ahead": [], "_by_name": {}, "_skipped": {}},
        }

    @property
    def exchanges_alone(self) -> bool:
        """Whether only the last pass of a step exchanges gradients with other processes, replayed or not."""
        return self.distributed and not self.wrapper.static_graph

    def alone(self) -> AbstractContextManager[Any]:
        """Let a pass exchange no gradients with other processes."""
        return self.wrapper.no_sync() if self.exchanges_alone else nullcontext()  # type: ignore[operator]

    # ------------------------------------------------------------------------------------------ first pass

    @contextmanager
    def first_pass(self, start: RngState, *, proof: bool = False) -> Iterator[Recording]:
        """Record the block's forward pass, and let its backward pass end at the cut.

        Args:
            start: The states of torch's generators, as they are now.
            proof: End it there although the path is not proven yet.
        """
        if self._ahead and self._places and not proof:
            self._places = self._places._replace(before=self._ahead)
            self._ahead = []
        self._inventory.look()
        sharded = fsdp_modules(self._inventory.modules)
        for module in sharded:
            module.reshard()  # what was gathered stands in for the parameters
        params = self._inventory.parameters
        self._sharded = bool(sharded) or any_dtensor(params)
        devices = frozenset([p.device for p in params])
        modes = self.model.training, self._where().cut.training
        trained = (*[p.requires_grad for p in params], *modes)
        recording = Recording(self.cut, devices, (self._inventory.changes, trained), start)
        if self._sharded:
            self._by_name = dict(self.model.named_parameters(remove_duplicate=False))
            recording.stay_open(SHARDED)
        if self._off:  # what lies before the cut is still looked at
            recording.stay_open(self._off)
        reach, keeps_random = partial(self._reach, proof=proof), self._keeps_random is not False
        recorder = Recorder(recording, reach, params, keeps_random)
        with self.alone(), self._intercepted(recorder):
            yield recording
        for hook in recording.hooks:
            hook.remove()
        if recording.input is not None:
            self._keeps_random = self._keeps_random or recording.draws
        self.recording = recording
        self._steps += not proof

    def parameters_before(self) -> frozenset[Tensor] | None:
        """Return the parameters that lie before the cut; None if the first pass was not seen to come to it."""
        before = self.recording.before if self.recording else None
        return None if before is None else before.parameters

    def skipped_modules(self) -> set[nn.Module]:
        """Return the modules that the second pass does not call."""
        recording = self.recording
        if recording is None or recording.open:
            return set()
        before, after = tuple([call.name for call in recording.calls]), frozenset((recording.cut, *recording.suffix))
        key = before, after, self._inventory.changes
        if key not in self._skipped:  # once: walking modules takes time
            if len(self._skipped) > MAX_NEW_PATHS:
                self._skipped.clear()  # it must not keep modules that the model has no more
            self._skipped[key] = self._inside(before) - self._inside(after)
        return self._skipped[key]

    def _inside(self, names: Iterable[str]) -> set[nn.Module]:
        return {module for name in names for module in modules_of(self.model.get_submodule(name))}

    def _reach(self, recording: Recording, key: tuple[Any, ...], with_gradient: list[Tensor], *, proof: bool) -> None:
        """Find out what lies before the cut that was just reached; let the pass be a whole one on a new path."""
        if self._sharded:
            before, now = self._used(recording), self.model.named_parameters(remove_duplicate=False)
            recording.before = Before(frozenset(self._by_name[name] for name, p in now if p in before), True)
            return
        if self._off:
            recording.before = Before(self._used(recording), True)
            return
        path = self._paths.get(key)
        if path is None:
            before = self._used(recording)
            after = any(p.requires_grad and p not in before for p in self.model.parameters())
            path = self._paths[key] = Path(Before(before, after))
            self._new.append(self._steps)
            if len(self._new) > MAX_NEW_PATHS and self._steps - self._new[0] < STEPS:
                self._off = f"the model took more than {MAX_NEW_PATHS} new paths to {self.cut!r} in {STEPS} steps"
                self._paths.clear()
        recording.path, recording.before = path, path.before
        if with_gradient:
            names = [call.name for call in recording.calls if not self._weights(call.name).isdisjoint(with_gradient)]
            what = f"{names[0]!r} computes gradients itself, or code" if names else "code"
            recording.obstacle = recording.obstacle or f"{what} between the modules before {self.cut!r} computes some"
        assert recording.input is not None
        inputs = tensors_in(recording.input.value)
        if path.proven < 2 or all(t.device.type == "cpu" for t in inputs):  # later it would have to wait for a GPU
            recording.sums = sums_of(inputs)
        recording.open = recording.open or (path.proven == 0 and not proof)
        if self.settled is not None and not path.before.parameters.isdisjoint(self.settled):
            recording.stay_open(
                f"the first pass took another path to {self.cut!r} than the first step of all ranks, and weights that "
                f"can be perturbed lie on it"
            )
        if not self.distributed and runs_distributed():
            recording.stay_open("the closure runs a DistributedDataParallel around the model; give the mask that one")

    def _used(self, recording: Recording) -> frozenset[Tensor]:
        """Return the parameters that were used on the way to the cut; of a sharded model as they are gathered now."""
        used = recording.between.union(*[self._weights(call.name) for call in recording.calls])
        made = [t for t in used if t.grad_fn is not None]  # as torch.func.functional_call puts in place of parameters
        return frozenset(used | parameters_of(reachable_nodes(made)))

    def _weights(self, name: str) -> set[Tensor]:
        return set(self.model.get_submodule(name).parameters())

    def learn(self, loss: Any) -> None:
        """Keep what a whole pass on a new path showed."""
        recording = self.recording
        path = recording.path if recording else None
        if recording is None or path is None or path.proven or recording.input is None:
            if recording is not None:
                recording.outputs = []  # which nobody needs any more
            return
        inputs = tensors_in(recording.input.value)
        outputs, recording.outputs = recording.outputs, []
        ends = {node for t in inputs if (node := node_of(t)) is not None}
        used = [t for t in tensors_in(loss) if t.requires_grad] or outputs  # not what no loss uses
        after = reachable_nodes(used, stop=ends)
        own = EndOfGradient.__name__
        path.custom = not after or any(
            isinstance(node, BackwardCFunction) and not node.name().startswith(own) for node in after
        )
        if not all(is_parameter(node) for node in after & reachable_nodes(inputs)):
            self.give_up(CROSSED.format(cut=self.cut))
        called = {call.name for call in recording.calls} | recording.suffix
        assert self._places is not None
        self._ahead = []
        for name, module in self._places.before:
            if name in called or path.before.parameters.isdisjoint(module.parameters()):
                self._ahead.append((name, module))
            else:  # it lies before the cut and is not called: its parts are
                self._ahead += [(f"{name}.{child}", part) for child, part in module.named_children()]

    # ----------------------------------------------------------------------------------------- second pass

    def path(self, recording: Recording, perturbed: Iterable[Tensor]) -> Path | None:
        """Return the path of a first pass; None, with a warning, if the second pass has to be computed in full."""
        reason = self._off or self._obstacle(recording, perturbed)
        self._warn(reason)
        return None if reason else recording.path

    def known_path(self, recording: Recording) -> Path | None:
        """Return what is known of the path of a first pass; None if nothing is replayed on it."""
        return None if self._off or recording.obstacle else recording.path

    @contextmanager
    def second_pass(self, recording: Recording, in_full: Callable[[], None]) -> Iterator[Reuse]:
        """Let the block's forward pass start at the cut, as far as that gives what the whole pass would.

        Args:
            recording: What the first pass left.
            in_full: Called before what lies before the cut is computed again, if it must be.
        """
        reuse = Reuse(recording, in_full, self._equal_copies)
        with self._intercepted(reuse):
            yield reuse
        self._equal_copies = reuse.equal_copies
        if reuse.another_batch:
            self._off = reuse.stopped
        self._warn(reuse.stopped)

    def _obstacle(self, recording: Recording, perturbed: Iterable[Tensor]) -> str:
        """Say why the second pass cannot start at the cut."""
        cut = recording.cut
        if recording.obstacle:
            return recording.obstacle
        if recording.input is None or recording.before is None:
            return (
                f"the first pass did not call {cut!r} where it can be seen (does the model skip it at times, or is it "
                f"compiled as a whole? compile its blocks instead)"
            )
        if recording.forwards > 1:
            return f"the closure ran the model {recording.forwards} times, and only a single forward pass is replayed"
        if not recording.input.unchanged:
            return f"the input of {cut!r} is changed in place after the cut"
        for past, following in zip_longest(recording.calls, recording.calls[1:]):
            if not past.output.unchanged and (following is None or following.output.value is not past.output.value):
                return f"the output of {past.name!r} is changed in place after it, by code between the modules"
        if recording.crossed and not recording.open:
            return CROSSED.format(cut=cut)
        if not recording.before.parameters.isdisjoint(perturbed):
            return f"the first pass took another path to {cut!r}, and a perturbed weight lies on it"
        return ""

    # --------------------------------------------------------------------------------------------- helpers

    def _intercepted(self, calls: Recorder | Reuse) -> AbstractContextManager[None]:
        places = self._places
        assert places is not None  # since the first pass
        compiled = [name for name, module in [("", self.wrapper), *places.around] if is_compiled(module)]
        if compiled:
            what = repr(compiled[0]) if compiled[0] else "the model"
            self._off = f"{what} is compiled as a whole; compile its blocks instead"
            return nullcontext()
        return intercepted(
            {
                self.model: calls.model,
                **{module: partial(calls.before, name) for name, module in places.before},
                places.cut: calls.at_cut,
            }
        )

    def _where(self) -> Places:
        """Return where the cut lies in the model, as it is now."""
        if self._places is None or self.model.get_submodule(self.cut) is not self._places.cut:
            self._places = places_of(self.model, self.cut)
        return self._places

    def forget_paths(self) -> None:
        """Prove every path anew."""
        self._paths.clear()
        self.settled = None

    def _warn(self, reason: str | None, *, exact: bool = True) -> None:
        if reason and not self._warned:
            self._warned = True
            how = "exact but slower" if exact else "and is no repetition of the first"
            self._say(f"the second pass is computed in full, {how}: {reason}")

    def warn_by_order(self, parameters: str) -> None:
        """Say that it is not seen which parameters follow the cut, and why."""
        if not self._warned:
            self._warned = True
            reason = self._off or (UNSEEN if self.recording is None else self._obstacle(self.recording, ()))
            self._say(
                f"the second pass is computed in full, and which {parameters} follow {self.cut!r} is not seen: those "
                f"of modules that were registered from it on are perturbed, which may be others. The reason: {reason}"
            )

    def _say(self, text: str) -> None:
        warn(f"{text}. {self.consequence}" if self.consequence else text)

    def give_up(self, reason: str, *, exact: bool = True) -> None:
        """Compute every pass in full from now on."""
        self._off = reason
        self._warn(reason, exact=exact)

    def warn_two_step(self) -> None:
        """Say that only step(closure) saves time."""
        self._warn(TWO_STEP)
