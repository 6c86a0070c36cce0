"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from sparsam.errors import UserValueError
from sparsam.training.interrupt import Interrupted


def _refuse_epochs(epochs: str | None) -> None:
    """Name the setting that is meant: reproduce has the option, so it is tried elsewhere too."""
    if epochs is not None:
        raise UserValueError(f"--epochs is an option of reproduce; here it is a setting: --set train.epochs={epochs}")


Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting, such as train.epochs=10."),
]
MaxSteps = Annotated[
    int | None, typer.Option(min=1, help="End each run after so many steps; schedules take this as their total.")
]
NoEpochs = Annotated[str | None, typer.Option("--epochs", hidden=True, callback=_refuse_epochs)]
ShareStart = Annotated[
    bool, typer.Option("--share-start", help="Runs that begin with the same base steps take them once, untimed.")
]


def given_options(context: typer.Context) -> dict[str, str]:
    """Return what was given on the command line: parameters, and the options as a user writes them."""
    known = {param.name: param for param in context.command.params}
    return {
        name: max(known[name].secondary_opts if value is False else known[name].opts, key=len)
        for name, value in context.params.items()  # in the order of the command line
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


@contextmanager
def continued_by_same_command() -> Iterator[None]:
    """Let a command that is stopped say how all of its runs go on: a run knows how to continue itself alone."""
    try:
        yield
    except Interrupted:
        raise Interrupted("stopped, and saved; the same command goes on from here") from None


def overrides(settings: list[str] | None, **values: object) -> list[str]:
    """Return all overrides as `key=value`, those of options of their own last.

    >>> overrides(["sam.rho=0.2"], train__max_steps=3, model__name=None)
    ['sam.rho=0.2', 'train.max_steps=3']
    """
    given = (f"{key.replace('__', '.')}={value}" for key, value in values.items() if value is not None)
    return [*(settings or []), *given]
