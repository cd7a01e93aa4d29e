"""Figures: one JSON line each in a file, and a table for people."""

import json
import os
import statistics
from collections import defaultdict

from . import setup

# Outcomes that are no figure of the metric, with the text of the table's cell.
FAILURES = {"never_within": "never within {:g} s", "job_dead": "job dead after {:.0f} s", "not_reached": "not reached"}


class Report:
    """Collects {system, case, metric, value, unit}; writes each at once, so that an interrupted run keeps what it has."""

    def __init__(self, path):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.file = open(path, "w", encoding="utf-8")
        self.values = defaultdict(list)
        self.units = {}
        for metric, value, unit in setup.machine():
            self.add("machine", "-", metric, value, unit)

    def add(self, system, case, metric, value, unit, **extra):
        self.values[(case, metric, system)].append(value)
        self.units[metric] = unit
        line = {"system": system, "case": case, "metric": metric, "value": value, "unit": unit, **extra}
        print(json.dumps(line), file=self.file, flush=True)

    def cell(self, case, metric, system, failures):
        """`median / worst (n)`, then, if asked for, what failed and how often."""
        parts = []
        values = self.values.get((case, metric, system), [])
        if values:
            parts.append(f"{number(statistics.median(values))} / {number(max(values))} ({len(values)})")
        for failure, text in FAILURES.items() if failures else ():
            failed = self.values.get((case, failure, system), [])
            if failed:
                parts.append(f"{text.format(max(failed))} ({len(failed)})")
        return "; ".join(parts) or "-"

    def table(self, cases, metrics, systems):
        """All systems as columns, one line a case and metric. `cases` maps a name to what it is."""
        rows = []
        for case, title in cases.items():
            shown = [m for m in metrics if any((case, m, s) in self.values for s in systems)]
            failed = any((case, f, s) in self.values for f in FAILURES for s in systems)
            for index, metric in enumerate(shown or (metrics[:1] if failed else [])):
                unit = self.units.get(metric, "s")
                cells = [self.cell(case, metric, system, index == 0) for system in systems]
                rows.append(["" if index else title, f"{metric} [{unit}]", *cells])
        header = ["case", "metric", *systems]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in [header, *rows]]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(["median / worst (number of attempts)", *lines])


def number(value):
    return f"{value:.2f}" if isinstance(value, float) and value < 100 else f"{value:.0f}"
