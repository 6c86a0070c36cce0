"""What :class:`sparsam.SAM` refuses, before anything changes."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from sparsam.ascents import Ascent
from sparsam.checks import check_module, check_number, check_rho, check_whole
from sparsam.distributed.replicas import Replicas
from sparsam.distributed.shards import any_dtensor, fsdp_modules, is_dtensor, local
from sparsam.errors import UserRuntimeError, UserTypeError, UserValueError
from sparsam.inventory import modules_of
from sparsam.settings import Policy, differences
from sparsam.share import check_share_of_batch


def check_options(rho: Any, model: Any, adaptive: Any, given: dict[str, tuple[Any, type[Policy]]]) -> None:
    """Refuse a rho, a model, a switch, or a mask, an ascent or a schedule that is none."""
    check_rho(rho)
    check_module("model", model)
    if not isinstance(adaptive, bool):
        raise UserTypeError(f"adaptive must be True or False, but is {adaptive!r}")
    for name, (policy, wanted) in given.items():
        if policy is not None and not isinstance(policy, wanted):
            raise UserTypeError(f"{name} must be a sparsam {name} or None, but is {policy!r}")


def check_listed(ascent: Ascent | None, schedule: Policy, listed: Sequence[Ascent]) -> None:
    """Refuse an ascent that a schedule takes and does not list."""
    if ascent is not None and not any(ascent is other for other in listed):
        raise UserValueError(
            f"ascents(main) of {schedule!r} must return every ascent that a step may take, but {ascent!r} is not there"
        )


def check_scale(scale: float | Tensor) -> None:
    """Refuse a scale of gradients that is no positive number (a tensor is not looked into: that would wait)."""
    if not (isinstance(scale, Tensor) and scale.dim() == 0):
        check_number("scale", scale, "a finite number > 0", lambda value: 0 < value < math.inf)


def check_one_pass(mask: Policy | None, ascents: Sequence[Ascent]) -> None:
    """Refuse a mask where no step would read it."""
    if mask is not None and all(ascent.passes == 1 for ascent in ascents):
        raise UserValueError(
            f"mask must be None with {ascents[0]!r}, because its steps take one pass and perturb every weight, but is "
            f"{mask!r}"
        )


def check_share(share: float, cut: object, ascents: Sequence[Ascent], replicas: Replicas) -> None:
    """Refuse a share of the batch with what does not go with one."""
    check_share_of_batch(share)
    if share == 1:
        return
    if cut is not None:
        raise UserValueError(f"share must be 1 with a mask that has a cut, but is {share}: choose one way to save")
    if all(ascent.passes == 1 for ascent in ascents):
        raise UserValueError(f"share must be 1 with {ascents[0]!r}, whose steps take one pass, but is {share}")
    if replicas.ddp is not None and replicas.ddp.static_graph:
        raise UserValueError(
            f"share must be 1 with DistributedDataParallel(static_graph=True), which must synchronise every pass, but "
            f"is {share}; build it with static_graph=False"
        )


def check_arguments(params: Any, base_optimizer: Any, sam: type[Any], given: Iterable[str]) -> None:
    """Refuse what is easily passed by mistake: an optimizer for its class, a model for its parameters, a misspelling.

    Args:
        params: The parameters.
        base_optimizer: The class of the base optimizer.
        sam: The class that is built.
        given: Names of arguments for the base optimizer.
    """
    check_base_class("base_optimizer", base_optimizer)
    check_params(params)
    check_names("SAM", option_names(sam), base_optimizer, given)


def check_params(params: Any) -> None:
    """Refuse a model for its parameters, and an optimizer."""
    if isinstance(params, nn.Module):
        raise UserTypeError("params must be parameters or parameter groups, but is a module; pass model.parameters()")
    if isinstance(params, Optimizer):
        raise UserTypeError(
            "params must be parameters or parameter groups, but is an optimizer; SAM.wrap(optimizer) is built around it"
        )


def check_base_class(name: str, base_optimizer: Any) -> None:
    """Refuse what is not the class of an optimizer."""
    if isinstance(base_optimizer, Optimizer):
        raise UserTypeError(
            f"{name} must be a class, but is an instance of {type(base_optimizer).__name__}; "
            f"SAM.wrap(base_optimizer) takes an instance"
        )
    if not callable(base_optimizer) or isinstance(base_optimizer, nn.Module):
        given = repr(base_optimizer) if isinstance(base_optimizer, str) else f"a {type(base_optimizer).__name__}"
        raise UserTypeError(f"{name} must be a class such as torch.optim.SGD, but is {given}")


def check_names(what: str, own: Sequence[str], base_optimizer: Any, given: Iterable[str]) -> None:
    """Refuse a misspelled argument, which would be the base optimizer's and is not.

    Args:
        what: What was called.
        own: The names of its options.
        base_optimizer: Gets all others. Nothing is refused if it takes any name, or does not tell which.
        given: The names of what it is to get.
    """
    try:
        base = inspect.signature(base_optimizer).parameters
    except (TypeError, ValueError):
        return
    unknown = [name for name in given if name not in base]
    if not unknown or any(parameter.kind is parameter.VAR_KEYWORD for parameter in base.values()):
        return
    base_name = getattr(base_optimizer, "__name__", "<lambda>").replace("<lambda>", "the base optimizer")
    close = difflib.get_close_matches(unknown[0], [*own, *base], 1, cutoff=0.7)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserTypeError(
        f"{unknown[0]!r} is an argument neither of {what} nor of {base_name}: {hint}{what} has {', '.join(own)}; all "
        f"others go to {base_name}"
    )


def option_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's arguments that have a default."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is not p.empty]


def check_models(of_mask: nn.Module | None, model: nn.Module | None, params: Sequence[Tensor]) -> None:
    """Refuse a mask of a model that the optimizer does not train, and such a model."""
    if _is_another(of_mask, params):
        raise UserValueError(
            "mask must be of the model that is trained, but none of its model's parameters is in params; was the model "
            "copied, or built anew? Build the mask of the model whose parameters the optimizer has"
        )
    if _is_another(model, params):
        raise UserValueError(
            "model must be the one that is trained, but none of its parameters is in params; was it copied, or built "
            "anew? Give the model whose parameters the optimizer has"
        )


def _is_another(model: nn.Module | None, params: Sequence[Tensor]) -> bool:
    own = set() if model is None else set(model.parameters())
    return bool(own) and own.isdisjoint(params)


def check_base(base: Any) -> None:
    """Refuse base optimizers that cannot take the second half of a SAM step."""
    name = type(base).__name__
    if isinstance(base, type):
        raise UserTypeError(
            f"base_optimizer must be an optimizer, but is the class {base.__name__}; SAM(params, {base.__name__}) "
            f"takes a class"
        )
    if not isinstance(base, Optimizer):
        raise UserTypeError(f"base_optimizer must make a torch.optim.Optimizer, but made {name}")
    if hasattr(base, "first_step"):
        raise UserTypeError(f"base_optimizer must be a plain optimizer, but {name} is a SAM itself")
    closure = inspect.signature(type(base).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserTypeError(
            f"base_optimizer must step without a closure, but {name} needs one and would call it at weights "
            f"that SAM knows nothing of"
        )
    if isinstance(base, torch.optim.SparseAdam):
        raise UserTypeError(
            f"base_optimizer must take dense gradients, but {name} takes sparse ones only; use Adam, and build "
            f"embeddings with sparse=False"
        )
    if getattr(base, "_overlap_with_ddp", False):
        raise UserTypeError(
            f"base_optimizer must step when it is told to, but {name} with overlap_with_ddp=True steps in every "
            f"backward pass; build it with overlap_with_ddp=False"
        )
    if "rho" in base.defaults:
        raise UserValueError(
            f"base_optimizer must not have a group option named 'rho', which is SAM's radius, but {name} has one"
        )
    check_groups(base)


def check_sharding(model: nn.Module | None, params: Sequence[Tensor], *, were_whole: bool = False) -> None:
    """Refuse pieces of FSDP1, sharded parameters without their model, and such as were whole in an earlier step.

    Accelerate shards a model after its optimizer was built, and puts the new parameters into the groups.
    """
    distributed = dist.is_available() and dist.is_initialized()
    if distributed:
        for i, p in enumerate(params):
            if hasattr(p, "_fsdp_flattened"):
                raise UserTypeError(
                    f"params must be tensors or DTensors, but parameter {i} is a piece of FullyShardedDataParallel; "
                    f"shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
                )
    sharded = any_dtensor(params)
    modules = fsdp_modules(modules_of(model)) if distributed and model is not None else []
    if not sharded and not modules:
        return
    if sharded and were_whole:
        raise UserRuntimeError(
            "params must be sharded before the first step, but were sharded after one: masks, momentum and whatever "
            "else was kept are of the whole parameters. Shard the model first, or call accelerator.prepare(), then "
            "load the state"
        )
    if model is None:
        raise UserTypeError(
            "model must be given where parameters are sharded (DTensors), but is None: weights that FSDP has gathered "
            "before they are perturbed must be gathered again, and only the model knows them. Pass model=model"
        )
    for module in modules:
        module.reshard()  # what was gathered stands in for the parameters
    _check_in_model(list(model.parameters()), params)


def _check_in_model(of_model: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Refuse parameters that are not those of the sharded model: which fully_shard has replaced never move."""
    held, own = set(of_model), set(params)
    lost = [p for p in params if p.requires_grad and p not in held]
    sharded = next((p for p in lost if is_dtensor(p)), None)
    if sharded is not None:
        raise UserValueError(
            f"model must hold all sharded parameters, but one of shape {tuple(sharded.shape)} is not in it; "
            f"pass the whole model"
        )
    if lost and any(is_dtensor(p) and p.requires_grad and p not in own for p in of_model):
        raise UserRuntimeError(
            f"params must be those of the sharded model, but one of shape {tuple(lost[0].shape)} is not in it any "
            f"more; call fully_shard before the optimizer is built"
        )


def check_groups(base: Optimizer) -> None:
    """Refuse to maximize, and parameters that are missing, given twice or not real numbers."""
    for i, group in enumerate(base.param_groups):
        if group.get("maximize"):
            raise UserValueError(
                f"maximize must be False, but is True in parameter group {i}: SAM perturbs towards a higher loss "
                f"and descends. Minimize the negative instead"
            )
    params = [p for group in base.param_groups for p in group["params"]]
    if not params:
        raise UserValueError("params must hold at least one parameter, but is empty")
    seen: dict[Tensor, int] = {}
    for i, p in enumerate(params):
        if p in seen:
            raise UserValueError(
                f"params must hold each parameter once, but parameters {seen[p]} and {i} are the same tensor of "
                f"shape {tuple(p.shape)}"
            )
        seen[p] = i
        if not p.is_floating_point():
            raise UserValueError(f"params must be real floating-point tensors, but parameter {i} is {p.dtype}")
        if is_dtensor(p) and any(placement.is_partial() for placement in p.placements):
            raise UserTypeError(f"params must be sharded or replicated, but parameter {i} is placed as {p.placements}")
    _check_shared_storage(base)


def _check_shared_storage(base: Optimizer) -> None:
    """Refuse weights that lie in the same memory and have different radii, or that a GPU would write side by side."""
    places: dict[int, list[tuple[int, int, int, Any]]] = {}
    for i, group in enumerate(base.param_groups):
        for p in map(local, group["params"]):
            if p.layout != torch.strided or not p.numel():
                continue
            span = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            start, end, rho = p.data_ptr(), p.data_ptr() + span * p.itemsize, group.get("rho")
            others = places.setdefault(p.untyped_storage().data_ptr(), [])
            for other_start, other_end, j, other in others:
                overlap = start < other_end and other_start < end
                if overlap and p.device.type != "cpu":
                    raise UserValueError(
                        f"weights must not share memory on {p.device}, where kernels write several tensors at a time, "
                        f"but two of parameter groups {j} and {i} do; tie weights by using one parameter twice"
                    )
                if overlap and j != i and other is not rho and other != rho:
                    raise UserValueError(
                        f"weights that share memory must have the same rho, but parameter groups {j} and {i} share "
                        f"some and have {other} and {rho}"
                    )
            others.append((start, end, i, rho))


def check_gradients(grads: Sequence[Tensor | None]) -> None:
    """Refuse to perturb without any gradient, or by a sparse one."""
    layouts = [None if grad is None else grad.layout for grad in grads]
    check_any_gradient(layouts)
    for i, layout in enumerate(layouts):
        if layout is not None and layout != torch.strided:
            raise UserRuntimeError(
                f"gradients must be dense, but that of parameter {i} has the layout {layout}; build the "
                f"embedding with sparse=False"
            )


def check_any_gradient(grads: Iterable[object]) -> None:
    """Refuse a step without any gradient: all are None."""
    if all(grad is None for grad in grads):
        raise UserRuntimeError(
            "no parameter has a gradient: call backward() first; if the closure clears the gradients after it, "
            "zero_grad() belongs in its first line"
        )


def check_state(
    state_dict: dict[str, Any], settings: dict[str, Any], params: Sequence[Tensor], ascents: int
) -> dict[str, Any]:
    """Refuse the state of something else; return sparsam's part of it."""
    own = state_dict.get("sparsam")
    if not own:
        raise UserValueError(
            "state_dict must come from SAM.state_dict(), but has no entry 'sparsam'; to start from the state of a "
            "plain optimizer, call base_optimizer.load_state_dict(state_dict). The optimizer helpers of "
            "torch.distributed.checkpoint drop the entry: save sparsam.SAMState(model, optimizer) there"
        )
    _check_entries(own)
    shapes = [list(p.shape) for p in params]
    if len(own["shapes"]) != len(shapes):
        raise UserValueError(
            f"state_dict is of another model: it has {len(own['shapes'])} parameters, this optimizer {len(shapes)}"
        )
    for i, (saved, here) in enumerate(zip(own["shapes"], shapes, strict=True)):
        if list(saved) != here:
            raise UserValueError(
                f"state_dict is of another model: parameter {i} has shape {tuple(saved)} there and {tuple(here)} here"
            )
    changed = differences(own["settings"], settings)
    if changed:
        changes = "; ".join(f"{key} was {saved!r} and is {here!r}" for key, (saved, here) in changed.items())
        raise UserValueError(
            f"state_dict is of a run with other settings: {changes}. Build the optimizer and its policies as they "
            f"were, or load the base optimizer's part alone with base_optimizer.load_state_dict()"
        )
    _check_values(state_dict, own, params, ascents)
    return dict(own)


ENTRIES = ("settings", "shapes", "steps", "mask", "passes", "moved", "memories")


def _check_entries(own: dict[str, Any]) -> None:
    missing, foreign = [k for k in ENTRIES if k not in own], [k for k in own if k not in ENTRIES]
    if missing or foreign:
        what = f"has no {missing[0]!r}" if missing else f"has {foreign[0]!r}, which is not known"
        raise UserValueError(f"state_dict['sparsam'] must have the entries {', '.join(ENTRIES)}, but {what}")


def _check_values(state_dict: dict[str, Any], own: dict[str, Any], params: Sequence[Tensor], ascents: int) -> None:
    """Refuse numbers and masks that no run has saved."""
    check_whole("steps in state_dict", own["steps"], least=0)
    for i, group in enumerate(state_dict.get("param_groups", [])):
        rho = group.get("rho", 0.0)
        check_rho(float(rho) if isinstance(rho, Tensor) else rho, f"rho of parameter group {i} in state_dict")
    made = own["mask"].get("made")
    prefix = own["passes"].get("prefix", [])
    if made is not None and (made.keys() != {"selection", "step", "eligible"} or len(made["eligible"]) != len(params)):
        raise UserValueError("mask in state_dict must have selection, step and eligible of each parameter, but has not")
    if "seed" not in own["mask"] or len(prefix) > len(params):
        raise UserValueError("mask and passes in state_dict must be those of an optimizer's state, but are not")
    for name, selection in (("mask", made and made["selection"]), ("moved", own["moved"])):
        fits = selection is None or (
            len(selection) == len(params)
            and all(
                isinstance(m, bool) or (m.dtype == torch.bool and m.shape == p.shape)
                for m, p in zip(selection, params, strict=True)
            )
        )
        if not fits:
            raise UserValueError(
                f"{name} in state_dict must have a bool or a bool tensor for each parameter, but has not"
            )
    if len(own["memories"]) != ascents or any(len(memory) != len(params) for memory in own["memories"]):
        raise UserValueError("memories in state_dict must have an entry for each ascent and parameter, but have not")
