"""Plots of reports."""

from pathlib import Path
from typing import Any

from backtranslation.filters import FilterReport
from bertfused.errors import UserError


def load_pyplot() -> Any:
    """Return matplotlib's pyplot, drawing into files.

    Raises:
        UserError: If matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install 'bert-fused-nmt[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_report(report: FilterReport, path: Path) -> None:
    """Draw what the filter dropped and why, and the length ratios; raises as `load_pyplot`."""
    pyplot = load_pyplot()
    figure, (reasons, ratios) = pyplot.subplots(1, 2, figsize=(9, 3))
    table = report.table()
    reasons.barh(list(table.index), 100 * table["share"])
    reasons.invert_yaxis()
    reasons.set_xlabel(f"% of {report.pairs:,} pairs")
    ratios.bar(list(report.ratios), list(report.ratios.values()))
    ratios.set_xlabel("words of the longer side / of the shorter, up to")
    ratios.set_ylabel("pairs")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
