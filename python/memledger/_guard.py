"""Keeps errors of the client away from the program that uses it."""

import functools
import os
import sys
import traceback
from typing import Any, Callable, Optional, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

#: Errors that were swallowed since the program started.
swallowed = 0


def record_error() -> None:
    """Counts the exception that is being handled; with MEMLEDGER_DEBUG in the environment it is printed too."""
    global swallowed
    swallowed += 1
    if os.environ.get("MEMLEDGER_DEBUG"):
        traceback.print_exc(file=sys.stderr)


def never_raises(default: Optional[Callable[[], Any]] = None) -> Callable[[Function], Function]:
    """Makes a function return ``default()``, or None, where it would raise.

    Only ``Exception`` is swallowed: KeyboardInterrupt and SystemExit belong to the program.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:
                record_error()
                return None if default is None else default()

        return cast(Function, guarded)

    return decorate
