"""Compare the size of recordings with the size of their exports for Foxglove.

    python benchmarks/foxglove_size.py [FILE …] [--json]

Without FILE, the benchmark uses the recordings of the tests. It needs td3-robot[foxglove].
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from td3_robot.bench import harness
from td3_robot.recording import viewer_file
from td3_robot.recording.foxglove_messages import Converter
from td3_robot.recording.reader import Session

RECORDINGS = Path(__file__).parents[1] / "tests" / "replay" / "sessions"


def main() -> int:
    parser = harness.Options("python benchmarks/foxglove_size.py", "Measure the size of exports for Foxglove.")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="recordings")
    options = parser.parse_args()
    results = [measure(file) for file in options.files or sorted(RECORDINGS.glob("*.mcap"))]
    return harness.show({"machine": harness.describe("mcap"), "results": results}, options.json, lines)


def measure(file: Path) -> dict[str, Any]:
    """Export a recording. Return the sizes of both files in bytes, and the ratio export / recording."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "foxglove.mcap"
        viewer_file.export(Session([file]), path, Converter())
        recorded, exported = file.stat().st_size, path.stat().st_size
    return {"file": str(file), "bytes": recorded, "foxglove_bytes": exported, "ratio": exported / recorded}


def lines(report: harness.Report) -> Iterator[str]:
    yield f"{'recording':<24}{'bytes':>12}{'export bytes':>14}{'export / recording':>20}"
    for row in report["results"]:
        yield f"{Path(row['file']).name:<24}{row['bytes']:>12,}{row['foxglove_bytes']:>14,}{row['ratio']:>20.0%}"


if __name__ == "__main__":
    harness.run_script(main)
