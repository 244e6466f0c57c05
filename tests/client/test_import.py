"""What the client brings along."""

import subprocess
import sys

_PROGRAM = """
import sys
import {module}
print(*sorted(name for name in sys.modules if name.partition(".")[0] in {watched}))
"""
WATCHED = {"perdure", "pydantic", "pydantic_core", "temporalio", "fastapi", "starlette", "orjson", "typer", "openai"}


def imported(module: str) -> set[str]:
    program = _PROGRAM.format(module=module, watched=WATCHED)
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def test_the_client_imports_nothing_else_of_perdure_nor_what_that_needs() -> None:
    others = {name for name in imported("perdure.client") if not name.startswith("perdure.client")}

    assert others == {"perdure"}
