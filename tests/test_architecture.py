"""Imports go one way, cores do no I/O, and the robot side imports no heavy package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.imports import IMPORT_ROBOT_SIDE

ROOT = Path(__file__).parent.parent
MODULES = sorted([*ROOT.glob("td3_robot/**/*.py"), *ROOT.glob("sims/**/*.py")])

HEAVY = {"torch", "gymnasium", "pybullet", "matplotlib", "tensorboard", "td3_robot_sims"}
ALLOWED = {
    "td3_robot/messages.py": {"specs"},
    "td3_robot/topics.py": {"messages"},
    "td3_robot/specs.py": {"errors"},
    "td3_robot/errors.py": set(),
    "td3_robot/core_types.py": {"messages"},
    "td3_robot/registry.py": {"errors", "util"},
    "td3_robot/noises.py": {"errors", "registry", "util"},
    "td3_robot/bundle.py": {"errors", "noises", "safety", "specs", "util"},
    "td3_robot/util": {"errors", "util"},
    # From ``learner``, the configuration may import only ``learner.algorithms.table``, which does not load torch.
    "td3_robot/config": {"config", "errors", "learner", "noises", "safety", "util"},
    "td3_robot/safety": {"config", "errors", "messages", "safety", "specs", "util"},
    "td3_robot/transport": {"core_types", "errors", "messages", "specs", "topics", "transport", "util"},
    "td3_robot/policy/core.py": {"bundle", "config", "core_types", "messages", "policy", "safety", "specs"},
    "td3_robot/driver/core.py": {"config", "core_types", "driver", "messages", "safety", "specs"},
    "td3_robot/learner/algorithms": {"config", "errors", "learner", "registry", "util"},
    "td3_robot/learner/engine/networks.py": set(),
}
"""What these modules and packages may import from td3_robot. The test below has more rules."""


def imported(module: Path) -> Iterator[str]:
    return imported_by(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))


def imported_by(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_allowed_modules(module: Path) -> None:
    name = str(module.relative_to(ROOT))
    names = set(imported(module))
    roots = {item.split(".")[0] for item in names}
    if name.startswith("td3_robot/"):
        assert not {
            item for item in runtime_imports(module, inside_functions=True) if item.startswith("td3_robot_sims")
        }
        assert not roots & {"pybullet", "gymnasium"}
    if name.startswith("td3_robot/policy/"):
        assert not [item for item in names if item.startswith("td3_robot.learner")]
        assert "torch" not in roots
    if name.startswith("td3_robot/driver/"):
        assert not [item for item in names if item.startswith(("td3_robot.learner", "td3_robot.policy"))]
    if name.startswith("td3_robot/learner/"):
        assert not [item for item in names if item.startswith("td3_robot.policy")]
    for place, allowed in ALLOWED.items():
        if name.startswith(place):
            parts = {item.split(".")[1] for item in names if item.startswith("td3_robot.")}
            assert parts <= allowed, f"{name} imports {parts - allowed}"


@pytest.mark.parametrize(
    "place",
    [
        *(f"learner/{part}*.py" for part in ("", "checkpointing/", "experience/", "replay_buffer/", "scheduling/")),
        "replay/*.py",
        "recording/*.py",
        "bundle.py",
        "config/resume.py",
    ],
)
def test_modules_that_serve_every_algorithm_contain_no_algorithm_name(place: str) -> None:
    for module in (ROOT / "td3_robot").glob(place):
        words = set(re.findall(r"\w+", module.read_text(encoding="utf-8").lower().replace("td3-robot", "")))
        assert not words & {"td3", "ddpg", "a2c"}, module


CORES = (
    "td3_robot.driver.actuator",
    "td3_robot.driver.core",
    "td3_robot.driver.guard",
    "td3_robot.driver.pacing",
    "td3_robot.learner.core",
    "td3_robot.learner.scheduling.free",
    "td3_robot.learner.scheduling.lockstep",
    "td3_robot.monitor.core",
    "td3_robot.policy.core",
    "td3_robot.recording.boundary",
    "td3_robot.safety.lifecycle",
    "td3_robot.safety.state",
    "td3_robot_sims.core",
)
"""The modules of the cores and of their parts. Nodes and tests use all of these modules, and replay uses most of them.

Two cores are not in this list. The recorder's core writes files. The evaluator's core is in the same module as the
evaluator's node.
"""
IO = {
    *("asyncio", "concurrent", "ctypes", "fcntl", "mmap", "multiprocessing", "os", "pathlib", "select", "selectors"),
    *("shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time", "zmq"),
}


def module_file(name: str) -> Path | None:
    """Return the file of ``name`` if it is a module of this project. Else return None, for example for a class."""
    folder = ROOT / "sims" if name.startswith("td3_robot_sims.") else ROOT
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    return path if name.startswith(("td3_robot.", "td3_robot_sims.")) and path.exists() else None


def runtime_imports(module: Path, *, inside_functions: bool) -> set[str]:
    """Return what a module imports at run time, without imports for the type checker."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.FunctionDef) and not inside_functions:
                continue
            yield child
            yield from walk(child)

    tree = ast.parse(module.read_text(encoding="utf-8"))
    return set(imported_by(walk(tree)))


@pytest.mark.parametrize("core", CORES)
def test_cores_do_no_io(core: str) -> None:
    """A core, and the modules of this project that the core imports, must not use I/O, clocks or threads.

    Outside the core's package, the test ignores imports inside functions. Other packages have functions that no core
    calls, for example ``Bundle.load_with_bytes``.
    """
    package = core.rpartition(".")[0]
    chains = {core: core}
    found = []
    queue = [core]
    while queue:
        name = queue.pop()
        file = module_file(name)
        assert file, f"{name} does not exist"
        for item in sorted(runtime_imports(file, inside_functions=name.startswith(package))):
            if item.split(".")[0] in IO:
                found.append(f"{chains[name]} imports {item}")
            if item not in chains and module_file(item):
                chains[item] = f"{chains[name]} -> {item}"
                queue.append(item)
    assert not found


def test_cores_send_nothing_to_a_recorder() -> None:
    """Nodes and the transport record what a core does. A core does not know the recorder."""
    for place in ("policy", "driver", "learner", "safety"):
        for module in (ROOT / "td3_robot" / place).rglob("*.py"):
            names = set(imported(module))
            recorded = {f"td3_robot.messages.{n}" for n in ("Start", "Turn", "RobotReport", "MotorCommand", "Latches")}
            assert module.name == "node.py" or not names & {"td3_robot.topics.RECORDER", *recorded}, module


def test_package_init_files_hold_no_code() -> None:
    """Importing one package must not load another."""
    for module in MODULES:
        if module.name == "__init__.py" and module.parent != ROOT / "td3_robot":  # td3_robot loads its names lazily
            *others, last = [None, *ast.parse(module.read_text()).body]
            assert not [it for it in others if it], module
            assert last is None or isinstance(last, ast.Expr), f"{module} may hold only a docstring"


def test_policy_server_imports_nothing_heavy() -> None:
    """The driver, the monitor and the commands import nothing heavy, either."""
    code = (
        "import sys, td3_robot.policy.node, td3_robot.driver.node, td3_robot.cli.main, td3_robot.cli.bench\n"
        "import td3_robot.cli.node, td3_robot.monitor.node\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"numpy", "zmq", "msgspec"} <= set(loaded)
    assert not set(loaded) & {*HEAVY, "mcap"}


def test_modules_of_the_robot_side_import_only_packages_of_the_base_installation() -> None:
    """``tests/process/test_install.py`` imports the same modules in real base installations, but this takes longer."""
    only_base = """
import importlib.machinery, sys
BASE = {*sys.stdlib_module_names, "msgspec", "numpy", "safetensors", "td3_robot", "yaml", "zmq"}
class Path(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in BASE:
            raise ModuleNotFoundError(f"{name} is not in the base installation", name=name)
sys.meta_path.insert(0, Path)
"""
    done = subprocess.run([sys.executable, "-c", only_base + IMPORT_ROBOT_SIDE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_recording_and_replay_need_only_the_package_extra_named_record() -> None:
    """On a robot, only the base package and its extra ``record`` are installed."""
    recording = [f"recording.{name}" for name in ("node", "info", "recover", "export", "play")]
    modules = [*recording, "replay.check", "replay.policy", "replay.pytest_plugin", "testing"]
    code = (
        f"import sys, {', '.join(f'td3_robot.{name}' for name in modules)}\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "mcap" in loaded
    assert not set(loaded) & {*HEAVY, "pyarrow"}


def test_nothing_is_unpickled() -> None:
    for module in MODULES:
        assert not {"pickle", "cloudpickle", "dill", "msgpack_numpy"} & {
            item.split(".")[0] for item in imported(module)
        }
        assert "allow_pickle=True" not in module.read_text()
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert module.parent.name == "convert", "only td3_robot.convert may call torch.load"
                assert [key.value.value for key in node.keywords if key.arg == "weights_only"] == [True]


def test_learner_core_imports_no_torch_and_no_training() -> None:
    """``learner.factory`` loads torch and measures the machine. The core gets only the function ``make_training``."""
    code = "import sys, td3_robot.learner.core\nprint(*sorted(sys.modules))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"torch", "subprocess", "zmq", "td3_robot.learner.compute", "td3_robot.learner.training"}
