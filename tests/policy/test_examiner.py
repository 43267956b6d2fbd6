"""A thread examines a learner's weights. The core serves the newest valid weights when their examination ends."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from td3_robot.bundle import Bundle, sha256
from td3_robot.core_types import Input, Peer
from td3_robot.errors import BundleError
from td3_robot.messages import Action, Command, Step, Weights
from td3_robot.policy.actor import Actor
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.examiner import Examiner
from td3_robot.policy.store import examine
from tests.conftest import poll_until

_PATIENCE = 30.0  # seconds


def _thread() -> str:
    """Return the name of the current thread, without the number that the pool adds."""
    return threading.current_thread().name.removesuffix("_0")


@dataclass
class Gate:
    """Replaces ``examine``. Records each call, and blocks the call until the test calls :meth:`open`."""

    passes: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    asked: list[tuple[int, str]] = field(default_factory=list)
    failure: BaseException | None = None

    def __call__(self, version: int, digest: str, payload: bytes) -> Actor:
        self.asked.append((version, _thread()))
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
def counters() -> Counter[str]:
    return Counter()


@pytest.fixture
def examiner(gate: Gate, counters: Counter[str]) -> Iterator[Examiner]:
    it = Examiner(counters, gate)
    yield it
    it.close()


def weights(version: int, bundle: Bundle) -> Weights:
    payload = bundle.encode()
    return Weights(version, 0, 0, sha256(payload), payload)


def every(_: Weights) -> bool:
    """Return True for all weights. This function replaces a core's ``store.wanted``."""
    return True


def until(what: Callable[[], object], turn: Callable[[], object] = lambda: None) -> None:
    """Run turns until the condition ``what`` is true."""
    poll_until(lambda: (turn(), what())[1], lambda: "the condition did not become true", _PATIENCE)


def wait(examiner: Examiner, count: int) -> list[int]:
    """Run turns without inputs until ``count`` versions are delivered, and return these versions."""
    delivered: list[int] = []

    def turn() -> None:
        delivered.extend(message.version for _, message in examiner.sift([], every) if isinstance(message, Weights))

    until(lambda: len(delivered) >= count, turn)
    return delivered


def test_weights_wait_for_the_examiner_and_other_messages_do_not(
    examiner: Examiner,
    gate: Gate,
    operator: Peer,
    peer: Peer,
    make_step: Callable[..., Step],
    make_bundle: Callable[..., Bundle],
) -> None:
    new, step = weights(2, make_bundle(2)), make_step(1)
    load = Command(1, "", "load", "", 0, new.sha256, new.payload)  # does not wait: commands keep their order
    others: list[Input] = [(operator, load), (peer, step), (operator, replace(load, verb="estop"))]
    assert examiner.sift([others[0], ("learner", new), *others[1:]], every) == others
    assert examiner.sift(others[1:], every) == others[1:]
    gate.open()
    assert wait(examiner, 1) == [2]
    assert gate.asked == [(2, "examiner")]


def test_the_core_uses_the_examiners_result(
    examiner: Examiner, gate: Gate, peer: Peer, make_step: Callable[..., Step], make_bundle: Callable[..., Bundle]
) -> None:
    core = PolicyCore(seed=9, examine=examiner)
    first, second = make_bundle(1), make_bundle(2)
    core.load(1, first)
    delivered = examiner.sift([("learner", weights(2, second)), (peer, make_step(0))], core.store.wanted)
    [(_, action)] = core.step(delivered, 0.0)
    assert isinstance(action, Action)
    assert action.weights_version == 1  # the robot still gets an answer
    gate.open()
    until(lambda: core.version > 1, lambda: core.step(examiner.sift([], core.store.wanted), 0.0))
    assert gate.asked == [(2, "examiner")]
    assert core.store.held[2].bundle.tensors["actor.0.weight"].tobytes() == second.tensors["actor.0.weight"].tobytes()


def test_an_examiner_does_not_change_how_invalid_weights_are_refused(
    examiner: Examiner, gate: Gate, make_bundle: Callable[..., Bundle], caplog: pytest.LogCaptureFixture
) -> None:
    bad = replace(weights(2, make_bundle()), sha256="0" * 64)
    gate.open()
    logged = []

    def delivered(core: PolicyCore) -> object:
        return poll_until(lambda: examiner.sift([], core.store.wanted), lambda: "no weights are delivered", _PATIENCE)

    for core in (PolicyCore(seed=9, examine=examiner), PolicyCore(seed=9)):
        core.load(1, make_bundle())
        caplog.clear()
        arrived: list[Input] = [("learner", bad)]
        if not logged:
            assert examiner.sift(arrived, core.store.wanted) == []
            assert delivered(core) == arrived
        core.step(arrived, 0.0)
        assert (core.version, core.counters) == (1, {"weights_refused": 1})
        logged.append(caplog.messages)
    assert logged[0] == logged[1] == ["refused: weights version 2: the hash does not fit the payload"]
    assert gate.asked == [(2, "examiner")]


def test_weights_that_the_core_would_refuse_are_delivered_at_once(
    examiner: Examiner, gate: Gate, make_bundle: Callable[..., Bundle]
) -> None:
    """The core refuses weights that are far too large, and all weights while the server is frozen."""
    core = PolicyCore(seed=9, examine=examiner)
    core.load(1, make_bundle())
    large: list[Input] = [("learner", Weights(2, 0, 0, "0" * 64, bytes(3_000_000)))]
    assert examiner.sift(large, core.store.wanted) == large
    core.step(large, 0.0)
    core.store.frozen = True
    small: list[Input] = [("learner", weights(2, make_bundle()))]
    assert examiner.sift(small, core.store.wanted) == small
    core.step(small, 0.0)
    assert core.counters == {"weights_refused": 1, "weights_frozen": 1}
    assert gate.asked == []


def test_older_weights_are_examined_if_the_newest_weights_are_invalid(
    examiner: Examiner, gate: Gate, counters: Counter[str], make_bundle: Callable[..., Bundle]
) -> None:
    """Versions 2, 3 and 4 arrive during the examination of version 1. Then the thread examines version 4.

    Version 4 is invalid, so the thread examines version 3. During this examination, version 5 arrives.
    """
    core = PolicyCore(seed=9, examine=examiner)

    def take(*arrived: Weights) -> None:
        core.step(examiner.sift([("learner", message) for message in arrived], core.store.wanted), 0.0)

    good = {version: weights(version, make_bundle()) for version in (1, 2, 3, 5)}
    take(good[1])
    take(good[2], good[3], replace(good[5], version=4, sha256="0" * 64))
    gate.open(2)
    until(lambda: core.counters["weights_refused"] == 1, take)  # versions 1 and 4 are examined
    until(lambda: len(gate.asked) == 3, take)  # version 3 is being examined
    take(good[5])
    gate.open(2)
    until(lambda: core.version == 5, take)
    assert gate.asked == [(1, "examiner"), (4, "examiner"), (3, "examiner"), (5, "examiner")]
    assert core.counters["weights_refused"] == 1
    assert counters == {"weights_not_examined": 1}  # version 2


def test_the_waiting_queue_is_bounded(
    examiner: Examiner, gate: Gate, counters: Counter[str], make_bundle: Callable[..., Bundle]
) -> None:
    """During an examination, only the four newest waiting versions stay in memory."""
    bad = replace(weights(1, make_bundle()), sha256="0" * 64)
    examiner.sift([("learner", bad)], every)
    left = [replace(bad, version=version, payload=bytes(bytearray(1000))) for version in range(2, 10)]
    watched = [weakref.ref(message) for message in left]
    examiner.sift([("learner", message) for message in left], every)
    left.clear()
    assert [ref() is not None for ref in watched] == [False] * 4 + [True] * 4
    gate.open(100)
    assert wait(examiner, 5) == [1, 9, 8, 7, 6]
    assert counters == {"weights_not_examined": 4}


def test_a_loaded_policy_replaces_all_weights_that_came_before_it(
    examiner: Examiner, gate: Gate, counters: Counter[str], operator: Peer, make_bundle: Callable[..., Bundle]
) -> None:
    """Version 7 is being examined and 8 waits. The next turn receives the load command between versions 9 and 10.

    The command names no version. The newest version in the core is 4, so the loaded policy gets version 5.
    """
    core = PolicyCore(seed=9, examine=examiner)
    core.load(4, make_bundle())
    new = {version: weights(version, make_bundle(version)) for version in (7, 8, 9, 10)}
    for version in (7, 8):
        assert examiner.sift([("learner", new[version])], core.store.wanted) == []
    until(lambda: gate.asked)
    chosen = make_bundle(1).encode()
    load = operator, Command(1, "", "load", "", 0, sha256(chosen), chosen)
    delivered = examiner.sift([("learner", new[9]), load, ("learner", new[10])], core.store.wanted)
    assert delivered == [load]
    gate.open(2)
    core.step(delivered, 0.0)
    assert core.version == 5
    assert gate.asked == [(7, "examiner"), (5, _thread())]
    gate.open()
    until(lambda: core.version > 5, lambda: core.step(examiner.sift([], core.store.wanted), 0.0))
    assert (core.version, sorted(core.store.held)) == (10, [4, 5, 10])
    assert counters == {"weights_not_examined": 3}


def test_refused_weights_are_freed(
    examiner: Examiner, gate: Gate, make_bundle: Callable[..., Bundle], caplog: pytest.LogCaptureFixture
) -> None:
    """A policy server can disable the garbage collector. So a reference cycle must not keep refused weights."""
    caplog.set_level(logging.CRITICAL)  # a captured log record would keep the error and the weights alive
    core = PolicyCore(seed=9, examine=examiner)
    core.load(1, make_bundle())
    bad = replace(weights(2, make_bundle()), sha256="0" * 64)
    watched = weakref.ref(bad)
    gc.disable()
    try:
        examiner.sift([("learner", bad)], core.store.wanted)
        del bad
        gate.open()
        until(lambda: core.counters, lambda: core.step(examiner.sift([], core.store.wanted), 0.0))
        examiner.sift([], core.store.wanted)
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("failure", [ValueError("a mistake"), KeyboardInterrupt("a panic")])
def test_an_error_in_the_examiner_is_raised_in_the_core(
    examiner: Examiner, gate: Gate, make_bundle: Callable[..., Bundle], failure: BaseException
) -> None:
    """An examination fails with an exception that is no BundleError.

    The core examines the same weights again, and gets the exception. The thread examines the next weights as usual.
    """
    gate.failure = failure
    gate.open(2)
    new = weights(1, make_bundle())
    examiner.sift([("learner", new)], every)
    assert wait(examiner, 1) == [1]
    with pytest.raises(type(failure), match="a "):
        examiner(new.version, new.sha256, new.payload)
    gate.failure = None
    gate.open()
    examiner.sift([("learner", new)], every)
    assert wait(examiner, 1) == [1]
    assert examiner(new.version, new.sha256, new.payload).bundle.hidden == make_bundle().hidden
    assert [name for _, name in gate.asked] == ["examiner", _thread(), "examiner"]


@given(turns=st.lists(st.lists(st.booleans(), max_size=4), max_size=12))
def test_the_newest_valid_weights_are_delivered(turns: list[list[bool]]) -> None:
    """Each inner list of ``turns`` holds the weights that arrive in one turn. True means valid weights.

    Each version is either delivered exactly once, or counted as not examined. The examiner delivers valid versions in
    ascending order. The newest valid version is delivered if it is among the last four versions.
    """
    released = threading.Semaphore(0)
    policy = Actor.__new__(Actor)
    versions = iter(range(1, 100))

    def slow(version: int, digest: str, payload: bytes) -> Actor:
        del version, payload
        released.acquire(timeout=_PATIENCE)
        if digest:
            return policy
        raise BundleError("no policy")

    arrived: dict[int, bool] = {}
    delivered: list[int] = []
    newest = 0
    counters: Counter[str] = Counter()

    examiner = Examiner(counters, slow)

    def wanted(offered: Weights) -> bool:
        return offered.version > newest

    def turn(*new: int) -> None:
        """Run one turn: offer the new versions, and record what is delivered."""
        nonlocal newest
        inputs: list[Input] = [
            ("learner", Weights(version, 0, 0, "good" if arrived[version] else "", b"w")) for version in new
        ]
        for _, message in examiner.sift(inputs, wanted):
            assert isinstance(message, Weights)
            delivered.append(message.version)
            newest = max(newest, message.version if arrived[message.version] else 0)

    for goods in turns:
        new = {next(versions): good for good in goods}
        arrived |= new
        turn(*new)
        released.release()
    released.release(len(arrived) + 1)
    until(lambda: len(delivered) + counters["weights_not_examined"] == len(arrived), turn)
    examiner.close()
    assert len(delivered) == len({*delivered}) == len(arrived) - counters["weights_not_examined"]
    good_delivered = [version for version in delivered if arrived[version]]
    assert good_delivered == sorted(good_delivered)
    if good := [version for version in list(arrived)[-4:] if arrived[version]]:
        assert newest == good[-1]
