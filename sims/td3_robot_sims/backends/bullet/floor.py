"""Draws the floor of a picture.

Bullet's software renderer could draw the floor too, but for the floor it takes ten times as long as for a robot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_PALETTE = np.linspace((236, 236, 236), (163, 184, 223), 256).astype(np.uint8)
"""Colours of the tiles, from light to dark."""
_SKY = (222, 233, 245)
_FAR = 10_000.0  # m from the camera, along its axis; the picture shows sky beyond this distance
_SHARP = 12.0  # m from the camera, along its axis; farther tiles fade, because the farthest are smaller than a pixel


def draw(width: int, height: int, view: Sequence[float], lens: Sequence[float]) -> NDArray[np.uint8]:
    """Draw a chequered floor at z = 0, and the sky above it: uint8[height, width, 3].

    Args:
        width, height: in pixels.
        view, lens: OpenGL's view and projection matrices, 16 numbers each, column by column.
    """
    camera = np.reshape(lens, (4, 4)).T @ np.reshape(view, (4, 4)).T
    # (X, Y) is a point of the floor. A linear map turns (X, Y, 1) into clip coordinates (x, y, w). Invert this map.
    floor_of = np.linalg.inv(camera[np.ix_((0, 1, 3), (0, 1, 3))]).astype(np.float32)
    x = ((np.arange(width, dtype=np.float32) + 0.5) * (2 / width) - 1)[None, :]
    y = (1 - (np.arange(height, dtype=np.float32) + 0.5) * (2 / height))[:, None]
    east, north, inverse = (row[0] * x + row[1] * y + row[2] for row in floor_of)
    seen = inverse > 1 / _FAR  # True if the pixel's ray meets the floor within _FAR of the camera
    distance = 1 / np.where(seen, inverse, 1)
    columns, rows = (np.floor(place * distance).astype(np.int32) for place in (east, north))
    dark = (columns + rows) & 1  # tiles have a side of one metre
    contrast = np.minimum(1, np.square(_SHARP * inverse))
    shade = 127.5 + contrast * (255 * dark.astype(np.float32) - 127.5)
    picture: NDArray[np.uint8] = _PALETTE[shade.astype(np.uint8)]
    picture[~seen] = _SKY
    return picture
