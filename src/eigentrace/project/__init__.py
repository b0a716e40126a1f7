"""Three ways to project per-example gradients on rows, one answer."""

from eigentrace.project.choose import check_losses, gradients, in_chunks, project
from eigentrace.project.engine import Job, Projection

__all__ = ["Job", "Projection", "check_losses", "gradients", "in_chunks", "project"]
