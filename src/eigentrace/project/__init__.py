"""Three ways to project per-example gradients on rows, one answer."""

from eigentrace.project.choose import gradients, in_chunks, note_coverage, project
from eigentrace.project.engine import Job, Projection

__all__ = ["Job", "Projection", "gradients", "in_chunks", "note_coverage", "project"]
