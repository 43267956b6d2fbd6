"""Writes the links (rigid bodies) of the robots as data, so that viewers can draw a robot without PyBullet.

    python -m tests.recording.links

This command writes ``td3_robot/recording/links.json``, which :mod:`td3_robot.recording.poses` reads. Joints, axes and
offsets come from PyBullet. Shapes come from the model files, because PyBullet does not tell the direction of a capsule.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pybullet
import pybullet_data
from numpy.typing import ArrayLike
from td3_robot_sims.backends.bullet.robots import MODELS, RobotModel

from td3_robot.recording.poses import LINKS, Link, Robot, Shape, Vector
from td3_robot.specs import Float64

_ROOT = -1  # PyBullet's index of the root link


def describe(model: RobotModel) -> Robot:
    """Return the links of a robot, from its torso outwards.

    Some models turn a link by up to 0.004 rad against its parent even at joint angle 0. The result ignores this turn.
    """
    path = Path(pybullet_data.getDataPath()) / "mjcf" / model.file
    client = pybullet.connect(pybullet.DIRECT)
    try:
        (body,) = pybullet.loadMJCF(str(path), physicsClientId=client)
        joints = [pybullet.getJointInfo(body, index, client) for index in range(pybullet.getNumJoints(body, client))]
        states = [pybullet.getLinkState(body, index, physicsClientId=client) for index in range(len(joints))]
        centres = {index: np.array(state[2]) for index, state in enumerate(states)}
        centres[_ROOT] = np.array(pybullet.getDynamicsInfo(body, _ROOT, client)[3])
        torso = next((index for index, joint in enumerate(joints) if joint[12] == b"torso"), _ROOT)
        base = pybullet.getBasePositionAndOrientation(body, client)[0]
        height = (base if torso == _ROOT else states[torso][0])[2]
    finally:
        pybullet.disconnect(client)
    shapes = _shapes(path)
    driven = {name for name, _ in model.joints}
    # The origin of the torso is its centre of mass. The origin of every other link is its joint. A link without a
    # joint is a part of its parent.
    links = [Link("torso", -1)]
    drawn = [_moved(shapes["torso"], -centres[torso])]
    # Maps PyBullet's index of a link to two values. The first value is the index in ``links`` of the entry with this
    # link. The second value is the vector (m) from the origin of this entry to the origin of the link. The vector is 0
    # if the link has its own entry.
    places = {torso: (0, np.zeros(3))}
    for index, joint in enumerate(joints):
        parent = joint[16]
        if parent not in places:
            continue
        link, offset = places[parent]
        # PyBullet gives the joint's place relative to the parent's centre of mass.
        origin = offset + np.array(joint[14]) + (0 if parent == torso else centres[parent])
        name, body_name = joint[1].decode(), joint[12].decode()
        if name in driven:
            axis = _vector(np.array(joint[13]) / np.linalg.norm(joint[13]))
            links.append(Link(name, link, _vector(origin), axis, round(joint[8], 6), round(joint[9], 6)))
            drawn.append(())
            places[index] = (len(links) - 1, np.zeros(3))
        else:
            places[index] = (link, origin)
        place, offset = places[index]
        drawn[place] += _moved(shapes[body_name], offset)
    complete = tuple(msgspec.structs.replace(link, shapes=parts) for link, parts in zip(links, drawn, strict=True))
    return Robot(round(model.start_height or height, 6), complete)


def _shapes(path: Path) -> dict[str, list[tuple[Float64, Float64, float]]]:
    """Return begin, end and radius of each capsule and sphere in an MJCF file, by the name of its body.

    Source: MuJoCo XML reference, body/geom (https://mujoco.readthedocs.io/en/stable/XMLreference.html#body-geom).
    """
    result = defaultdict(list)
    tree = ElementTree.parse(path)
    for body in tree.iter("body"):
        for geom in body.findall("geom"):
            size = _numbers(geom.get("size", "0"))
            if ends := geom.get("fromto"):
                begin, end = _numbers(ends)[:3], _numbers(ends)[3:]
            else:
                middle = _numbers(geom.get("pos", "0 0 0"))
                half = np.array([0.0, 0.0, size[1] if geom.get("type") == "capsule" else 0.0])
                if turned := geom.get("axisangle"):
                    x, y, z, angle = _numbers(turned)
                    half = _rotated(half, np.array([x, y, z]), angle)
                begin, end = middle - half, middle + half
            result[body.get("name", "")].append((begin, end, float(size[0])))
    return result


def _rotated(vector: Float64, axis: Float64, angle: float) -> Float64:
    """Return a vector turned by an angle in rad about a unit vector (Rodrigues' formula)."""
    along = axis * np.dot(axis, vector)
    turned: Float64 = along + (vector - along) * float(np.cos(angle)) + np.cross(axis, vector) * float(np.sin(angle))
    return turned


def _numbers(text: str) -> Float64:
    return np.array([float(word) for word in text.split()])


def _moved(shapes: list[tuple[Float64, Float64, float]], offset: Float64) -> tuple[Shape, ...]:
    return tuple(Shape(_vector(begin + offset), _vector(end + offset), radius) for begin, end, radius in shapes)


def _vector(values: ArrayLike) -> Vector:
    x, y, z = (round(float(value), 6) + 0.0 for value in np.asarray(values))  # + 0.0 turns -0 into 0
    return x, y, z


def main() -> None:
    """Write ``td3_robot/recording/links.json``."""
    described = {name: describe(model) for name, model in MODELS.items()}
    LINKS.write_bytes(msgspec.json.format(msgspec.json.encode(described), indent=1) + b"\n")


if __name__ == "__main__":
    main()
