"""Fuzz one target with Atheris, guided by coverage: ``python tests/fuzz/fuzz.py TARGET [SECONDS] [FOLDER]``.

The script needs the package ``atheris``. It runs for SECONDS (default: 15), begins with the inputs in
``corpus/TARGET``, and writes new inputs into FOLDER (default: a temporary folder). At a defect, the script prints the
traceback, writes the input to ``crash-…`` in the working folder, and ends with an error. Move the input to
``corpus/TARGET``, so that test_corpus.py tests it.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))
with atheris.instrument_imports(include=["td3_robot", "mcap"], exclude=["td3_robot.learner"]):
    from tests.fuzz import targets


def main() -> None:
    name = sys.argv[1]
    seconds = sys.argv[2] if len(sys.argv) > 2 else "15"
    folder = sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp()
    limits = [
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-timeout=60",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
    ]
    logging.disable(logging.CRITICAL)  # links log the messages that they drop
    known = Path(__file__).parent / "corpus" / name
    atheris.Setup([sys.argv[0], *limits, folder, str(known)], targets.TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
