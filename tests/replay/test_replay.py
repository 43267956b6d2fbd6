"""Replay passes if the behaviour is unchanged, and reports differences in a readable form."""

from __future__ import annotations

import json
import resource
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from td3_robot.cli.main import main
from td3_robot.config.schema import Config
from td3_robot.messages import Action, Message, Weights
from td3_robot.recording.entries import Attachment, Entry, Facts
from td3_robot.recording.facts import facts_of_this_machine
from td3_robot.recording.reader import Session
from td3_robot.recording.session_file import SessionFile
from td3_robot.replay import check as replay
from td3_robot.replay import machines
from td3_robot.replay.compare import Comparison
from td3_robot.replay.outcome import Outcome
from tests.sessions import entries_of

Make = Callable[..., Any]
Messages = list[tuple[str, Message]]


def spoilt(messages: Messages, number: int, value: float) -> Messages:
    """Return the messages. In the Action with the index ``number``, channel 0 of robot 1 gets the ``value``."""
    seen, result = 0, []
    for publisher, message in messages:
        if isinstance(message, Action):
            if seen == number:
                action = message.action.copy()
                action[1, 0] = value
                message = changed(message, action=action)
            seen += 1
        result.append((publisher, message))
    return result


def policy(path: Path, *options: str) -> int:
    return main(["replay", str(path), "--core", "policy", *options])


def test_policy_actions_are_bit_exact_across_a_change_of_weights(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save("a.mcap", entries_of(acted(30)))
    assert policy(path) == 0
    assert capsys.readouterr().out == (
        f"{path}: the same bit for bit: policy: 30 action\n{path}: not checked: 30 step, 2 weights\n"
    )


def test_not_compared_excludes_messages_compared_bit_for_bit_or_within_tolerance(acted: Make, save: Make) -> None:
    """Replay compares 20 Actions bit for bit and 10 within tolerances, so ``not_compared`` lists no Action."""
    report = Outcome()
    report.add(Comparison("action", 20), "bit for bit")
    report.add(Comparison("action", 10), "within the tolerances")
    session = Session([save("a.mcap", entries_of(acted(30)))])
    assert replay.not_compared(session, [report]) == {"step": 30, "weights": 2}


def test_a_step_recorded_after_its_action_does_not_change_the_result(acted: Make, save: Make) -> None:
    """In this test, every Action comes before its Step.

    The recorder receives each node's messages separately, so this order is possible.
    """
    entries = entries_of(acted(30))
    for at in range(len(entries) - 1):
        if (entries[at].topic, entries[at + 1].topic) == ("step", "action"):
            entries[at], entries[at + 1] = entries[at + 1], entries[at]
    assert policy(save("a.mcap", entries)) == 0


def test_a_difference_gives_exit_code_1_and_a_report(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save("a.mcap", entries_of(spoilt(acted(30), 12, 0.25)))
    assert policy(path) == 1
    text = capsys.readouterr().out
    assert "policy: action DIFFERS: 1 action (of 30 compared bit for bit)" in text
    assert "first at action sim-0 0 12: action[robot 1, channel 0]" in text
    assert "expected 0.25" in text
    assert "█" in text  # the histogram of the errors


def test_the_json_report_shows_each_recording_and_its_differences(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = save("a.mcap", entries_of(acted(30))), save("b.mcap", entries_of(spoilt(acted(30), 12, 0.25)))
    assert main(["replay", str(good), str(bad), "--core", "policy", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [report["same"], *(session["same"] for session in report["sessions"])] == [False, True, False]
    (topic,) = report["sessions"][1]["cores"]["policy"]["topics"]
    assert topic["compared"] == 30
    assert topic["differences"] == {"action": 1}
    assert topic["first"][0]["message"] == "sim-0 0 12"


def test_an_unanswered_step_is_not_reported_as_a_difference(acted: Make, save: Make) -> None:
    """A server keeps only the latest Step, so it may leave a Step without an answer."""
    messages = acted(30)
    last_action = max(at for at, (_, message) in enumerate(messages) if isinstance(message, Action))
    assert policy(save("a.mcap", entries_of(messages[:last_action]))) == 0


def test_update_shows_the_difference_and_then_accepts_it(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = acted(30)
    path = save("a.mcap", entries_of(spoilt(messages, 12, 0.25)))
    assert policy(path, "--update") == 0
    text = capsys.readouterr().out
    assert "DIFFERS" in text
    assert "rewritten, new references: reference/all/action" in text
    assert policy(path) == 0
    assert "the same bit for bit: policy: 30 action" in capsys.readouterr().out
    # The recorded messages stay unchanged, because the recorded Actions are also inputs of other cores.
    recorded = [entry.payload for entry in entries_of(spoilt(messages, 12, 0.25))]
    assert [entry.payload for entry in Session([path]).entries()] == recorded
    before = path.read_bytes()
    assert policy(path, "--update") == 0
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == ["a.mcap"]


def test_update_of_a_symbolic_link_changes_its_target(acted: Make, save: Make, tmp_path: Path) -> None:
    """The target keeps its permissions."""
    path = save("a.mcap", entries_of(spoilt(acted(30), 12, 0.25)))
    path.chmod(0o640)
    link = tmp_path / "other" / "link.mcap"
    link.parent.mkdir()
    link.symlink_to(path)
    assert policy(link, "--update") == 0
    assert link.is_symlink()
    assert policy(path) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_an_update_that_cannot_be_written_names_the_file_and_leaves_it_as_it_is(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands for a full disk."""
    path = save("a.mcap", entries_of(spoilt(acted(30), 12, 0.25)))
    before = path.read_bytes()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, most))
    try:
        assert policy(path, "--update") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert capsys.readouterr().err == f"td3-robot replay: {path}: File too large\n"
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == ["a.mcap"]


def test_update_keeps_everything_else_in_the_file(acted: Make, save: Make) -> None:
    """Older recorders stored two attachments under one name. Replay reads the first, and --update keeps both."""
    facts = facts_of_this_machine(Config(), [Attachment("x", "text/plain", data) for data in (b"A", b"B")])
    facts = Facts({**facts.metadata, "host": "{}"}, facts.attachments)
    path = save("a.mcap", entries_of(spoilt(acted(30), 12, 0.25)), facts)
    for _ in range(2):
        assert policy(path, "--update") == 0
        kept = [item for item in SessionFile(path).items() if not isinstance(item, Entry)]
        names = ["td3_robot", "config.yaml", "x", "x", "reference/all/action", "made/reference/all/action"]
        assert [item.name for item in kept] == names
        assert kept[1:4] == list(facts.attachments)
        assert Session([path]).metadata == facts.metadata


@pytest.mark.parametrize("data", [b"", b"[]", b'{"host": 1}', b'{"host": "\xff"}'])
def test_a_reference_with_damaged_machine_data_is_refused(data: bytes, acted: Make, save: Make, capsys: Any) -> None:
    path = save("a.mcap", entries_of(spoilt(acted(30), 12, 0.25)))
    assert policy(path, "--update") == 0
    session = Session([path])
    made = replace(session.attachments["made/reference/all/action"], data=data)
    facts = Facts(session.metadata, list({**session.attachments, made.name: made}.values()))
    assert policy(save("b.mcap", session.entries(), facts)) == 2
    assert "b.mcap: made/reference/all/action is damaged (" in capsys.readouterr().err


def test_outputs_of_another_kind_of_machine_are_compared_within_tolerance(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = acted(30)
    value = next(message for _, message in messages if isinstance(message, Action)).action[1, 0]
    here = facts_of_this_machine(Config())
    host = {**json.loads(here.metadata["host"]), "processor": "Abacus 3000"}
    facts = Facts({**here.metadata, "host": json.dumps(host)}, here.attachments)
    near = spoilt(messages, 0, float(np.nextafter(value, np.float32(9))))
    path = save("a.mcap", entries_of(near), facts)
    assert policy(path) == 0
    same, rest = capsys.readouterr().out.splitlines()
    assert "the same within tolerance (processor was Abacus 3000, is" in same
    assert same.endswith("; observation 1e-05, reward 0.0001, action 1e-05): policy: 30 action")
    assert rest == f"{path}: not checked: 30 step, 2 weights"
    assert policy(path, "--exact") == 1
    assert policy(save("b.mcap", entries_of(spoilt(messages, 0, float(value) + 0.01)), facts)) == 1


def test_a_text_describes_the_difference_between_machines() -> None:
    metadata = dict(facts_of_this_machine(Config()).metadata)
    assert machines.difference(metadata, ("numpy",)) is None
    host = json.loads(metadata["host"])
    host["packages"]["numpy"] = "0.1"
    assert machines.difference({"host": json.dumps(host)}, ("numpy",)) == f"numpy was 0.1, is {np.__version__}"
    for text in ("", "[]", "{}"):
        assert machines.difference({"host": text}, ()) is not None


def test_the_text_about_different_instruction_sets_is_short() -> None:
    """The text names three of 40 missing instruction sets."""
    host = json.loads(facts_of_this_machine(Config()).metadata["host"])
    vector = " ".join([host["vector"], *(f"amx_{number:02}" for number in range(40))])
    lacks = "the processor lacks amx_00, amx_01, amx_02 and 37 more instruction sets"
    assert machines.difference({"host": json.dumps({**host, "vector": vector})}, ()) == lacks
    added = machines.difference({"host": json.dumps({**host, "vector": "amx_00"})}, ())
    assert added is not None
    assert added.startswith("the processor lacks amx_00 and has in addition ")


def test_a_session_with_nothing_to_compare_fails(
    acted: Make, save: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only_steps = [(publisher, message) for publisher, message in acted(30) if publisher == "sim-0"]
    assert policy(save("a.mcap", entries_of(only_steps))) == 1
    assert policy(tmp_path / "a.mcap", "--update") == 1
    text = capsys.readouterr().out
    assert "not checked: policy: the recording has no Actions" in text
    assert "NOTHING could be checked" in text
    assert policy(tmp_path / "a.mcap", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [report["same"], report["sessions"][0]["same"]] == [False, False]


def test_uncheckable_actions_are_reported(acted: Make, save: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """The first weights, which computed 15 of the 30 Actions, are not recorded. These Actions cannot be checked."""
    messages = [item for number, item in enumerate(acted(30)) if number != 0]
    assert policy(save("a.mcap", entries_of(messages))) == 0
    assert "not checked: policy: 15 Actions: their weights are not recorded; " in capsys.readouterr().out


def test_actions_are_reported_if_the_recording_lacks_their_policy(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second Weights are recorded without their policy: the payload is empty. So 15 of 30 Actions are unchecked."""
    messages = [
        (publisher, changed(message, payload=b"") if isinstance(message, Weights) and message.version == 2 else message)
        for publisher, message in acted(30)
    ]
    path = save("a.mcap", entries_of(messages))
    assert policy(path) == 0
    same, rest = capsys.readouterr().out.splitlines()
    assert same == f"{path}: the same bit for bit: policy: 15 action"
    assert rest.startswith(f"{path}: not checked: policy: 15 Actions: their weights are not recorded; 15 action, ")


def test_old_and_damaged_files_are_refused(acted: Make, save: Make, capsys: pytest.CaptureFixture[str]) -> None:
    here = facts_of_this_machine(Config())
    old = save("old.mcap", entries_of(acted(2)), Facts({**here.metadata, "protocol": "0"}, here.attachments))
    assert policy(old) == 2
    assert "recorded with protocol version 0" in capsys.readouterr().err
    damaged = save("damaged.mcap", entries_of(acted(40)), close=False)
    assert policy(damaged) == 2
    assert "td3-robot recover" in capsys.readouterr().err
    bare = save("bare.mcap", entries_of(acted(2)), Facts(here.metadata))
    assert policy(bare) == 2
    assert "holds no config.yaml" in capsys.readouterr().err


def test_an_unreadable_file_is_reported_and_the_others_are_replayed(
    acted: Make, save: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = save("good.mcap", entries_of(acted(30))), save("bad.mcap", entries_of(spoilt(acted(30), 12, 0.25)))
    empty = good.with_name("empty.mcap")
    empty.touch()
    error = f"'{empty}' is not an MCAP file"
    command = ["replay", str(empty), str(good), str(bad), "--core", "policy"]
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.err == f"td3-robot replay: {error}\n"
    assert f"{good}: the same bit for bit: policy: 30 action" in captured.out
    assert f"{bad}: policy: action DIFFERS" in captured.out
    assert main([*command, "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert [session["same"] for session in report["sessions"]] == [False, True, False]
    assert report["sessions"][0] == {"file": str(empty), "same": False, "error": error}
    assert not report["same"]
    assert main([*command, "--update"]) == 2
    assert policy(bad) == 0
    facts = facts_of_this_machine(Config())
    later = [replace(item, data=b"future_key: 1\n") for item in facts.attachments if item.name == "config.yaml"]
    foreign = save("later.mcap", entries_of(acted(30)), replace(facts, attachments=later))
    assert main(["replay", str(foreign), str(good), "--core", "policy"]) == 2
    captured = capsys.readouterr()
    assert "later.mcap" in captured.err
    assert "unknown key 'future_key'" in captured.err
    assert f"{good}: the same bit for bit: policy: 30 action" in captured.out


def test_a_core_that_is_not_installed_gives_a_note_or_an_error(
    acted: Make, save: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "learned.py").write_text("import torch\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # as on a machine without torch
    monkeypatch.setattr(replay, "CORES", {"policy": replay.CORES["policy"], "learner": "learned"})
    path = save("a.mcap", entries_of(acted(2)))
    assert main(["replay", str(path)]) == 0
    assert "not checked: learner: needs torch, which is not installed" in capsys.readouterr().out
    assert main(["replay", str(path), "--core", "learner"]) == 2
    assert "--core learner needs torch, which is not installed; pip install" in capsys.readouterr().err


def test_the_core_receives_the_recorded_time(acted: Make, save: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from td3_robot.policy.core import PolicyCore

    times: list[float] = []
    step = PolicyCore.step

    def noted(self: PolicyCore, inputs: Any, now: float) -> Any:
        times.append(now)
        return step(self, inputs, now)

    path = save("a.mcap", entries_of(acted(30)))
    monkeypatch.setattr(PolicyCore, "step", noted)
    assert policy(path) == 0
    assert times == sorted(times)
    # The messages are 1/60 s apart: 30 Steps, an Action after each Step, and Weights before the 1st and the 16th Step.
    # After the first Step, 59 messages follow, up to the last Step: 29 Actions, the second Weights, and 29 Steps.
    assert times[-1] - times[0] == pytest.approx(59 / 60, abs=0.02)
