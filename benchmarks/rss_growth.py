"""RSS over many steps: none beyond noise.

    python benchmarks/rss_growth.py [--steps 200] [--save]

Bar: the median RSS of the last quarter exceeds that of the second quarter by less than 2% of the peak.
"""

from __future__ import annotations

import argparse
import statistics

from report import arguments, at_least_one, finish, own_folder, profile
from workload import SIZES, Workload, memory_bytes, streamed

import lohan_fx

MOST_GROWTH = 0.02


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=at_least_one, default=200)
    parser.add_argument("--policy", default="swap-nvme")
    args = parser.parse_args()
    with own_folder(args):
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """The RSS after every step."""
    hw = profile(args, seconds=3.0)
    ours = streamed(Workload(args.size, args.batch, args.seq), hw, args.nvme, host_memory="1GiB", policy=args.policy)
    rss = []
    for _ in range(args.steps):
        ours.step()
        rss.append(memory_bytes("VmRSS"))
    lohan_fx.release(ours.model)
    quarter = max(args.steps // 4, 1)
    early, late = statistics.median(rss[quarter : 2 * quarter]), statistics.median(rss[-quarter:])
    growth = late - early
    most = MOST_GROWTH * max(rss)
    finish(
        "rss_growth",
        [
            ("second quarter, median", f"{early / 1e6:.1f} MB"),
            ("last quarter, median", f"{late / 1e6:.1f} MB"),
            ("growth", f"{growth / 1e6:.2f} MB over {args.steps} steps"),
        ],
        {"early_rss_bytes": early, "late_rss_bytes": late, "growth_bytes": growth, "steps": args.steps},
        [] if growth <= most else [f"RSS grew by {growth:,.0f} bytes, at most {most:,.0f} allowed"],
        save=args.save,
    )


if __name__ == "__main__":
    main()
