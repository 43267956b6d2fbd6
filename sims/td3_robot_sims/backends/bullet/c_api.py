"""Declarations of Bullet's C interface, which PyBullet's library exports.

They match ``PhysicsClientC_API.h`` and ``SharedMemoryPublic.h`` of PyBullet 3.2.7. A wrong declaration would read wrong
memory, so the import of this module checks PyBullet's version and functions.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int, c_void_p
from typing import Any

from td3_robot.errors import ConfigError
from td3_robot_sims.quiet import without_lines

with without_lines(b"pybullet build time:"):
    import pybullet as pybullet  # other modules import it from here, to suppress its output

_M_PERTURB, _ZEROS = -6, 0xFF  # if M_PERTURB is 0xFF, glibc fills new memory with the complement of 0xFF: 0

# Make glibc fill new memory with zeros. After a change of masses, Bullet sometimes reads memory that nothing has
# written. Without zeros, about 1 in 100 runs of the same Humanoid simulation gives a different result. Other C
# libraries lack this option.
if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
    set_option(_M_PERTURB, _ZEROS)

_API = 202010061
"""PyBullet's API version. PyBullet changes this number when it changes the structures below."""

# Types of answers, from EnumSharedMemoryServerStatus.
SDF_LOADED, URDF_LOADED, MJCF_LOADED = 4, 6, 12
STATE, STEPPED, PICTURE, CONTACTS = 21, 26, 28, 39
DYNAMICS, BOXES, SAVED, RESTORED = 77, 85, 93, 95

MAX_BODIES = 512  # in one file


class JointInfo(Structure):
    """``b3JointInfo``. ``unused`` stands for fields that this project does not read."""

    _fields_ = (
        ("link_name", c_char * 1024),
        ("name", c_char * 1024),
        ("type", c_int),
        ("position_at", c_int),
        ("velocity_at", c_int),
        ("index", c_int),
        ("flags", c_int),
        ("damping", c_double),
        ("friction", c_double),
        ("lower", c_double),
        ("upper", c_double),
        ("unused", c_double * 19),
        ("parent", c_int),
        ("positions", c_int),
        ("velocities", c_int),
    )


class DynamicsInfo(Structure):
    """``b3DynamicsInfo``. ``unused`` stands for fields that this project does not read; some are integers."""

    _fields_ = (
        ("mass", c_double),
        ("inertia", c_double * 3),
        ("inertial_frame", c_double * 7),
        ("lateral_friction", c_double),
        ("unused", c_double * 13),
    )


# ``b3ContactPointData`` as C integers: flags, body A, body B, link A, link B, padding, 19 doubles (2 integers each).
CONTACT_INTS = 6 + 2 * 19
LINK_A = 3


class ContactInformation(Structure):
    """``b3ContactInformation``, with its points as C integers."""

    _fields_ = (("count", c_int), ("points", POINTER(c_int)))


class CameraImage(Structure):
    """``b3CameraImageData``."""

    _fields_ = (
        ("width", c_int),
        ("height", c_int),
        ("pixels", POINTER(ctypes.c_ubyte)),
        ("depths", POINTER(c_float)),
        ("segments", POINTER(c_int)),
    )


# PyDLL holds the interpreter lock, CDLL releases it. Only steps use CDLL.
_locked, _free = ctypes.PyDLL(pybullet.__file__), ctypes.CDLL(pybullet.__file__)


def _function(name: str, *arguments: Any, result: Any = c_int, library: ctypes.CDLL = _locked) -> Any:
    """Find a function of the library and declare its types. Raises ConfigError if the library does not export it."""
    try:
        function = getattr(library, name)
    except AttributeError:
        raise ConfigError(f"the installed pybullet does not export {name}; version 3.2.7 does") from None
    function.argtypes, function.restype = arguments, result
    return function


def _check_version(version: int) -> None:
    if version != _API:
        raise ConfigError(
            f"the installed pybullet has API version {version}; it must be {_API}, which pybullet 3.2.7 has"
        )


_check_version(pybullet.getAPIVersion())
_HANDLE = c_void_p  # pointer to a client, a command or an answer
_DOUBLES = POINTER(c_double)

connect = _function("b3ConnectPhysicsDirect", result=_HANDLE)
connect_window = _function("b3CreateInProcessPhysicsServerAndConnect", c_int, c_void_p, result=_HANDLE)
disconnect = _function("b3DisconnectSharedMemory", _HANDLE, result=None)
ready = _function("b3CanSubmitCommand", _HANDLE)
submit = _function("b3SubmitClientCommandAndWaitStatus", _HANDLE, _HANDLE, result=_HANDLE)
submit_freely = _function("b3SubmitClientCommandAndWaitStatus", _HANDLE, _HANDLE, result=_HANDLE, library=_free)
answer = _function("b3GetStatusType", _HANDLE)

parameters = _function("b3InitPhysicsParamCommand", _HANDLE, result=_HANDLE)
set_gravity = _function("b3PhysicsParamSetGravity", _HANDLE, c_double, c_double, c_double)
set_time_step = _function("b3PhysicsParamSetTimeStep", _HANDLE, c_double)
set_substeps = _function("b3PhysicsParamSetNumSubSteps", _HANDLE, c_int)
set_iterations = _function("b3PhysicsParamSetNumSolverIterations", _HANDLE, c_int)
set_contact_erp = _function("b3PhysicsParamSetDefaultContactERP", _HANDLE, c_double)
set_ordered_pairs = _function("b3PhysicsParameterSetDeterministicOverlappingPairs", _HANDLE, c_int)

load_sdf = _function("b3LoadSdfCommandInit", _HANDLE, c_char_p, result=_HANDLE)
load_urdf = _function("b3LoadUrdfCommandInit", _HANDLE, c_char_p, result=_HANDLE)
set_urdf_flags = _function("b3LoadUrdfCommandSetFlags", _HANDLE, c_int)
loaded_urdf = _function("b3GetStatusBodyIndex", _HANDLE)
load_mjcf = _function("b3LoadMJCFCommandInit", _HANDLE, c_char_p, result=_HANDLE)
set_load_flags = _function("b3LoadMJCFCommandSetFlags", _HANDLE, c_int, result=None)
loaded = _function("b3GetStatusBodyIndices", _HANDLE, POINTER(c_int), c_int)
joint_count = _function("b3GetNumJoints", _HANDLE, c_int)
joint_info = _function("b3GetJointInfo", _HANDLE, c_int, c_int, POINTER(JointInfo))

ask_dynamics = _function("b3GetDynamicsInfoCommandInit", _HANDLE, c_int, c_int, result=_HANDLE)
dynamics = _function("b3GetDynamicsInfo", _HANDLE, POINTER(DynamicsInfo))
change = _function("b3InitChangeDynamicsInfo", _HANDLE, result=_HANDLE)
set_mass = _function("b3ChangeDynamicsInfoSetMass", _HANDLE, c_int, c_int, c_double)
set_inertia = _function("b3ChangeDynamicsInfoSetLocalInertiaDiagonal", _HANDLE, c_int, c_int, _DOUBLES)
set_friction = _function("b3ChangeDynamicsInfoSetLateralFriction", _HANDLE, c_int, c_int, c_double)
set_damping = _function("b3ChangeDynamicsInfoSetJointDamping", _HANDLE, c_int, c_int, c_double)
set_restitution = _function("b3ChangeDynamicsInfoSetRestitution", _HANDLE, c_int, c_int, c_double)

save = _function("b3SaveStateCommandInit", _HANDLE, result=_HANDLE)
saved_as = _function("b3GetStatusGetStateId", _HANDLE)
restore = _function("b3LoadStateCommandInit", _HANDLE, result=_HANDLE)
set_saved = _function("b3LoadStateSetStateId", _HANDLE, c_int)
pose = _function("b3CreatePoseCommandInit", _HANDLE, c_int, result=_HANDLE)
set_base = _function("b3CreatePoseCommandSetBasePosition", _HANDLE, c_double, c_double, c_double)
set_turn = _function("b3CreatePoseCommandSetBaseOrientation", _HANDLE, c_double, c_double, c_double, c_double)
set_joint = _function("b3CreatePoseCommandSetJointPositionMultiDof", _HANDLE, _HANDLE, c_int, _DOUBLES, c_int)
set_speed = _function("b3CreatePoseCommandSetJointVelocityMultiDof", _HANDLE, _HANDLE, c_int, _DOUBLES, c_int)

control = _function("b3JointControlCommandInit2", _HANDLE, c_int, c_int, result=_HANDLE)
set_target_speed = _function("b3JointControlSetDesiredVelocity", _HANDLE, c_int, c_double)
set_force = _function("b3JointControlSetMaximumForce", _HANDLE, c_int, c_double)
set_torques = _function("b3JointControlSetDesiredForceTorqueMultiDof", _HANDLE, c_int, c_void_p, c_int)
force = _function("b3ApplyExternalForceCommandInit", _HANDLE, result=_HANDLE)
add_force = _function("b3ApplyExternalForce", _HANDLE, c_int, c_int, _DOUBLES, _DOUBLES, c_int, result=None)
filter_contacts = _function("b3CollisionFilterCommandInit", _HANDLE, result=_HANDLE)
set_pair = _function("b3SetCollisionFilterPair", _HANDLE, *[c_int] * 5, result=None)
step = _function("b3InitStepSimulationCommand", _HANDLE, result=_HANDLE)

ask_state = _function("b3RequestActualStateCommandInit", _HANDLE, c_int, result=_HANDLE)
with_velocities = _function("b3RequestActualStateCommandComputeLinkVelocity", _HANDLE, c_int)
state = _function("b3GetStatusActualState2", _HANDLE, *[c_void_p] * 12)
ask_contacts = _function("b3InitRequestContactPointInformation", _HANDLE, result=_HANDLE)
of_body_a = _function("b3SetContactFilterBodyA", _HANDLE, c_int, result=None)
of_body_b = _function("b3SetContactFilterBodyB", _HANDLE, c_int, result=None)
contacts = _function("b3GetContactPointInformation", _HANDLE, POINTER(ContactInformation), result=None)
ask_boxes = _function("b3RequestCollisionInfoCommandInit", _HANDLE, c_int, result=_HANDLE)
box = _function("b3GetStatusAABB", _HANDLE, c_int, _DOUBLES, _DOUBLES)

ask_picture = _function("b3InitRequestCameraImage", _HANDLE, result=_HANDLE)
set_size = _function("b3RequestCameraImageSetPixelResolution", _HANDLE, c_int, c_int, result=None)
set_camera = _function(
    "b3RequestCameraImageSetCameraMatrices", _HANDLE, POINTER(c_float), POINTER(c_float), result=None
)
set_renderer = _function("b3RequestCameraImageSelectRenderer", _HANDLE, c_int, result=None)
set_shadow = _function("b3RequestCameraImageSetShadow", _HANDLE, c_int, result=None)
paint = _function("b3InitUpdateVisualShape2", _HANDLE, c_int, c_int, c_int, result=_HANDLE)
set_colour = _function("b3UpdateVisualShapeRGBAColor", _HANDLE, POINTER(c_double), result=None)
picture = _function("b3GetCameraImageData", _HANDLE, POINTER(CameraImage), result=None)
window = _function("b3InitConfigureOpenGLVisualizer", _HANDLE, result=_HANDLE)
set_window = _function("b3ConfigureOpenGLVisualizerSetVisualizationFlags", _HANDLE, c_int, c_int, result=None)
set_view = _function(
    "b3ConfigureOpenGLVisualizerSetViewMatrix", _HANDLE, c_float, c_float, c_float, POINTER(c_float), result=None
)
