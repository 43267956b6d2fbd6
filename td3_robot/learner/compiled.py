"""TD3's gradients, compiled for this processor by ``torch.compile``.

What lies between the matrix products of an update are passes over memory, and Python. Compiled, neighbouring passes are
one, and there is no Python between them. (In bfloat16 that is slower than oneDNN's fused operators.) It needs a C++
compiler where the learner runs, and the first time for each shape of networks some 20 s; what was compiled is kept in
the user's cache folder, and found there in some 4 s.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from td3_robot.learner import compute
from td3_robot.learner.replay import Batch
from td3_robot.learner.td3 import TD3
from td3_robot.util import files, machine

log = logging.getLogger(__name__)

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_CLOSE = 0.01  # of the norm: a number near 0 passes a ReLU or not, by rounding


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one compiled piece; what cannot be compiled shows at its first call."""
    # torch's own default is a folder in /tmp with a name that anybody can take first, and it loads code from there.
    os.environ.setdefault(_FOLDER, str(_folder()))
    # The pattern matcher would join bias and product to an operator that first copies the bias to all rows.
    options: dict[str, Any] = {"pattern_matcher": False, "cpp_wrapper": True, "compile_threads": 1}
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    return compiled


def use(td3: TD3, example: Batch, compiler: Compiler | None = None) -> str | None:
    """Have a TD3 on a processor make its updates with compiled gradients, by the threads inside operators alone.

    They are used once they have given, for one batch, what the same functions give without it. Where compilation or
    that check fails, a warning says so and updates are made as they are, in as many threads as without.

    Args:
        td3: in float32.
        example: of any numbers, and of the sizes and the layout in memory that all batches to come will have.
        compiler: for tests; None for :func:`compile_whole`.

    Returns:
        The reason where nothing was compiled.
    """
    compiler = compiler or compile_whole
    began = time.monotonic()
    log.info("compiling the update for this processor; the first time takes some 20 s")
    noise = torch.randn(example.action.shape, generator=torch.Generator().manual_seed(0))
    critics, actor, second = td3.critics_slopes, td3.actor_slopes, td3.second

    def give_up(error: Exception) -> str:
        td3.critics_slopes, td3.actor_slopes, td3.second = critics, actor, second
        cause = getattr(error, "inner_exception", error)  # torch's wrappers say only where it was raised
        problem = str(cause).strip().partition("\n")[0] or type(cause).__name__
        folder = os.environ.get(_FOLDER)
        hint = f" ({folder} holds what was compiled before, and can be deleted)" if folder else ""
        log.warning("updates are not compiled and slower for it: %s%s", problem, hint)
        log.debug("what was raised", exc_info=error)
        return problem

    def guarded(quick: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """``plain`` in its place where it is to be compiled once more, for another batch, and cannot be."""

        def call(*inputs: Tensor) -> Any:
            try:
                return quick(*inputs)
            except Exception as error:
                give_up(error)
                return plain(*inputs)

        return call

    td3.second = None
    try:
        with torch.inference_mode(), compute.vanishing_is_zero(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about itself
            quick_critics, quick_actor = compiler(critics), compiler(actor)
            if not _alike(critics(*example, noise), quick_critics(*example, noise)):
                raise RuntimeError("the critics' gradient compiled is another one")
            if not _alike(actor(example.observation), quick_actor(example.observation)):
                raise RuntimeError("the policy's gradient compiled is another one")
    except Exception as error:  # compilers and their drivers raise a dozen kinds; none is worth a training
        return give_up(error)
    td3.critics_slopes, td3.actor_slopes = guarded(quick_critics, critics), guarded(quick_actor, actor)
    log.info("compiled the update in %.1f s", time.monotonic() - began)
    return None


def _folder() -> Path:
    """Where compiled code is kept: in the user's cache, for this processor alone.

    A home may be shared by machines; code for one of them may be none for another, and ends a process there.
    """
    told = machine.describe()
    digest = hashlib.sha256(f"{told['processor']} {told['vector']}".encode()).hexdigest()[:12]
    return files.user_folder("XDG_CACHE_HOME", "~/.cache").absolute() / "compiled" / digest


def _alike(expected: Any, found: Any) -> bool:
    """Whether all tensors are the same but for rounding, and lie alike in memory: Adam goes through it as it is."""
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
