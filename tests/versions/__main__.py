"""Write the fixtures of what this build stores: `python -m tests.versions`. A fixture that exists is never changed."""

import asyncio
import logging
import sys

from .fixtures import DIRECTORY, Refused, missing
from .shapes import shapes


def main() -> None:
    # The sessions of the fixtures fail on purpose.
    logging.disable(logging.CRITICAL)
    while True:
        try:
            files = asyncio.run(missing(shapes()))
        except Refused as refused:
            sys.exit(str(refused))
        # What migrators make of new fixtures comes with the next round.
        if not files:
            return
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            sys.stdout.write(f"{path.relative_to(DIRECTORY)}\n")


if __name__ == "__main__":
    main()
