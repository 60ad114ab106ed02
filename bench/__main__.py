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

from bench import operator_scale, picker_throughput
from bench.unavailable import UnavailableError

BENCHMARKS = {"picker-throughput": picker_throughput.run, "operator-scale": operator_scale.run}
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--seconds", type=float, help="length of one measurement; each benchmark has its own default")
    parser.add_argument("--rounds", type=int, help="how often it is measured; each benchmark has its own default")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark {name!r}: choose from {', '.join(BENCHMARKS)}")
    console = Console()
    RESULTS.mkdir(exist_ok=True)
    given = {name: value for name, value in vars(arguments).items() if name != "names" and value is not None}
    status = 0
    for name in arguments.names or BENCHMARKS:
        try:
            result = asyncio.run(BENCHMARKS[name](console, **given))
        except UnavailableError as error:
            print(f"bench: {error}", file=sys.stderr)
            status = 2
            continue
        result |= {"when": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version()}
        kept = RESULTS / f"{name}.json"
        kept.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"kept in {kept.relative_to(RESULTS.parent.parent)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
