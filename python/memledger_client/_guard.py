"""Keeps errors of the client away from the program that uses it."""

import functools
import os
import sys
import warnings
from typing import Any, Callable, Optional, Set, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

#: Errors that were swallowed since the program started; reported with the messages that were lost.
swallowed = 0
_warned: Set[str] = set()


def record_error() -> None:
    """Counts the exception that is being handled; with MEMLEDGER_DEBUG in the environment it is printed too."""
    global swallowed
    swallowed += 1
    if os.environ.get("MEMLEDGER_DEBUG") and sys.stderr is not None:
        try:
            import traceback

            traceback.print_exc(file=sys.stderr)
        except Exception:
            pass  # standard error is closed


def warn_once(kind: str, text: str, stacklevel: int = 3) -> None:
    """Warns of a wrong call, once per kind. Where the program makes errors of warnings, it does nothing."""
    if kind in _warned:
        return
    _warned.add(kind)
    try:
        warnings.warn(f"memledger: {text}", RuntimeWarning, stacklevel=stacklevel)
    except Exception:
        pass


def is_traced() -> bool:
    """Returns whether torch.compile traces this call, which then does nothing, so that the graph stays whole (torch 2.3 and later)."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    # not is_compiling, which is also true in all other threads meanwhile
    is_compiling = getattr(compiler, "is_dynamo_compiling", None)
    return is_compiling is not None and bool(is_compiling())


def never_raises(
    default: Optional[Callable[[], Any]] = None, warns: bool = False, is_public: bool = False
) -> Callable[[Function], Function]:
    """Makes a function return ``default()``, or None, where it would raise, and warns once of wrong arguments.

    ``warns``: of every error, for a function that prints its result. ``is_public``: also where torch.compile traces the call.
    Only ``Exception`` is swallowed: KeyboardInterrupt and SystemExit belong to the program.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                if is_public and is_traced():
                    return None if default is None else default()
                return function(*args, **kwargs)
            except Exception as error:
                record_error()
                if warns or isinstance(error, (TypeError, ValueError)):
                    warn_once(function.__qualname__, f"{function.__qualname__} ignored: {error}")
                return None if default is None else default()

        return cast(Function, guarded)

    return decorate
