"""The engine's gradients, compiled for this processor by ``torch.compile``.

Between its matrix products, an update spends time in Python and in passes over memory. Compiled code fuses neighbouring
passes and runs no Python. Compilation needs a C++ compiler on the learner's machine. It takes about 20 s for each new
network shape. Later starts load the result from the user's cache folder in about 4 s. The learner compiles no
updates in bfloat16, because oneDNN's fused operators are faster there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from td3_robot.learner import compute
from td3_robot.learner.replay_buffer.buffer import Batch
from td3_robot.util import files, machine

if TYPE_CHECKING:
    from td3_robot.learner.engine.td3 import FastTD3

log = logging.getLogger(__name__)

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# Largest allowed difference, as a fraction of the norm. It is large, because rounding can switch a ReLU on or off.
_CLOSE = 0.01


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the function as one graph, at its first call. That call raises the compiler's errors."""
    # torch's default is a folder in /tmp. Another user could create it first and put code there that torch would run.
    os.environ.setdefault(_FOLDER, str(_folder()))
    # The pattern matcher would fuse bias and product into a slower operator, which first copies the bias to all rows.
    options: dict[str, Any] = {"pattern_matcher": False, "cpp_wrapper": True, "compile_threads": 1}
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    return compiled


def use(engine: FastTD3, example: Batch) -> None:
    """Replace the gradient functions of a float32 engine on the CPU with compiled functions.

    The compiled functions use threads only inside operators. This function checks for one batch that their results
    equal those of the original functions up to rounding. If compilation or this check fails, a warning gives the
    reason, and the engine stays unchanged.

    Args:
        example: a batch of any numbers, with the sizes and memory layout of all later batches.
    """
    began = time.monotonic()
    log.info("compiling the update for this processor; the first compilation takes about 20 s")
    noise = torch.randn(example.action.shape, generator=torch.Generator().manual_seed(0))
    critics, actor, second = engine.critics_gradient, engine.actor_gradient, engine.second

    def give_up(error: Exception) -> None:
        engine.critics_gradient, engine.actor_gradient, engine.second = critics, actor, second
        engine.compiled = False
        cause = getattr(error, "inner_exception", error)  # torch wraps the cause
        problem = str(cause).strip().partition("\n")[0] or type(cause).__name__
        folder = os.environ.get(_FOLDER)
        hint = f" ({folder} holds compiled code and can be deleted)" if folder else ""
        log.warning("updates are not compiled and therefore slower: %s%s", problem, hint)
        log.debug("compilation failed", exc_info=error)

    def guarded(quick: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls ``quick``. If ``quick`` fails, the function calls ``plain``.

        ``quick`` compiles again when the memory layout of its inputs changes. This compilation may fail.
        """

        def call(*inputs: Tensor) -> Any:
            try:
                return quick(*inputs)
            except Exception as error:
                give_up(error)
                return plain(*inputs)

        return call

    engine.second = None
    try:
        with torch.inference_mode(), compute.flush_denormals(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own warnings do not help the user
            quick_critics, quick_actor = compile_whole(critics), compile_whole(actor)
            if not _alike(critics(*example, noise), quick_critics(*example, noise)):
                raise RuntimeError("the compiled gradient of the critics differs from the original one")
            if not _alike(actor(example.observation), quick_actor(example.observation)):
                raise RuntimeError("the compiled gradient of the policy differs from the original one")
    except Exception as error:  # compilers raise many types of errors; training continues without compiled code
        give_up(error)
        return
    engine.critics_gradient, engine.actor_gradient = guarded(quick_critics, critics), guarded(quick_actor, actor)
    engine.compiled = True
    log.info("compiled the update in %.1f s", time.monotonic() - began)


def _folder() -> Path:
    """The folder for compiled code in the user's cache. Each kind of processor has its own folder.

    Machines may share a home folder, and code for one processor may crash a process on another processor.
    """
    found = machine.describe()
    digest = hashlib.sha256(f"{found['processor']} {found['vector']}".encode()).hexdigest()[:12]
    return files.user_folder("XDG_CACHE_HOME", "~/.cache").absolute() / "compiled" / digest


def _alike(expected: Any, found: Any) -> bool:
    """Whether all tensors are equal up to rounding, and have the same memory layout. Adam relies on this layout."""
    return all(
        (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) and bool((a - b).norm() <= _CLOSE * a.norm())
        for a, b in zip(_tensors(expected), _tensors(found), strict=True)
    )


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    else:
        for item in nested:
            yield from _tensors(item)
