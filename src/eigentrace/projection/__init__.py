"""Three ways to project per-example gradients on directions, one answer."""

from eigentrace.projection.choose import fitting_batch, gradients, in_chunks, note_coverage, project
from eigentrace.projection.engine import Job, Projection

__all__ = ["Job", "Projection", "fitting_batch", "gradients", "in_chunks", "note_coverage", "project"]
