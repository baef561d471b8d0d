"""Tables and the self-contained HTML report of training runs."""

from hetxl.report.read import Comparison, Run, find_runs, read_run
from hetxl.report.render import as_html, as_markdown, as_rich
from hetxl.report.report import report_html, write_report
from hetxl.report.tables import Cell, Column, Row, Table, as_dict, compare_table
from hetxl.report.verdict import verdict

__all__ = [
    "Cell",
    "Column",
    "Comparison",
    "Row",
    "Run",
    "Table",
    "as_dict",
    "as_html",
    "as_markdown",
    "as_rich",
    "compare_table",
    "find_runs",
    "read_run",
    "report_html",
    "verdict",
    "write_report",
]
