"""Tables of extensions: shipped rows, rows of installed packages, and errors that list the allowed names."""

from __future__ import annotations

import math
import sys
from importlib import metadata
from pathlib import Path

import pytest

from td3_robot.errors import ConfigError
from td3_robot.registry import Registry


def installed(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    """Pretend that installed packages have these entry points."""
    rows = [metadata.EntryPoint(name, value, "td3_robot.toys") for name, value in points]
    monkeypatch.setattr(metadata, "entry_points", lambda group: [row for row in rows if row.group == group])


def test_shipped_row_is_imported_at_first_use() -> None:
    sys.modules.pop("colorsys", None)
    table = Registry("toy", {"hue": "colorsys:rgb_to_hsv"}, "td3_robot.toys")
    assert table.names() == ["hue"]
    assert "colorsys" not in sys.modules
    assert table.load("hue")(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)


def test_error_for_an_unknown_name_suggests_a_similar_name_or_lists_all() -> None:
    table = Registry("toy", {"root": "math:sqrt", "sine": "math:sin"}, "td3_robot.toys")
    with pytest.raises(ConfigError, match=r"^toy is 'rot'; did you mean 'root'\?$"):
        table.load("rot")
    with pytest.raises(ConfigError, match=r"^learner.toy is 'xyz'; allowed: root, sine$"):
        table.check("xyz", "learner.toy")


def test_installed_packages_add_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, ("cosine", "math:cos"))
    table = Registry("toy", {"root": "math:sqrt"}, "td3_robot.toys")
    assert table.names() == ["root", "cosine"]
    assert table.load("cosine") is math.cos
    assert "cosine" not in Registry("toy", {"root": "math:sqrt"}, "td3_robot.others")


def test_a_package_cannot_replace_a_shipped_row(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, ("root", "math:cos"))
    with pytest.raises(ConfigError, match="the toy 'root' exists already as math:sqrt"):
        Registry("toy", {"root": "math:sqrt"}, "td3_robot.toys").names()


@pytest.mark.parametrize("place", ["no_such_module:thing", "math:no_such_thing"])
def test_error_names_a_row_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    installed(monkeypatch, ("broken", place))
    with pytest.raises(ConfigError, match=rf"^toy 'broken' \({place}\) cannot be loaded: "):
        Registry("toy", {}, "td3_robot.toys").load("broken")


def test_an_exit_in_the_module_of_a_row_does_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "leaving_module.py").write_text("import sys; sys.exit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    installed(monkeypatch, ("leaving", "leaving_module:Thing"))
    with pytest.raises(ConfigError, match=r"^toy 'leaving' \(leaving_module:Thing\) cannot be loaded: SystemExit: 0$"):
        Registry("toy", {}, "td3_robot.toys").load("leaving")


def test_error_names_a_row_whose_module_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "failing_module.py").write_text('raise RuntimeError("two\\nlines")')
    monkeypatch.syspath_prepend(tmp_path)
    installed(monkeypatch, ("broken", "failing_module:thing"))
    with pytest.raises(ConfigError) as error:
        Registry("toy", {}, "td3_robot.toys").load("broken")
    line = "toy 'broken' (failing_module:thing) cannot be loaded: RuntimeError: 'two\\nlines'"
    assert str(error.value) == line
