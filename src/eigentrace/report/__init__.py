"""Results as one self-contained HTML page and as plain text."""

from eigentrace.report.content import Example, Fact, MethodRow, Note, Report
from eigentrace.report.page import render_page
from eigentrace.report.text import methods_table

__all__ = [
    "Example",
    "Fact",
    "MethodRow",
    "Note",
    "Report",
    "methods_table",
    "render_page",
]
