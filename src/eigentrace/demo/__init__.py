"""The paper's digit experiment as a demonstration: wrong labels found by self-influence, and a report."""

from eigentrace.demo.run import Summary, run_demo

__all__ = ["Summary", "run_demo"]
