"""TD3's gradients, compiled for this processor by ``torch.compile``.

What lies between the matrix products of an update are passes over memory, and Python. Compiled, neighbouring passes are
one, and there is no Python between them. (In bfloat16 that is slower than oneDNN's fused operators.) It needs a C++
compiler where the learner runs, and the first time for each shape of networks some 20 s; what was compiled is kept in
the user's cache folder, and found there in some 4 s.
"""

from __future__ import annotations

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
from td3_robot.learner.td3 import TD3

log = logging.getLogger(__name__)

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_CLOSE = 0.01  # of the norm: a number near 0 passes a ReLU or not, by rounding


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one compiled piece; what cannot be compiled shows at its first call."""
    # torch's own default is a folder in /tmp with a name that anybody can take first, and it loads code from there.
    os.environ.setdefault(_FOLDER, str(_cache_home() / "td3-robot" / "compiled"))
    # The pattern matcher would join bias and product to an operator that first copies the bias to all rows.
    options: dict[str, Any] = {"pattern_matcher": False, "cpp_wrapper": True, "compile_threads": 1}
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    return compiled


def use(td3: TD3, batch_size: int, compiler: Compiler = compile_whole) -> str | None:
    """Have a TD3 on a processor make its updates with compiled gradients, in one thread and those inside operators.

    They are used once they have given, for one batch, what the same functions give without it. Where compilation or
    that check fails, a warning says so and updates are made as they are, in as many threads as without.

    Args:
        td3: in float32.
        batch_size: of all updates to come.
        compiler: for tests.

    Returns:
        The reason where nothing was compiled.
    """
    began = time.monotonic()
    log.info("compiling the update for this processor; the first time takes some 20 s")
    random = torch.Generator().manual_seed(0)
    s, s2, a, noise, r = (
        torch.randn((batch_size, size), generator=random)
        for size in (td3.observation_size, td3.observation_size, td3.action_size, td3.action_size, 1)
    )
    # As views of one tensor, like what a replay buffer gives: compiled code is for one layout in memory.
    columns = (s, a.tanh(), r, s2, torch.full_like(r, 0.99))
    s, a, r, s2, discount = torch.split(torch.cat(columns, 1), [column.shape[1] for column in columns], 1)
    before = td3.critics_slopes, td3.actor_slopes, td3.second
    td3.second = None
    problem = None
    try:
        with torch.inference_mode(), compute.vanishing_is_zero(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about itself
            for attribute, function, inputs in (
                ("critics_slopes", td3.critics_slopes, (s, a, r, s2, discount, noise)),
                ("actor_slopes", td3.actor_slopes, (s,)),
            ):
                quick = compiler(function)
                if not _alike(function(*inputs), quick(*inputs)):
                    raise RuntimeError(f"{attribute} compiled gives something else")
                setattr(td3, attribute, quick)
    except Exception as error:  # compilers and their drivers raise a dozen kinds; none is worth a training
        td3.critics_slopes, td3.actor_slopes, td3.second = before
        cause = getattr(error, "inner_exception", error)  # torch's wrappers say only where it was raised
        problem = str(cause).strip().partition("\n")[0] or type(cause).__name__
        log.warning("updates are not compiled and slower for it: %s", problem)
    else:
        log.info("compiled the update in %.1f s", time.monotonic() - began)
    return problem


def _cache_home() -> Path:
    """Where programs keep what they can make again (XDG Base Directory Specification)."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".cache"


def _alike(expected: Any, found: Any) -> bool:
    pairs = zip(_tensors(expected), _tensors(found), strict=True)
    return all(bool((a - b).norm() <= _CLOSE * a.norm()) for a, b in pairs)


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    else:
        for item in nested:
            yield from _tensors(item)
