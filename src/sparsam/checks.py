"""Checks of arguments: each error names the argument, what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real

from torch import Tensor, nn

from sparsam.errors import UserTypeError, UserValueError


def check_rho(rho: object, name: str = "rho") -> None:
    """Refuse a rho that is not a finite number of at least 0 (a tensor is not looked into: that would wait)."""
    if type(rho) is float and 0.0 <= rho < math.inf:  # first, because every step asks, and numbers.Real takes time
        return
    if isinstance(rho, Tensor) and rho.dim() == 0:
        return
    check_number(name, rho, "a finite number >= 0", lambda value: 0 <= value < math.inf)


def check_module(name: str, value: object, *, optional: bool = True) -> None:
    """Refuse what is not a module."""
    if not isinstance(value, nn.Module) and not (optional and value is None):
        raise UserTypeError(
            f"{name} must be a module, but is a {type(value).__name__}; pass the model, not its parameters"
        )


def check_share(name: str, value: object) -> None:
    """Refuse what is not a number in [0, 1]."""
    check_number(name, value, "a number in [0, 1]", lambda value: 0 <= value <= 1)


def check_interval(interval: object) -> None:
    """Refuse an interval that is neither None nor a positive whole number of steps."""
    if interval is not None:
        check_whole(
            "interval",
            interval,
            allowed="a whole number of steps >= 1, or None for a mask made once",
        )


def check_whole(name: str, value: object, *, least: int = 1, allowed: str = "a whole number >= {least}") -> None:
    """Refuse anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UserValueError(f"{name} must be {allowed.format(least=least)}, but is {value!r}")


def check_number(name: str, value: object, allowed: str, holds: Callable[[float], bool]) -> None:
    """Refuse a value that is no real number or for which `holds(value)` is false (NaN never holds)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not holds(float(value)):
        raise UserValueError(f"{name} must be {allowed}, but is {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse anything but one of the choices."""
    if value not in choices:
        raise UserValueError(f"{name} must be one of {', '.join(map(repr, choices))}, but is {value!r}")
