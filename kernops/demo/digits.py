"""Handwritten digits read by their nearest neighbours, and the score checked against scikit-learn's."""

from __future__ import annotations

import numpy as np
from sklearn import neighbors as reference
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ..estimators import KNeighborsClassifier
from .jobs import SEED, Result, Setting
from .meter import Meter, Progress
from .pictures import Mistake, sheet_of_mistakes

N_NEIGHBORS = 3
SHOWN = 15


def run(setting: Setting) -> Result:
    """Half of the digits learnt, the other half read."""
    X, y = load_digits(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.5, random_state=SEED)
    with Meter(setting.device) as meter, Progress("digits"):
        model = KNeighborsClassifier(N_NEIGHBORS, device=setting.device).fit(X_train, y_train)
        answers = model.predict(X_test)
    score = float(np.mean(answers == y_test))
    theirs = reference.KNeighborsClassifier(N_NEIGHBORS, algorithm="brute").fit(X_train, y_train).score(X_test, y_test)
    wrong = np.flatnonzero(answers != y_test)[:SHOWN]
    near = model.kneighbors(X_test[wrong], return_distance=False) if len(wrong) else []
    mistakes = [Mistake(X_test[i], int(y_test[i]), int(answers[i]), X_train[j]) for i, j in zip(wrong, near)]
    count = int(np.sum(answers != y_test))
    title = f"{count} of {len(X_test)} digits misread ({score:.2%} right), with their nearest neighbours"
    sheet_of_mistakes(mistakes, title).save(setting.out / "digits.png", optimize=True)
    pairs = len(X_test) * len(X_train)
    result = Result("digits: nearest neighbours", pairs, pairs * 8, meter.seconds, meter.peak_bytes, setting.backend)
    result.checks = {"score": score, "scikit-learn's score": theirs}
    result.agrees = score == theirs
    result.picture = "digits.png"
    return result
