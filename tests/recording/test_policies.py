"""A file holds each policy once. The recorder can leave out policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from mcap.reader import make_reader

from td3_robot.bundle import sha256
from td3_robot.cli.main import main
from td3_robot.config.schema import Config
from td3_robot.errors import SessionError
from td3_robot.messages import Weights
from td3_robot.recording import session_file
from td3_robot.recording.entries import Entry
from td3_robot.recording.facts import facts_of_this_machine
from td3_robot.recording.info import examine
from td3_robot.recording.reader import Session
from td3_robot.recording.recover import recover
from td3_robot.recording.session_file import SessionFile
from td3_robot.recording.writer import write
from tests.sessions import SECOND, Publisher, entries_of

Make = Callable[..., Any]
LARGE = 40_000
"""Size of a policy in bytes.

The bytes are random. If they were compressible, a second copy of a policy would hardly enlarge a file.
"""


@pytest.fixture
def policy(rng: Any) -> Callable[..., Weights]:
    """``policy(version)`` makes the Weights of a new policy. If ``payload`` is given, the policy is ``payload``."""

    def make(version: int, payload: bytes = b"", digest: str = "") -> Weights:
        payload = payload or rng.bytes(LARGE)
        return Weights(version, 10 * version, 100 * version, digest or sha256(payload), payload)

    return make


def payloads(path: Path) -> list[bytes]:
    return [weights.payload for _, weights in Session([path]).messages_of(Weights)]


def test_a_policy_in_several_messages_is_stored_once_and_read_back_bit_for_bit(policy: Make, save: Make) -> None:
    """A learner publishes version 1, and two servers load it. Later the learner publishes this policy as version 3."""
    first, other = policy(1), policy(2)
    again = policy(3, first.payload)
    entries = entries_of(
        [("learner", first), ("a", first), ("learner", other), ("b", first), ("learner", again)], SECOND
    )
    path = save("a.mcap", entries)
    assert list(Session([path]).entries()) == entries
    assert 2 * LARGE < path.stat().st_size < 2.5 * LARGE
    report = examine(path)
    assert report["damages"] == []
    assert sum(stream["missing"] for stream in report["topics"].values()) == 0
    assert {name: stream["count"] for name, stream in report["topics"].items()} == {
        "learner/weights": 3,
        "a/weights": 1,
        "b/weights": 1,
    }


def test_a_reference_has_its_own_topic_that_older_readers_do_not_know(policy: Make, save: Make) -> None:
    one = policy(1)
    path = save("a.mcap", entries_of([("learner", one), ("a", one)]))
    with path.open("rb") as file:
        topics = [channel.topic for _, channel, _ in make_reader(file, validate_crcs=True).iter_messages()]
    assert topics == ["learner/weights", "a/weights_reference"]


def test_messages_with_the_same_hash_but_different_policies_stay_different(policy: Make, save: Make) -> None:
    """The second message has a wrong hash, so a policy server refuses this message. A replay must refuse it, too."""
    one = policy(1)
    entries = entries_of([("learner", one), ("a", policy(1, digest=one.sha256)), ("b", one)])
    assert list(Session([save("a.mcap", entries)]).entries()) == entries


def test_each_part_of_a_split_recording_holds_the_policy(policy: Make, tmp_path: Path, make_step: Make) -> None:
    it = Publisher(tmp_path / "a.mcap", split_s=0.95)
    it.publish(policy(1), *(make_step(number) for number in range(12)))
    it.recorder.close(it.now)
    assert len(it.recorder.files) == 2
    assert [len(payload) for path in it.recorder.files for payload in payloads(path)] == [LARGE, LARGE]


@pytest.mark.parametrize(("every", "kept"), [(1, range(1, 10)), (3, (1, 3, 6, 9)), (100, (1,)), (0, ())])
def test_the_recorder_leaves_out_policies(every: int, kept: Any, policy: Make, tmp_path: Path, capsys: Any) -> None:
    """The recorder keeps policy 1 and the policies whose version is a multiple of ``every``.

    If ``every`` is 0, the recorder keeps no policy. If the recorder leaves out a policy, the recording still holds the
    Weights message, but without the policy. So no message is missing.
    """
    path = tmp_path / "a.mcap"
    it = Publisher(path, weights_every=every)
    sent = [policy(version) for version in range(1, 10)]
    it.publish(*sent)
    it.recorder.close(it.now)
    read = [weights for _, weights in Session([path]).messages_of(Weights)]
    assert [weights.version for weights in read] == list(range(1, 10))
    assert [weights.sha256 for weights in read] == [weights.sha256 for weights in sent]
    assert [weights.version for weights in read if weights.payload] == list(kept)
    assert [weights.payload for weights in read if weights.payload] == [sent[version - 1].payload for version in kept]
    report = examine(path)
    assert report["damages"] == []
    assert report["topics"]["sim-0/weights"]["missing"] == 0
    assert (report["policy_versions"]["count"], report["policy_versions"]["left_out"]) == (len(kept), 9 - len(kept))
    assert main(["info", str(path)]) == 0
    assert (f"{9 - len(kept)} left out" in capsys.readouterr().out) == (len(kept) < 9)
    assert path.stat().st_size < (len(kept) + 0.5) * LARGE


def test_policies_that_a_person_chose_are_always_recorded(policy: Make, tmp_path: Path) -> None:
    """A policy server sends such a policy on the link ``recorder``. For this link, the recorder leaves out nothing."""
    it = Publisher(tmp_path / "a.mcap", weights_every=0)
    it.publish(*(policy(version) for version in (1, 2)), link="recorder")
    it.recorder.close(it.now)
    assert [len(payload) for payload in payloads(tmp_path / "a.mcap")] == [LARGE, LARGE]


def test_recover_keeps_references(policy: Make, save: Make) -> None:
    """The recovered file holds each policy once, too."""
    first = policy(1)
    entries = entries_of([("learner", first), ("a", first), ("b", first)], SECOND)
    path = save("a.mcap", entries)
    path.write_bytes(path.read_bytes()[:-20])
    lost = recover(path, path.with_name("mended.mcap"))
    assert not lost["lost"]
    assert list(Session([path.with_name("mended.mcap")]).entries()) == entries
    assert path.with_name("mended.mcap").stat().st_size < 1.5 * LARGE


def test_a_reference_to_a_damaged_policy_is_read_with_an_empty_payload(policy: Make, tmp_path: Path) -> None:
    """The messages are one second apart, so each message has its own chunk."""
    first, path = policy(1), tmp_path / "a.mcap"
    messages = [("learner", first), ("a", first), ("a", policy(2))]
    write(path, facts_of_this_machine(Config()), entries_of(messages, SECOND))
    octets = bytearray(path.read_bytes())
    octets[octets.index(first.payload[1000:1100])] ^= 0xFF
    path.write_bytes(octets)
    lost = recover(path, path.with_name("mended.mcap"))
    assert lost["missing"] == {"learner/weights": 1}
    assert [len(payload) for payload in payloads(path.with_name("mended.mcap"))] == [0, LARGE]


def test_a_file_with_references_cannot_fill_the_memory(
    policy: Make, save: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of nine references in one chunk needs more than LARGE bytes. The test sets a chunk's limit to 8 · LARGE."""
    one = policy(1)
    path = save("a.mcap", entries_of([("learner", one), *((f"server-{n}", one) for n in range(9))], 1))
    assert len(payloads(path)) == 10
    monkeypatch.setattr(session_file, "_MAX_CHUNK", 8 * LARGE)
    with pytest.raises(SessionError, match="its references to policies need more than"):
        payloads(path)


def test_unknown_fields_from_a_later_td3_robot_are_kept(policy: Make, save: Make) -> None:
    """A learner of a later td3-robot can send more fields. Readers get these fields from a reference, too."""

    def extended(entry: Entry) -> Entry:
        return replace(entry, payload=msgpack.packb({**msgpack.unpackb(entry.payload), "colour": "red"}))

    one = policy(1)
    entries = [extended(entry) for entry in entries_of([("learner", one), ("a", one)])]
    path = save("a.mcap", entries)
    assert list(SessionFile(path).entries()) == entries
