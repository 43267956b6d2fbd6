"""Tables to which users can add rows: algorithms, noises, simulator backends and drivers.

A row is a name and a place ``module:attribute``. A table imports the module only in :meth:`Registry.load`, so listing
the names imports nothing. Installed packages can add rows with entry points.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from td3_robot.errors import USER_CODE, ConfigError
from td3_robot.util.text import did_you_mean, one_line


class Registry:
    """A table of extensions of one kind.

    Args:
        kind: what a row stands for, for example ``algorithm``. Error messages contain this word.
        rows: maps each name to ``module:attribute``. :meth:`names` keeps the order of this mapping.
        group: entry point group for rows of installed packages, for example ``td3_robot.algorithms``.
    """

    def __init__(self, kind: str, rows: Mapping[str, str], group: str) -> None:
        self.kind = kind
        self.group = group
        self._own = dict(rows)

    @functools.cached_property
    def rows(self) -> dict[str, str]:
        """Every name and its place: first the shipped rows, then the rows of installed packages.

        Raises:
            ConfigError: an installed package adds a name that the table has already, and gives this name another place.
        """
        from importlib import metadata  # takes 20 ms; the rows of this package do not need it

        rows = dict(self._own)
        for point in metadata.entry_points(group=self.group):
            if rows.get(point.name, point.value) != point.value:
                raise ConfigError(
                    f"entry point {point.name} = {point.value} in group {self.group}: "
                    f"the {self.kind} {point.name!r} exists already as {rows[point.name]}"
                )
            rows[point.name] = point.value
        return rows

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self.rows

    def names(self) -> list[str]:
        """The names of all rows, in order."""
        return list(self.rows)

    def check(self, name: str, label: str = "") -> None:
        """Check that a row of this name exists.

        The error begins with ``label``, or with the kind of the table if ``label`` is empty.

        Raises:
            ConfigError: there is no such row. The error names the most similar row, or lists up to 32 rows.
        """
        if name not in self:
            raise ConfigError(f"{label or self.kind} is {name!r}; {did_you_mean(name, self.rows, 'allowed:')}")

    def load(self, name: str) -> Any:
        """Import the object of a row.

        Raises:
            ConfigError: there is no such row, or an installed package's row cannot be imported.
            ModuleNotFoundError: a shipped row needs an extra that is not installed.
        """
        self.check(name)
        # read ``rows`` last: it searches all packages, which takes 30 ms
        place = self._own.get(name) or self.rows[name]
        module, _, attribute = place.partition(":")
        try:
            return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        except ConfigError:  # from the base class of the rows
            raise
        except USER_CODE as error:  # the code of an installed package may raise anything
            if name in self._own:
                raise
            what = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
            raise ConfigError(f"{self.kind} {name!r} ({place}) cannot be loaded: {what}{one_line(error)}") from None
