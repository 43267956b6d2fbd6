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
        """Everything that :meth:`restore` needs: named arrays, and scalars fit for JSON."""

    def restore(self, arrays: Arrays, scalars: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`.

        Raises:
            BundleError: the state is incomplete, damaged or does not fit this object. The object is then unchanged.
        """


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn the errors of code that reads a saved state into a BundleError.

    Args:
        what: name of the state, for the error message.
    """
    try:
        yield
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise BundleError(f"{what}: {type(error).__name__} {error}") from None


def array_like(expected: NDArray[Any], arrays: Arrays, name: str) -> NDArray[Any]:
    """The saved array of this name.

    Raises:
        KeyError: there is no such array.
        ValueError: the array has another type or shape than ``expected``.
    """
    saved = arrays[name]
    if saved.shape != expected.shape or saved.dtype != expected.dtype:
        raise ValueError(f"{name} is {saved.dtype}{list(saved.shape)}; expected {expected.dtype}{list(expected.shape)}")
    return saved
