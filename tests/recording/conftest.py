"""Small sessions, made without any process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from td3_robot.bundle import Bundle, sha256
from td3_robot.config.schema import Config
from td3_robot.core_types import Peer
from td3_robot.messages import Message, Step, Weights
from td3_robot.policy.core import PolicyCore
from td3_robot.recording.entries import Entry, Facts, facts_of_this_machine
from td3_robot.recording.writer import SessionWriter
from td3_robot.transport import link as handshake

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """``save(name, entries, facts=…)``: writes a session file, whole unless ``close`` is False."""

    def run(name: str, entries: Iterable[Entry], facts: Facts | None = None, close: bool = True) -> Path:
        writer = SessionWriter(tmp_path / name, facts or facts_of_this_machine(Config()), 0.0)
        for number, entry in enumerate(entries):
            writer.add(entry)
            writer.turn(number / 60)
        if close:
            writer.close()
        else:
            writer._file.close()  # as SIGKILL leaves it: what was not handed over is gone
        return tmp_path / name

    return run


@pytest.fixture
def acted(
    make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> Callable[..., list[tuple[str, Message]]]:
    """``acted(steps, robots)``: what a simulator, a learner and a policy server say; new weights come on the way."""

    def run(steps: int = 30, robots: int = 2) -> list[tuple[str, Message]]:
        core, said = PolicyCore(Config().seed), list[tuple[str, Message]]()
        peer = Peer("policy", b"k", handshake.hello("simulator", "sim-0", client=0), {})
        for sequence in range(steps):
            if sequence in (0, steps // 2):
                payload = make_bundle(sequence, kind="gaussian", scale=0.1).encode()
                weights = Weights(1 + (sequence > 0), sequence, sequence, sha256(payload), payload)
                said.append(("learner", weights))
                core.step([("learner", weights)], 0.0)
            step = make_step(sequence, robots)
            said.append(("sim-0", step))
            outputs: list[Any] = core.step([(peer, step)], 0.0)
            said += [("policy", action) for _, action in outputs]
        return said

    return run
