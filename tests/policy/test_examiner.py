"""The thread that looks at new policies: what waits for it, what does not, and that nothing else changes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td3_robot.bundle import Bundle, sha256
from td3_robot.errors import BundleError
from td3_robot.messages import Action, Command, Message, Step, Weights
from td3_robot.policy.examiner import Examiner
from td3_robot.policy.store import Examined, examine
from td3_robot.specs import RobotSpec
from td3_robot.transport.session import Input, Origin, Peer, hello
from tests.policy.unrecorded import PolicyCore

_PATIENCE = 30.0  # seconds


@dataclass
class Gate:
    """An ``examine`` that waits to be let through, and remembers who asked."""

    passes: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    asked: list[tuple[int, str]] = field(default_factory=list)
    failure: Exception | None = None

    def __call__(self, version: int, digest: str, payload: bytes) -> Examined:
        self.asked.append((version, threading.current_thread().name))
        assert self.passes.acquire(timeout=_PATIENCE)
        if self.failure:
            raise self.failure
        return examine(version, digest, payload)

    def open(self, count: int = 1) -> None:
        self.passes.release(count)


@pytest.fixture
def gate() -> Iterator[Gate]:
    it = Gate()
    yield it
    it.open(100)


@pytest.fixture
def examiner(gate: Gate) -> Iterator[Examiner]:
    it = Examiner(gate)
    yield it
    it.close()


@pytest.fixture
def operator() -> Peer:
    return Peer("policy", b"2", hello("operator", "op", client=2), {})


@pytest.fixture
def peer(spec: RobotSpec) -> Peer:
    return Peer("policy", b"1", hello("simulator", "sim-0", client=1, robots=1, spec=spec), {})


def weights(version: int, bundle: Bundle) -> Weights:
    payload = bundle.encode()
    return Weights(version, 0, 0, sha256(payload), payload)


def command(verb: str, bundle: Bundle | None = None, number: int = 1) -> Command:
    payload = bundle.encode() if bundle else b""
    return Command(number, "", verb, "", 0, sha256(payload) if bundle else "", payload)


def of(message: Message) -> tuple[int, str, bytes] | None:
    """The policy in a message, as a core wants it that is neither frozen nor shy of size."""
    if isinstance(message, Weights):
        return message.version, message.sha256, message.payload
    if isinstance(message, Command) and message.verb == "load":
        return message.version, message.sha256, message.payload
    return None


def wait(examiner: Examiner, count: int) -> list[Input]:
    """What is told until there are so many, in turns in which nothing arrives."""
    told: list[Input] = []
    end = time.monotonic() + _PATIENCE
    while len(told) < count:
        assert time.monotonic() < end, f"{len(told)} of {count} inputs were told"
        told += examiner.sift([], of)
    return told


def test_who_waits_for_a_look_and_who_does_not(
    examiner: Examiner,
    gate: Gate,
    operator: Peer,
    peer: Peer,
    make_step: Callable[..., Step],
    make_bundle: Callable[..., Bundle],
) -> None:
    """What is behind a policy from the same origin waits with it; others do not, and an emergency stop never does."""
    other = replace(operator, key=b"3")
    load, state, stop = command("load", make_bundle(1)), command("state"), command("estop")
    new = weights(2, make_bundle(2))
    step = make_step(1)
    arrived: list[Input] = [(operator, load), ("learner", new), (peer, step), (operator, state), (other, state)]
    assert examiner.sift(arrived, of) == [(peer, step), (other, state)]
    assert examiner.sift([(operator, stop), (peer, step)], of) == [(operator, stop), (peer, step)]
    assert examiner.sift([(operator, state)], of) == []
    gate.open()
    assert wait(examiner, 3) == [(operator, load), (operator, state), (operator, state)]
    gate.open()
    assert wait(examiner, 1) == [("learner", new)]
    assert [name for _, name in gate.asked] == ["examiner", "examiner"]


def test_the_core_finds_the_result_and_looks_at_nothing_again(
    examiner: Examiner,
    gate: Gate,
    peer: Peer,
    make_step: Callable[..., Step],
    make_bundle: Callable[..., Bundle],
) -> None:
    core = PolicyCore(seed=9, examine=examiner)
    first, second = make_bundle(1), make_bundle(2)
    core.load(1, first)
    told = examiner.sift([("learner", weights(2, second)), (peer, make_step(0))], core.wanted)
    [(_, action)] = core.step(told, 0.0)
    assert isinstance(action, Action)
    assert action.weights_version == 1  # a robot is answered meanwhile
    gate.open()
    end = time.monotonic() + _PATIENCE
    while core.version == 1:
        assert time.monotonic() < end
        core.step(examiner.sift([], core.wanted), 0.0)
    assert gate.asked == [(2, "examiner")]
    assert core.store.held[2].bundle.tensors["actor.0.weight"].tobytes() == second.tensors["actor.0.weight"].tobytes()


def test_bytes_that_are_no_policy_are_refused_as_without_it(
    examiner: Examiner,
    gate: Gate,
    make_bundle: Callable[..., Bundle],
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = replace(weights(2, make_bundle()), sha256="0" * 64)
    said = []
    gate.open()
    for core, sift in ((PolicyCore(seed=9, examine=examiner), True), (PolicyCore(seed=9), False)):
        core.load(1, make_bundle())
        caplog.clear()
        if sift:
            assert examiner.sift([("learner", bad)], core.wanted) == []
            core.step(wait(examiner, 1), 0.0)
        else:
            core.step([("learner", bad)], 0.0)
        assert (core.version, core.counters["weights_refused"]) == (1, 1)
        said.append(caplog.messages)
    assert said[0] == said[1] == ["refused: weights version 2: the hash does not fit the payload"]
    assert gate.asked == [(2, "examiner")]


def test_what_the_core_would_not_look_at_is_told_at_once(
    examiner: Examiner, gate: Gate, make_bundle: Callable[..., Bundle]
) -> None:
    """Of a frozen server; and far too many bytes."""
    core = PolicyCore(seed=9, examine=examiner)
    core.load(1, make_bundle())
    large: list[Input] = [("learner", Weights(2, 0, 0, "0" * 64, bytes(3_000_000)))]
    assert examiner.sift(large, core.wanted) == large
    core.step(large, 0.0)
    core.frozen = True
    small: list[Input] = [("learner", weights(2, make_bundle()))]
    assert examiner.sift(small, core.wanted) == small
    core.step(small, 0.0)
    assert core.counters == {"weights_refused": 1, "weights_frozen": 1}
    assert gate.asked == []


def test_a_load_that_became_another_version_meanwhile_is_looked_at_again(
    examiner: Examiner, gate: Gate, operator: Peer, make_bundle: Callable[..., Bundle]
) -> None:
    """Version 0 asks for the next one, which is known when it is told: what is said of it must name that."""
    gate.open(2)
    core = PolicyCore(seed=9, examine=examiner)
    core.load(1, make_bundle())
    assert examiner.sift([(operator, command("load", make_bundle(2)))], core.wanted) == []
    core.load(5, make_bundle())
    core.step(wait(examiner, 1), 0.0)
    assert (core.version, [version for version, _ in gate.asked]) == (6, [2, 6])


def test_of_many_weights_the_oldest_are_left_out(
    examiner: Examiner, gate: Gate, make_bundle: Callable[..., Bundle]
) -> None:
    """One is being looked at, four wait; the others, which are older, never are."""
    bundle = make_bundle()
    examiner.sift([("learner", weights(1, bundle))], of)
    end = time.monotonic() + _PATIENCE
    while not gate.asked:
        assert time.monotonic() < end
    examiner.sift([("learner", weights(version, bundle)) for version in range(2, 10)], of)
    gate.open(100)
    assert [message.version for _, message in wait(examiner, 5) if isinstance(message, Weights)] == [1, 6, 7, 8, 9]
    assert examiner.counters == {"weights_overtaken": 4}
    assert [version for version, _ in gate.asked] == [1, 6, 7, 8, 9]


def test_every_command_is_told_however_many_there_are(
    examiner: Examiner, gate: Gate, operator: Peer, make_bundle: Callable[..., Bundle]
) -> None:
    loads = [(operator, command("load", make_bundle(), number)) for number in range(10)]
    assert examiner.sift(list(loads), of) == []
    gate.open(100)
    assert wait(examiner, 10) == loads
    assert len(gate.asked) < 10  # the others are the core's own business
    assert not examiner.counters


def test_a_mistake_in_the_look_is_the_cores(examiner: Examiner, gate: Gate, make_bundle: Callable[..., Bundle]) -> None:
    """Whatever goes wrong beside the loop comes up in it, and the thread goes on."""
    gate.failure = ValueError("a mistake")
    gate.open(2)
    new = weights(1, make_bundle())
    examiner.sift([("learner", new)], of)
    assert wait(examiner, 1) == [("learner", new)]
    with pytest.raises(ValueError, match="a mistake"):
        examiner(new.version, new.sha256, new.payload)
    gate.failure = BundleError("no policy")
    gate.open()
    examiner.sift([("learner", new)], of)
    wait(examiner, 1)
    with pytest.raises(BundleError, match="no policy"):
        examiner(new.version, new.sha256, new.payload)
    assert [name for _, name in gate.asked] == ["examiner", threading.current_thread().name, "examiner"]


_FROM = st.sampled_from(["learner", "op-1", "op-2", "robot"])
_WHAT = st.sampled_from(["policy", "estop", "other"])


@given(turns=st.lists(st.lists(st.tuples(_FROM, _WHAT), max_size=4), max_size=12), seed=st.integers(0, 2**16))
def test_everything_is_told_once_and_in_order(turns: list[list[tuple[str, str]]], seed: int) -> None:
    """But for emergency stops, and for weights that newer ones have overtaken."""
    origins: dict[str, Origin] = {
        "learner": "learner",
        **{name: Peer("policy", name.encode(), hello("operator", name, client=1), {}) for name in ("op-1", "op-2")},
        "robot": Peer("policy", b"r", hello("operator", "robot", client=1), {}),
    }
    released = threading.Semaphore(0)

    def slow(version: int, digest: str, payload: bytes) -> Examined:
        del version, digest, payload
        released.acquire(timeout=_PATIENCE)
        raise BundleError("no policy")

    examiner = Examiner(slow)
    number = itertools.count(seed)
    arrived: list[Input] = []
    told: list[Input] = []
    for turn in turns:
        inputs: list[Input] = []
        for name, what in turn:
            if name == "learner":
                message: Message = Weights(next(number), 0, 0, "", b"w")
            else:
                message = Command(next(number), "", {"policy": "load"}.get(what, what), "", 0, "", b"c")
            inputs.append((origins[name], message))
        arrived += inputs
        told += examiner.sift(inputs, of)
        released.release()
    released.release(len(arrived) + 1)
    told += wait(examiner, len(arrived) - len(told) - examiner.counters["weights_overtaken"])
    assert examiner.sift([], of) == []
    for origin in origins.values():
        before = [message for sender, message in arrived if sender is origin]
        after = [message for sender, message in told if sender is origin]
        stops = [message for message in before if isinstance(message, Command) and message.verb == "estop"]
        assert sorted(map(id, after)) == sorted({*map(id, before)} & {*map(id, after)})
        assert [message for message in after if message not in stops] == [
            message for message in before if message not in stops and message in after
        ]
        if isinstance(origin, Peer):
            assert len(after) == len(before)
    examiner.close()
