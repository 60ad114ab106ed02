"""``python -m bench [NAME ...]``: run the benchmarks named, all without a name, and keep their results as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from bench import picker_throughput

BENCHMARKS = {"picker-throughput": picker_throughput.run}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each, taken in turn (default: 5)")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark {name!r}: choose from {', '.join(BENCHMARKS)}")
    console = Console()
    RESULTS.mkdir(exist_ok=True)
    for name in arguments.names or BENCHMARKS:
        result = asyncio.run(BENCHMARKS[name](console, seconds=arguments.seconds, rounds=arguments.rounds))
        result |= {"when": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version()}
        kept = RESULTS / f"{name}.json"
        kept.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"kept in {kept.relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    sys.exit(main())
