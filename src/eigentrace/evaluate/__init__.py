"""How good are the scores: finding known bad examples, and predicting what training again would give."""

from eigentrace.evaluate.compare import Comparison, baselines, compare
from eigentrace.evaluate.counterfactual import Counterfactual, counterfactual
from eigentrace.evaluate.dropping import RetrainingCurves, retraining_curves
from eigentrace.evaluate.lds import LDS, lds
from eigentrace.evaluate.leave_out import LeftOut, leave_out
from eigentrace.evaluate.many import ManyModels
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
    # training again: on what, and how
    "Subsets",
    "Trainer",
    "Loop",
    "ManyModels",
    "SGD",
    "retrain",
    "Retrained",
    # scores against what training again gives
    "lds",
    "LDS",
    "leave_out",
    "LeftOut",
    "retraining_curves",
    "RetrainingCurves",
    "counterfactual",
    "Counterfactual",
    # correlations
    "pearson",
    "spearman",
]
