"""How useful synthetic images are: classifiers trained on them, and Fréchet distances to real images.

Scores are computed against a real, labelled *test* set. Nothing here reads the training records: a score of
the model on its own records is private, and a score on a test set is not paid for by
the release's ε, so it protects nobody in that test set. Use a set that may be looked at.

Classifiers and the distance are building blocks; a protocol (`quick`) fixes how they are put together, so
that its scores can be compared from one release to the next.
"""

from dp_sinkhorn.evaluation.classifiers import CNN, MLP, accuracy, extract_features, train_classifier
from dp_sinkhorn.evaluation.frechet import frechet_distance
from dp_sinkhorn.evaluation.quick import QuickScores, evaluate_quick

__all__ = [
    "CNN",
    "MLP",
    "QuickScores",
    "accuracy",
    "evaluate_quick",
    "extract_features",
    "frechet_distance",
    "train_classifier",
]
