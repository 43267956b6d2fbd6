"""The engine's update in C++.

This update is faster than the update in Python: C++ code runs no Python and goes through memory less often.

The first learner on a machine compiles ``update.cpp`` for the processor, in about 10 s. Later starts load the result
from the user's cache folder. torch computes the matrix products. With a second thread, two shares of the work run in
parallel: the two critics, or the two halves of the batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from td3_robot.config.learner import LearnerConfig
from td3_robot.learner.compute import CPU, Precision, bf16_lack
from td3_robot.learner.engine import networks
from td3_robot.learner.engine.td3 import FastTD3
from td3_robot.learner.engine.threads import has_second_thread, prepare_thread
from td3_robot.learner.replay_buffer.buffer import Batch
from td3_robot.util import files, machine

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("update.cpp")
# The compiler may reorder sums, but NaN must stay NaN.
_FLAGS = (
    "-std=c++20", "-O3", "-shared", "-fPIC",
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-fno-finite-math-only",
)  # fmt: skip
# Largest allowed error of Adam's first moments in C++: the Euclidean norm of their difference from the moments in
# Python, divided by the Euclidean norm of the moments in Python.
_CLOSE: dict[Precision, float] = {"fp32": 1e-3, "bf16": 0.2}


# -- structures of update.cpp ------------------------------------------------------------------------------------------


class _Network(Structure):
    _fields_ = (
        ("heads", c_int64), ("layers", c_int64), ("sizes", c_void_p), ("slots", c_void_p), ("flat", c_void_p),
        ("low", c_void_p), ("layer_norm", c_int64),
    )  # fmt: skip


class _Adam(Structure):
    _fields_ = (
        ("mean", c_void_p), ("square", c_void_p),
        ("rate", c_float), ("root", c_float), ("limit", c_float), ("norm", c_float),
    )  # fmt: skip


class _Settings(Structure):
    _fields_ = (
        ("actor", _Network), ("actor_target", _Network), ("critics", _Network), ("critics_target", _Network),
        ("bf16", c_int64), ("huber", c_int64), ("noise", c_float), ("noise_clip", c_float),
    )  # fmt: skip


class _Batch(Structure):
    _fields_ = (("rows", c_int64), *((name, c_void_p) for name in ("s", "a", "r", "s2", "discount", "noise")))


class _CriticsResult(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("errors", "y", "means"))


class _ActorResult(Structure):
    _fields_ = (("pi", c_void_p), ("loss", c_void_p))


class Library:
    """The compiled functions of update.cpp."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.team_new = self._function(library.team_new, c_void_p)
        self.team_work = self._function(library.team_work, None, c_void_p)
        self.team_end = self._function(library.team_end, None, c_void_p)
        self.team_helped = self._function(library.team_helped, c_int64, c_void_p)
        self.team_delete = self._function(library.team_delete, None, c_void_p)
        self.engine_new = self._function(library.engine_new, c_void_p, POINTER(_Settings), c_void_p, c_int64, c_int64)
        self.engine_delete = self._function(library.engine_delete, None, c_void_p)
        update = c_void_p, POINTER(_Batch), POINTER(_Adam)
        self.update_critics = self._function(library.update_critics, c_int, *update, POINTER(_CriticsResult))
        self.update_actor = self._function(library.update_actor, c_int, *update, POINTER(_ActorResult))

    @staticmethod
    def _function(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
        function.restype, function.argtypes = result, arguments
        made: Callable[..., Any] = function
        return made


# -- the engine --------------------------------------------------------------------------------------------------------


class CompiledAdam(networks.Adam):
    """The state of Adam. C++ code makes the steps."""

    def __init__(self, network: networks.Network, learning_rate: float | Tensor, clip: float | None = None) -> None:
        super().__init__(network, learning_rate, clip)
        self.structure = _Adam(mean=self.mean.data_ptr(), square=self.square.data_ptr(), limit=clip or 0.0)

    def next_step(self) -> _Adam:
        """Count the next step, and return what C++ code needs for it."""
        self.count += 1
        count = self.count.item()
        self.structure.rate = float(self.learning_rate) / (1 - 0.9**count)
        self.structure.root = math.sqrt(1 - 0.999**count)
        return self.structure

    def gradient_norm(self) -> Tensor:
        return torch.tensor(self.structure.norm)


class CompiledTD3(FastTD3):
    """Makes the updates of :class:`FastTD3` in C++, on the CPU."""

    optimiser = CompiledAdam
    actor_adam: CompiledAdam
    critics_adam: CompiledAdam

    def build(self) -> None:
        super().build()
        self.compiled = "C++"
        self._code = code = library()
        config = self.config
        structures = [
            _structure(network) for network in (self.actor, self.actor_target, self.critics, self.critics_target)
        ]
        self._in_use = structures  # keeps the arrays in memory: C++ code has their addresses
        settings = _Settings(
            *(structure for structure, *_ in structures), config.precision == "bf16", config.critic_loss == "huber",
            config.target_noise, config.target_noise_clip,
        )  # fmt: skip
        self._team: int | None = None
        if has_second_thread(config.thread_count, config.threads_in):
            self._team = code.team_new()
            arguments = code, self._team, torch.get_num_threads()
            threading.Thread(target=_work, args=arguments, name="learner", daemon=True).start()
            # Python must not call team_end at exit: other threads possibly still learn then.
            weakref.finalize(self, code.team_end, self._team).atexit = False
        actor, critics = self.actor.layout, self.critics.layout
        size, low_size = max(actor.size, critics.size), max(actor.low_size, critics.low_size)
        self._engine = code.engine_new(byref(settings), self._team, size, low_size)
        if not self._engine:
            raise RuntimeError("C++ code could not create the engine")
        weakref.finalize(self, code.engine_delete, self._engine).atexit = False

    @property
    def shares_of_second_thread(self) -> int:
        """How many shares of the work the second thread has computed. The caller's thread computes the other shares."""
        return self._code.team_helped(self._team) if self._team else 0

    def update_critics(self, batch: Batch, noise: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        rows = len(noise)
        errors, y = torch.empty((len(self.critics.heads), rows, 1)), torch.empty((rows, 1))
        means = torch.empty(3)
        result = _CriticsResult(errors.data_ptr(), y.data_ptr(), means.data_ptr())
        self._call(self._code.update_critics, [*batch, noise], self.critics_adam, result)
        return list(errors), y, means

    def update_actor(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pi, loss = torch.empty(batch.action.shape), torch.empty(1)
        result = _ActorResult(pi.data_ptr(), loss.data_ptr())
        self._call(self._code.update_actor, [batch.observation], self.actor_adam, result)
        return pi, loss

    def _call(self, function: Callable[..., int], inputs: list[Tensor], adam: CompiledAdam, result: Structure) -> None:
        """Call an update function with its inputs, in the order of ``_Batch``."""
        inputs = [tensor.contiguous() for tensor in inputs]  # C++ code expects no gaps between rows
        batch = _Batch(len(inputs[0]), *(tensor.data_ptr() for tensor in inputs))
        if function(self._engine, byref(batch), byref(adam.next_step()), byref(result)):
            raise RuntimeError("the compiled update failed: too little memory, or torch could not multiply matrices")


def _structure(network: networks.Network) -> tuple[Any, ...]:
    """The ``_Network`` of a network, and the arrays to which its fields point."""
    layout, kinds = network.layout, len(networks.Layer._fields)
    weights = [layout.shapes[names[0]] for names in layout.names[0]]  # shapes: [out, in]
    sizes = [inputs for _, inputs in weights] + [weights[-1][0]]
    slots = [
        layout.begin(names[kind]) if kind < len(names) else -1  # -1: the layer has no such parameter
        for layers in layout.names
        for names in layers
        for kind in range(kinds)
    ]
    c_sizes, c_slots = (c_int64 * len(sizes))(*sizes), (c_int64 * len(slots))(*slots)
    structure = _Network(
        len(network.heads), len(weights), ctypes.addressof(c_sizes), ctypes.addressof(c_slots),
        network.flat.data_ptr(), network.low_flat.data_ptr(), len(layout.names[0][0]) == kinds,
    )  # fmt: skip
    return structure, c_sizes, c_slots


def _work(code: Library, team: int, threads_in_operators: int) -> None:
    prepare_thread(threads_in_operators)
    code.team_work(team)
    code.team_delete(team)


# -- compilation -------------------------------------------------------------------------------------------------------


@functools.cache
def available() -> bool:
    """Whether this machine can compile and use the C++ code. If not, a warning gives the reason."""
    began = time.monotonic()
    try:
        library()
        check()
    except (OSError, RuntimeError, AttributeError) as error:  # AttributeError: the library lacks a function
        log.warning("updates are not compiled and therefore slower: %s", error)
        return False
    log.info("the compiled update was ready after %.1f s", time.monotonic() - began)
    return True


def check() -> None:
    """Compare two compiled updates with the same updates in Python, in float32 and, if supported, in bfloat16.

    Raises:
        RuntimeError: the results differ by more than rounding.
    """
    precisions: list[Precision] = ["fp32"] if bf16_lack(CPU) else ["fp32", "bf16"]
    for precision in precisions:
        config = LearnerConfig(layer_norm=True, threads=2, precision=precision)
        plain, quick = (kind(3, 2, (24, 16), config, seed=0) for kind in (FastTD3, CompiledTD3))
        random = torch.Generator().manual_seed(0)
        for _ in range(config.policy_delay):
            rows = torch.rand((32, 10), generator=random)  # like a batch from the replay buffer: columns of one array
            batch = Batch(*torch.split(rows, [3, 2, 1, 3, 1], 1))
            for engine in (plain, quick):
                engine.learn(batch)
        for name in ("critics_adam", "actor_adam"):
            expected, found = (getattr(engine, name).mean for engine in (plain, quick))
            if not (found - expected).norm() <= _CLOSE[precision] * expected.norm():
                raise RuntimeError(f"the compiled update in {precision} differs from the plain update")


@functools.cache
def library() -> Library:
    """The shared library. Compiles ``update.cpp`` unless the user's cache folder has a library that can be loaded.

    Raises:
        OSError: there is no compiler, the folder is not writable, or the library cannot be loaded.
        RuntimeError: the user has no home folder, or the compiler failed.
    """
    path = library_file()
    if path.exists():
        with contextlib.suppress(OSError):  # the file is damaged
            return Library(path)
    log.info("compiling the update for this processor; this takes about 10 s")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path, mode=0o755) as made:
        command = [*machine.compiler(), str(_SOURCE), *_flags(), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=_english(), check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            reason = next((line for line in lines if "error" in line), lines[0])
            raise RuntimeError(f"{' '.join(machine.compiler())} failed: {reason}")
    return Library(path)


def library_file() -> Path:
    """The file of the shared library.

    Machines may share a home folder, and code for one processor may crash a process on another processor. So the name
    of the file depends on the processor.

    Raises:
        OSError: there is no compiler.
        RuntimeError: the user has no home folder.
    """
    compiler = machine.compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, env=_english(), check=False).stdout
    facts = machine.processor(), torch.__version__, compiler, version, _flags()
    digest = hashlib.sha256(repr(facts).encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    return files.user_folder("XDG_CACHE_HOME", "~/.cache").absolute() / "compiled" / f"{digest}.so"


def _flags() -> list[str]:
    """The compiler's options. The last ones name torch's headers and libraries."""
    folder = Path(torch.__file__).parent
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    linked = [f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    return [*_FLAGS, native, f"-I{folder / 'include'}", *linked]


def _english() -> dict[str, str]:
    """The environment of this process, changed so that a compiler writes English messages."""
    return {**os.environ, "LC_ALL": "C"}
