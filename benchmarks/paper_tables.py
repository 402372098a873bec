"""Paper tables: every claim of the papers that formulas, events, memory or arithmetic can judge, beside ours.

    python benchmarks/paper_tables.py [--claims ../shared/paper_claims.json] [--only L-ME-13 ...] [--save]

A row is a claim; each of its numbers is judged and the worst error counts for the row (a yes or no is right or wrong).
Nothing is fitted to the row that it predicts: constants come from other claims, data sheets or presets, and asking for
one from the claim under judgement is an error. The table names them. What is missed is listed with the reason. Bars: 80 %
of the claims within 10 % (not with ``--only``), each number of throughput within 5 %, each yes or no (largest models
among them) right.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paper_equations
import paper_lohan
import paper_lsp
import paper_sizes
import paper_throughput
from paper_evidence import JUDGED_BY, MOST_ERROR, Evidence, Number, Row, read_claims
from report import finish
from rich.console import Console
from rich.table import Table

CLAIMS = Path(__file__).resolve().parents[2] / "shared" / "paper_claims.json"
LEAST_WITHIN = 0.8
MOST_THROUGHPUT_ERROR = 0.05
ROWS: Mapping[str, Row] = {
    **paper_lohan.ROWS,
    **paper_sizes.ROWS,
    **paper_throughput.ROWS,
    **paper_equations.ROWS,
    **paper_lsp.ROWS,
}


def judge(claims: dict[str, dict[str, Any]], claim: str) -> dict[str, Any]:
    """The row of ``claim`` as JSON has it; an error of None is a wrong yes or no."""
    row, evidence = ROWS[claim], Evidence(claims, claim)
    numbers = row.judge(evidence)
    worst = max(number.error for number in numbers)
    return {
        "claim": claim,
        "where": claims[claim]["section_or_table_or_figure"],
        "text": claims[claim]["text"],
        "judged_by": claims[claim]["verifiable_by"],
        "worst_error": worst if math.isfinite(worst) else None,
        "within_10_percent": worst <= MOST_ERROR,
        "numbers": [_as_json(number) for number in numbers],
        "constants_from": sorted(evidence.sources),
        "reason": row.reason if worst > MOST_ERROR else "",
        "left_out": row.left_out,
    }


def _as_json(number: Number) -> dict[str, Any]:
    return {
        "what": number.what,
        "paper": number.paper,
        "ours": number.ours,
        "error": number.error if math.isfinite(number.error) else None,
        "yes_or_no": number.yes_or_no,
    }


def _off(error: float | None, most: float = MOST_ERROR) -> bool:
    return error is None or error > most


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line per number; then, of the rows that are missed, why."""
    console = Console(width=150)
    table = Table("claim", "what", "paper", "ours", "error", "constants from", title="The papers' claims and ours")
    for row in rows:
        sources = ", ".join(row["constants_from"])
        for number in row["numbers"]:
            error = number["error"]
            shown = "WRONG" if error is None else "right" if number["yes_or_no"] else f"{error:.1%}"
            style = "red" if _off(error) else None
            table.add_row(row["claim"], number["what"], number["paper"], number["ours"], shown, sources, style=style)
            sources = ""
        table.add_section()
    console.print(table)
    for title, key in (("Not met, and why", "reason"), ("Not judged, and why", "left_out")):
        notes = Table("claim", "why", title=title)
        for row in rows:
            if row[key]:
                notes.add_row(row["claim"], row[key])
        if notes.row_count:
            console.print(notes)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the JSON line."""
    numbers = [number for row in rows for number in row["numbers"]]
    throughput = [n for row in rows if row["claim"] in paper_throughput.SPEED for n in row["numbers"]]
    figures = [number for number in throughput if not number["yes_or_no"]]
    return {
        "claims": len(rows),
        "within_10_percent": sum(row["within_10_percent"] for row in rows),
        "numbers": len(numbers),
        "numbers_within_10_percent": sum(not _off(number["error"]) for number in numbers),
        "throughput_numbers": len(figures),
        "throughput_numbers_within_5_percent": sum(not _off(n["error"], MOST_THROUGHPUT_ERROR) for n in figures),
        "yes_or_no": sum(number["yes_or_no"] for number in numbers),
        "yes_or_no_right": sum(number["yes_or_no"] and number["error"] == 0 for number in numbers),
        "rows": list(rows),
    }


def missed_bars(figures: Mapping[str, Any], claims: int | None) -> list[str]:
    """Which bars the ``summary`` of so many ``claims`` misses; None: of some, whose share within 10 % says nothing."""
    missed = []
    if claims is not None and (share := figures["within_10_percent"] / claims) < LEAST_WITHIN:
        missed.append(f"{share:.1%} of the claims are within 10 %: expected {LEAST_WITHIN:.0%}")
    close, of = figures["throughput_numbers_within_5_percent"], figures["throughput_numbers"]
    if close < of:
        missed.append(f"{close} of {of} numbers of throughput are within 5 %: expected all")
    wrong = [row["claim"] for row in figures["rows"] for n in row["numbers"] if n["yes_or_no"] and n["error"] != 0]
    if wrong:
        missed.append(f"{len(wrong)} of {figures['yes_or_no']} yes or no are wrong ({', '.join(wrong)}): expected none")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=Path, default=CLAIMS, help=f"the papers' claims (default: {CLAIMS})")
    parser.add_argument("--only", nargs="+", metavar="CLAIM", help="judge these only")
    parser.add_argument("--save", action="store_true", help="keep the JSON in benchmarks/results/")
    args = parser.parse_args()
    try:
        claims = read_claims(args.claims)
    except ValueError as error:
        sys.exit(f"paper_tables: {error}")
    judgeable = [claim for claim, fields in claims.items() if fields["verifiable_by"] in JUDGED_BY]
    unknown = sorted(set(args.only or ()) - set(judgeable))
    if unknown:
        sys.exit(
            f"paper_tables: no claim that can be judged is called {', '.join(unknown)}: there are {', '.join(judgeable)}"
        )
    chosen = args.only or judgeable
    rows = [judge(claims, claim) for claim in chosen if claim in ROWS]
    figures = summary(rows)
    missed = [f"{claim} has no row" for claim in chosen if claim not in ROWS]
    missed += missed_bars(figures, None if args.only else len(judgeable))
    print_rows(rows)
    counted = ("numbers", "throughput_numbers", "yes_or_no")
    shown = [("claims within 10 %, by their worst number", f"{figures['within_10_percent']} of {len(rows)}")]
    right = {key: next(k for k in figures if k.startswith(f"{key}_")) for key in counted}
    shown += [(right[key].replace("_", " "), f"{figures[right[key]]} of {figures[key]}") for key in counted]
    finish("paper_tables", shown, figures, missed, save=args.save)


if __name__ == "__main__":
    main()
