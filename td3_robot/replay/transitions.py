"""Compares the transitions of a replayed learner with the transitions in an attachment of the recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from td3_robot.errors import SessionError
from td3_robot.messages import Float32, Message, Shape, wire_fields
from td3_robot.recording.entries import Attachment
from td3_robot.recording.reader import Session
from td3_robot.replay.outcome import Outcome, Replayed

REFERENCE = "reference/transitions.safetensors"  # name of the attachment with the expected transitions


class Transition(Message, frozen=True):
    """A row of the replay buffer. ``td3-robot replay`` compares it like a message, but no node sends it.

    O is the number of observation channels, and A the number of action channels.
    """

    NAME: ClassVar[str] = "transition"

    observation: Annotated[Float32, Shape("O")]
    action: Annotated[Float32, Shape("A")]
    reward: Annotated[Float32, Shape("1")]
    discount: Annotated[Float32, Shape("1")]
    next_observation: Annotated[Float32, Shape("O")]


def add_transitions(outcome: Outcome, session: Session, got: Sequence[Transition], packages: tuple[str, ...]) -> None:
    """Add the expected transitions and the replayed transitions to the outcome.

    Also add an attachment with the replayed transitions: the reference that ``--update`` writes. If the recording has
    no expected transitions, add only this attachment.
    """
    expected = _reference(session)
    if expected is None:
        why = "the recording has no reference to compare with; replay --update adds a reference"
        outcome.notes.append(f"transitions: {why}")
    names = list(wire_fields(Transition))
    columns = {name: np.stack([getattr(item, name) for item in got]) for name in names if got}
    made = Attachment(REFERENCE, "application/x-safetensors", safetensors.numpy.save(columns))
    rows = [(None, item) for item in expected or []]
    outcome.parts.append(Replayed(Transition.NAME, packages, rows, got if rows else [], made))


def _reference(session: Session) -> list[Transition] | None:
    attached = session.attachments.get(REFERENCE)
    if attached is None:
        return None
    try:
        columns = safetensors.numpy.load(attached.data)
        arrays = [columns[name] for name in wire_fields(Transition)] if columns else []
        return [Transition(*row) for row in zip(*arrays, strict=True)]
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise SessionError(f"{session.paths[0]}: {REFERENCE} is damaged ({type(error).__name__}: {error})") from None
