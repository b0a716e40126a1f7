"""Three ways to project per-example gradients on rows, one answer."""

from eigentrace.project.choose import fitting_batch, gradients, in_chunks, note_coverage, project
from eigentrace.project.engine import Job, Projection

__all__ = ["Job", "Projection", "fitting_batch", "gradients", "in_chunks", "note_coverage", "project"]
