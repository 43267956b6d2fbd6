"""Write the parts of the reference pages that come from the code, between markers such as ``<!-- begin: topics -->``.

python docs/produce.py [PAGE ...]           rewrite the parts of these pages (default: all pages)
python docs/produce.py --check [PAGE ...]   exit 1, with one line for each page that is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import produce_protocol
import produce_reference

from td3_robot.errors import EXIT_CHECK_FAILED, EXIT_GOOD, EXIT_USAGE

Parts = Mapping[str, Callable[[], str]]
FOLDER = Path(__file__).parent


PAGES: dict[str, Parts] = {"reference/protocol.md": produce_protocol.PARTS, **produce_reference.PARTS}
"""Maps each page to its parts. A part is the name of the markers, and a function that returns the text between them."""


def made(text: str, parts: Parts) -> str:
    """Return the page with every part rewritten.

    Raises:
        ValueError: a marker is missing or repeated.
    """
    for name, part in parts.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"markers {begin} and {end} must each occur once, in this order")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{part()}\n{end}{after}"
    return text


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    """Rewrite or check the pages. Return the exit code."""
    check = "--check" in arguments
    pages = [argument for argument in arguments if argument != "--check"]
    unknown = [page for page in pages if page not in PAGES]
    if unknown:
        print(f"produce.py: {unknown[0]!r} is not a page; allowed: {', '.join(PAGES)}", file=sys.stderr)
        return EXIT_USAGE
    code = EXIT_GOOD
    for page in pages or PAGES:
        document = folder / page
        try:
            old = document.read_text(encoding="utf-8")
            new = made(old, PAGES[page])
        except (OSError, ValueError) as error:
            print(f"{document}: {error}", file=sys.stderr)
            code = EXIT_CHECK_FAILED
            continue
        if new != old and check:
            print(f"{document} is out of date: run python docs/produce.py", file=sys.stderr)
            code = EXIT_CHECK_FAILED
        elif new != old:
            document.write_text(new, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
