"""`python -m benchmarks.loading [--layers N] [--rounds N] [--out FILE]`."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from swapd import spawn
from swapd.bench.load import read
from swapd.shared.units import seconds, size

WIDTH = 1024


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="swapd-bench-") as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        _run("benchmarks.loading.checkpoint", str(small), "1", "64")
        _run("benchmarks.loading.checkpoint", str(large), str(arguments.layers), str(WIDTH))
        report = _measure(small, large, arguments.rounds)
    print(_table(report))  # noqa: T201
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _measure(small: Path, folder: Path, rounds: int) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    nbytes = sum(file.stat().st_size for file in files)
    names = ("read", "swapd on one core", "swapd", "swapd again", "from_pretrained")
    sides: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        sides["read"].append({"load_s": sum(map(read, files))})
        for side, again in (("swapd on one core", None), ("swapd", "swapd again")):
            # room for a model that is somewhat larger than its files
            with spawn.daemon(budget=nbytes * 5 // 4 + (64 << 20), keep_host=2 * nbytes) as daemon:
                where = (str(small), str(folder), str(daemon.folder), str(daemon.pid))
                for name in filter(None, (side, again)):
                    done = _run("benchmarks.loading.worker", side, *where)
                    sides[name].append(json.loads(done))
        done = _run("benchmarks.loading.worker", "from_pretrained", str(small), str(folder))
        sides["from_pretrained"].append(json.loads(done))
    rows = {
        side: {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
        for side, runs in sides.items()
    }
    return {"nbytes": nbytes, "rounds": rounds, "rows": rows}


def _run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1] if done.stdout else ""


def _table(report: dict[str, Any]) -> str:
    nbytes, rows = report["nbytes"], report["rows"]
    lines = [
        f"checkpoint of {size(nbytes)}, median of {report['rounds']}",
        "",
        "| | time | over reading the files | host memory at most, over the files' bytes | "
        "and mapped of files |",
        "| --- | --- | --- | --- | --- |",
    ]
    for side, row in rows.items():
        cells = [side, seconds(row["load_s"]), f"{row['load_s'] / rows['read']['load_s']:.2f}"]
        cells += [f"{row[key] / nbytes:.2f}" if key in row else "" for key in ("own", "with_files")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading")
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
