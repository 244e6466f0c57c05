"""`python -m bench`: starts everything itself, measures, prints one table."""

import argparse
import asyncio
import shlex
import sqlite3
import sys
from pathlib import Path

from . import machine, postgres, report
from .plan import FULL, QUICK
from .run import ALL, ROWS, measure


def main() -> None:
    options = _parser().parse_args()
    facts = machine.described(postgres.version() if options.postgres else f"SQLite {sqlite3.sqlite_version}")
    lines = asyncio.run(
        measure(QUICK if options.quick else FULL, options.only or ROWS, on_postgres=bool(options.postgres))
    )
    command = shlex.join(["python", "-m", "bench", *sys.argv[1:]])
    report.show(command, facts, lines)
    if options.json is not None:
        report.write(options.json, command, facts, lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller counts: two minutes, rougher numbers")
    parser.add_argument("--only", action="append", choices=ALL, metavar="ROW", help=f"one of {', '.join(ALL)}")
    parser.add_argument("--postgres", action="store_true", help="on a PostgreSQL of this run instead of SQLite")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser


if __name__ == "__main__":
    main()
