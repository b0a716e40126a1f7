"""Project per-example gradients on directions, by one of several equivalent engines."""

from eigentrace.projection.choose import fitting_batch, gradients, in_chunks, note_coverage, project
from eigentrace.projection.engine import Job, Projection

__all__ = ["Job", "Projection", "fitting_batch", "gradients", "in_chunks", "note_coverage", "project"]
