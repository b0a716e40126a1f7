"""How good are the scores: retrieval of known bad examples."""

from eigentrace.evaluate.retrieval import Retrieval, retrieval

__all__ = ["Retrieval", "retrieval"]
