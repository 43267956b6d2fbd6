"""Answers the requests that still wait when the dashboard ends, and calls functions that may never return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from starlette.responses import PlainTextResponse

_LOOK = 0.1  # seconds between two checks whether the dashboard ends
_GRACE = 1.0  # seconds; an emergency stop that an operator has just requested still reaches the policy server
Result = TypeVar("Result")


class Ending:
    """ASGI middleware that answers each waiting request shortly after the server begins to end.

    Args:
        app: the application behind the middleware.
        closing: returns whether the server is closing.
    """

    def __init__(self, app: Any, closing: Callable[[], bool]) -> None:
        self._app = app
        self._closing = closing

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        started = False

        async def answer(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        work = asyncio.ensure_future(self._app(scope, receive, answer))
        end = asyncio.ensure_future(self._end())
        try:
            await asyncio.wait((work, end), return_when=asyncio.FIRST_COMPLETED)
            if started:
                await work
        except asyncio.CancelledError:  # after a second Ctrl-C, the server cancels its tasks
            pass
        finally:
            end.cancel()
        if work.done() and not work.cancelled():
            work.result()  # raises the error of the application
            return
        work.cancel()
        if not started:
            text = "NOT done: the dashboard ends before an answer came\n"
            await PlainTextResponse(text, 503)(scope, receive, send)

    async def _end(self) -> None:
        while not self._closing():
            await asyncio.sleep(_LOOK)
        await asyncio.sleep(_GRACE)


async def in_own_thread(work: Callable[[], Result]) -> Result:
    """Call a function in a new thread, and return its result.

    The function may never return, for example if it reads a file from a server that does not answer. The thread then
    delays neither other calls nor the end of the process.
    """
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()  # so that nothing else sets the outcome if the request is cancelled

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="command").start()
    return await asyncio.wrap_future(outcome)
