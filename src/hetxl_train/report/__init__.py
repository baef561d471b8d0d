"""Tables, charts and the self-contained HTML report of runs."""

from hetxl_train.report.compare import advice, as_dict, compare_table, verdict
from hetxl_train.report.html import report_html, write_report
from hetxl_train.report.read import Comparison, Run, find_runs, read_run
from hetxl_train.report.tables import Cell, Column, Row, Table, as_html, as_markdown, as_rich

__all__ = [
    "Cell",
    "Column",
    "Comparison",
    "Row",
    "Run",
    "Table",
    "advice",
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
