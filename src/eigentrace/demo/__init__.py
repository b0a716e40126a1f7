"""The paper's digit experiment as a demo: finds wrong labels by self-influence and writes a report."""

from eigentrace.demo.run import Summary, run_demo

__all__ = ["Summary", "run_demo"]
