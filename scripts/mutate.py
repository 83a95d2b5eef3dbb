"""Plant bugs in a copy of regard, one at a time, and see whether the unit tests notice (mutation testing).

    python scripts/mutate.py                            all bugs of scripts/mutants/ROOM.toml
    python scripts/mutate.py --room nn --only dropout   those of a room whose file or reason holds a word

A bug is a `file`, a `find` that occurs exactly once in it, a `replace` and a `why`; `kept` says why no test notices it.
Which tests run a statement is known from one recorded run. They are tried, an eighth of all at most: first those of the
room, then the others, the fastest file first; last, for what runs at import or in a shared fixture, all of the room's.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
MOST = 1 / 8  # of the time of all tests, what is spent on one bug


class Mutant(NamedTuple):
    """One planted bug."""

    room: str
    file: str
    find: str
    replace: str
    why: str
    kept: str = ""

    def __str__(self) -> str:
        return f"{self.file.removeprefix('src/regard/')}: {self.why}"


class Recorded(NamedTuple):
    """What a run of the unit tests was."""

    lines: dict[str, dict[str, list[str]]]  # file -> line -> "TEST|run", "TEST|setup", or "" at import
    seconds: dict[str, float]  # of the tests that passed


def read_mutants() -> list[Mutant]:
    """All planted bugs; the name of a list is its room."""
    lists = sorted((ROOT / "scripts" / "mutants").glob("*.toml"))
    return [Mutant(path.stem, **one) for path in lists for one in tomllib.loads(path.read_text("utf-8"))["mutant"]]


def plant(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of a file with its bug."""
    text = (root / mutant.file).read_text(encoding="utf-8")
    if (count := text.count(mutant.find)) != 1:
        raise SystemExit(f"{mutant}: {mutant.find!r} occurs {count} times in {mutant.file}, expected once.")
    return text.replace(mutant.find, mutant.replace)


@contextlib.contextmanager
def copy_project() -> Iterator[Path]:
    """A temporary folder with copies of src/ and tests/, and links to everything else."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name:
        for entry in ROOT.iterdir():
            if entry.name in ("src", "tests"):
                shutil.copytree(entry, Path(name) / entry.name)
            elif not entry.name.startswith("."):
                (Path(name) / entry.name).symlink_to(entry)
        yield Path(name).resolve()


def run_tests(folder: Path, arguments: list[str], limit: float | None = None) -> tuple[int | None, list[str]]:
    """The status of pytest in a copy of the project (None: it took too long), and the lines that it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--hypothesis-seed=0", *arguments]
    own = {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1", "COVERAGE_CORE": "ctrace"}
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | own, stdout=output, stderr=output, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)
        status = process.poll()
        with contextlib.suppress(ProcessLookupError):  # tests may have left servers behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status, (folder / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines()


def record(jobs: int) -> Recorded:
    """Which tests run which lines: from a file, or from a run of all unit tests, which takes a few minutes."""
    from coverage import CoverageData

    sources = sorted(path for place in ("src", "tests") for path in (ROOT / place).rglob("*.py"))
    tree = hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in sources)).hexdigest()[:16]
    cache = ROOT / ".pytest_cache" / f"mutants-{tree}.json"
    if not cache.exists():
        print("recording which tests run which lines ...", file=sys.stderr)
        options = ["--cov=src/regard", "--cov-context=test", "--cov-report=", "--junitxml=times.xml", f"-n{jobs}"]
        with copy_project() as folder:
            print(run_tests(folder, options)[1][-1], file=sys.stderr)
            data = CoverageData(str(folder / ".coverage"))
            data.read()
            lines = {str(Path(one).relative_to(folder)): data.contexts_by_lineno(one) for one in data.measured_files()}
            cases = [case.attrib for case in ElementTree.parse(folder / "times.xml").iter("testcase") if not len(case)]
        passed = {f"{case['classname'].replace('.', '/')}.py::{case['name']}": float(case["time"]) for case in cases}
        cache.parent.mkdir(exist_ok=True)
        cache.write_text(json.dumps({"lines": lines, "seconds": passed}), encoding="utf-8")
    return Recorded(**json.loads(cache.read_bytes()))


def statement_lines(mutant: Mutant) -> range:
    """The lines of the innermost statement that a bug begins in: of one with a body its head, of a function all."""
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    first = source[: source.index(mutant.find.lstrip())].count("\n") + 1
    found = range(first, first + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = None if isinstance(node, ast.FunctionDef) else getattr(node, "body", None)
            lines = range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1)
            found = lines if first in lines else found  # inner ones come later
    return found


def choose_tests(mutant: Mutant, recorded: Recorded) -> dict[str, float]:
    """The tests that run what a bug changes and their times: the room's own first, then the fastest file."""
    lines, own = recorded.lines.get(mutant.file, {}), f"tests/{mutant.room}/"
    wanted = [one for line in statement_lines(mutant) for one in lines.get(str(line), [])] if lines else []
    ran = {one.rpartition("|")[0] for one in wanted} - {""}
    shared = not ran or any(one.endswith("|setup") for one in wanted)
    also = {test for test in recorded.seconds if shared and test.startswith(own)}
    files: dict[tuple[bool, str], dict[str, float]] = defaultdict(dict)
    for test in (ran | also) & recorded.seconds.keys():
        files[test not in ran, test.partition("::")[0]][test] = recorded.seconds[test]
    tests, most = dict[str, float](), MOST * sum(recorded.seconds.values())
    for file in sorted(files, key=lambda file: (file[0], not file[1].startswith(own), sum(files[file].values()))):
        tests |= files[file] if sum(tests.values()) < most else {}
    return tests


def try_mutant(mutant: Mutant, recorded: Recorded) -> str:
    """The first test that notices a bug, or nothing."""
    tests = choose_tests(mutant, recorded)
    with copy_project() as folder:
        (folder / mutant.file).write_text(plant(mutant, folder), encoding="utf-8")
        options = ["-x", "-n0", "--tb=no", "-p", "no:cacheprovider", *tests]
        status, output = run_tests(folder, options, 60 + 5 * sum(tests.values())) if tests else (0, [])
    failed = [line.split(" - ")[0] for line in output if line.startswith(("FAILED ", "ERROR "))]
    if status and not failed:
        raise SystemExit(f"{mutant}: pytest ended with status {status}: {' '.join(output[-3:])}")
    return "the time limit" if status is None else "".join(failed[:1])


def show(found: dict[Mutant, str]) -> None:
    """The table by room, and the bugs that nobody noticed with their reasons."""
    print(f"{'room':12}{'planted':>9}{'noticed':>9}{'share':>8}")
    for room in [*sorted({mutant.room for mutant in found}), "all"]:
        inside = [bool(noticed) for mutant, noticed in found.items() if room in (mutant.room, "all")]
        print(f"{room:12}{len(inside):9}{sum(inside):9}{sum(inside) / max(1, len(inside)):8.0%}")
    for mutant in sorted(mutant for mutant, noticed in found.items() if not noticed):
        print(f"not noticed: {mutant}{mutant.kept and f' (kept: {mutant.kept})'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", help="the bugs of one room")
    parser.add_argument("--only", default="", help="those whose file or reason holds this")
    parser.add_argument("--jobs", type=int, default=2, help="bugs that are tried at the same time")
    parser.add_argument("--list", action="store_true", help="say what is planted, and try nothing")
    options = parser.parse_args()
    mutants = [one for one in read_mutants() if options.room in (None, one.room) and options.only in str(one)]
    for mutant in mutants:
        plant(mutant)
    if options.list:
        return print(*mutants, sep="\n")
    recorded, began, found = record(options.jobs), time.monotonic(), dict[Mutant, str]()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(try_mutant, mutant, recorded): mutant for mutant in mutants}
        for number, future in enumerate(concurrent.futures.as_completed(waiting), 1):
            mutant = waiting[future]
            found[mutant] = future.result()
            minutes = (time.monotonic() - began) / 60
            progress = f"{number / minutes:.1f} a minute, {minutes * (len(mutants) / number - 1):.0f} minutes left"
            print(f"{number}/{len(mutants)} ({progress}) {mutant}: {found[mutant] or 'NOT NOTICED'}", file=sys.stderr)
    show(found)
    sys.exit(any(not noticed and not mutant.kept for mutant, noticed in found.items()))


if __name__ == "__main__":
    main()
