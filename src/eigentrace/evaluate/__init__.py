"""Measuring scores: whether they find known bad examples, and whether they predict the results of retraining."""

from eigentrace.evaluate.compare import Comparison, baselines, compare
from eigentrace.evaluate.counterfactual import Counterfactual, counterfactual
from eigentrace.evaluate.dropping import RetrainingCurves, retraining_curves
from eigentrace.evaluate.lds import LDS, lds
from eigentrace.evaluate.leave_out import LeftOut, leave_out
from eigentrace.evaluate.many import ManyModels
from eigentrace.evaluate.memorization import Memorization, memorization
from eigentrace.evaluate.retrain import Retrained, retrain
from eigentrace.evaluate.retrieval import Detection, Retrieval, detection, retrieval
from eigentrace.evaluate.stacked import SGD
from eigentrace.evaluate.subsets import Subsets
from eigentrace.evaluate.training import Loop, Trainer
from eigentrace.numeric.rank_correlation import pearson, spearman

__all__ = [
    # finding examples that are known to be bad
    "retrieval",
    "Retrieval",
    "detection",
    "Detection",
    "compare",
    "Comparison",
    "baselines",
    # retraining: subsets and trainers
    "Subsets",
    "Trainer",
    "Loop",
    "ManyModels",
    "SGD",
    "retrain",
    "Retrained",
    # comparing scores with retraining
    "lds",
    "LDS",
    "leave_out",
    "LeftOut",
    "retraining_curves",
    "RetrainingCurves",
    "counterfactual",
    "Counterfactual",
    # what models memorised
    "memorization",
    "Memorization",
    # correlations
    "pearson",
    "spearman",
]
