"""`python -m benchmarks.offload [--bandwidth 4GB/s] [--vllm-omni FOLDER] [--out FILE]`."""

import argparse
import sys
from pathlib import Path

import msgspec

from benchmarks.offload.measure import Plan, run, table
from swapd.shared.units import parse_rate, size


def main() -> int:
    arguments = _arguments()
    plan = Plan(
        width=arguments.width,
        steps=arguments.steps,
        pictures=arguments.pictures,
        rounds=arguments.rounds,
        bandwidth=parse_rate(arguments.bandwidth) if arguments.bandwidth else None,
        vllm_omni=arguments.vllm_omni,
    )
    report = run(plan, lambda text: print(text, file=sys.stderr))  # noqa: T201
    parts = ", ".join(f"{name} {size(n)}" for name, n in report.sizes.items())
    print(f"{report.steps} steps a picture; {parts}; device of {size(report.budget_bytes)}\n")  # noqa: T201
    print(table(report))  # noqa: T201
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0 if all(row.identical for row in report.rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload")
    parser.add_argument("--width", type=int, default=Plan().width, help="of the DiT")
    parser.add_argument("--steps", type=int, default=Plan().steps)
    parser.add_argument("--pictures", type=int, default=Plan().pictures)
    parser.add_argument("--rounds", type=int, default=Plan().rounds)
    parser.add_argument("--bandwidth", help="of all copies, as in 4GB/s; default: as memory is")
    parser.add_argument(
        "--vllm-omni", type=Path, metavar="FOLDER", help="an unpacked wheel: runs its own hooks too"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
