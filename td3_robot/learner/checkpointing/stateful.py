"""The interface of objects whose state is in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from numpy.typing import NDArray

from td3_robot.errors import BundleError

Arrays = Mapping[str, NDArray[Any]]


class Stateful(Protocol):
    """A part of the learner whose state is in checkpoints."""

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Everything that :meth:`restore` needs: named arrays, and plain JSON values."""

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`.

        The checkpoint file has a hash of its content, so this method need not check each value. If the state does not
        fit, this method raises BundleError or an error that :func:`reading` handles. The object may then be unusable.
        """


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn the errors of code that reads a saved state into a BundleError.

    Args:
        what: name of the state, for the error message.
    """
    try:
        yield
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise BundleError(f"{what}: {type(error).__name__} {error}") from None
