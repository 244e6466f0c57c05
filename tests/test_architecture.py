"""What must hold of the code as a whole."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST_FILE = 500
HEAVY = {"fastapi", "httpx2", "openai", "pydantic_ai", "temporalio", "uvicorn"}

MACHINE_PATHS = re.compile(r"/root/|/home/[a-z]|/Users/[A-Za-z]|/opt/(wheels|pypi)|/work/(main|shared)|\.\./shared")
REGISTRY_HOSTS = re.compile(
    r"\b(pypi\.org|pythonhosted\.org|registry\.npmjs\.org|registry\.yarnpkg\.com|docker\.io|ghcr\.io|quay\.io)\b"
)


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every text file of the project, by its path."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("NOT CHECKED: this is no git checkout, so the project's files are unknown")
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0")
    found: dict[str, str] = {}
    for name in filter(None, names):
        path = ROOT / name
        # What is being moved right now is listed and not there.
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            found[name] = content.decode()
    return found


def test_the_layers_import_only_what_lies_below_them() -> None:
    linter = Path(sys.executable).parent / "lint-imports"

    result = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.alone
def test_importing_perdure_is_quick_and_light() -> None:
    program = (
        "import sys, time\nstart = time.perf_counter()\nimport perdure\n"
        "print(time.perf_counter() - start, *sorted({name.partition('.')[0] for name in sys.modules}))"
    )

    tries = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(3)
    ]

    # The best of three: a busy machine says nothing about the package.
    assert min(float(seconds) for seconds, *_ in tries) < 0.3
    assert HEAVY.isdisjoint(tries[0])


def test_the_command_line_starts_without_what_it_does_not_need() -> None:
    program = "import sys, perdure.cli.commands\nprint(*{name.partition('.')[0] for name in sys.modules})"

    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout

    assert HEAVY.isdisjoint(loaded.split())


@pytest.mark.parametrize(
    ("part", "unneeded"),
    [
        ("worker", {"openai", "anthropic", "opentelemetry.sdk"}),
        ("api.server", {"joserfc", "cryptography", "opentelemetry.sdk", "pydantic_ai"}),
    ],
)
def test_a_part_starts_without_what_only_some_settings_need(part: str, unneeded: set[str]) -> None:
    program = f"import sys, {part}\nprint(*sys.modules)"

    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout

    assert unneeded.isdisjoint(loaded.split())


def test_no_file_is_too_long_to_read(texts: dict[str, str]) -> None:
    lengths = {name: text.count("\n") for name, text in texts.items() if name.endswith(".py")}

    assert {name: lines for name, lines in lengths.items() if lines >= LONGEST_FILE} == {}


@pytest.mark.parametrize("forbidden", [MACHINE_PATHS, REGISTRY_HOSTS], ids=["machine paths", "registry hosts"])
def test_no_file_knows_where_it_was_made(texts: dict[str, str], forbidden: re.Pattern[str]) -> None:
    here = str(Path(__file__).relative_to(ROOT))

    found = {name: match[0] for name, text in texts.items() if name != here and (match := forbidden.search(text))}

    assert found == {}
