"""A scikit-learn classifier for noisy labels: handwritten digits, three labels in ten of them that of the next digit.

It needs scikit-learn: pip install scikit-learn.
"""

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from hetxl.integrations.sklearn import HetXLClassifier

NAMES = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
FLIPPED = 0.3
SUSPECTS = 300


def main() -> None:
    """Train three linear classifiers on partly wrong labels, and find the wrong ones with the last."""
    torch.set_num_threads(1)  # more threads do not help on a problem this small
    console = Console()
    generator = np.random.default_rng(0)
    images, digits = load_digits(return_X_y=True)
    X, X_test, digits, digits_test = train_test_split(images.astype("float32"), digits, random_state=0)
    wrong = generator.random(len(X)) < FLIPPED
    labels = np.where(wrong, np.roll(NAMES, -1)[digits], NAMES[digits])  # the name of the next digit

    model = HetXLClassifier(random_state=0)
    classifiers = {
        "LogisticRegression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        'HetXLClassifier(head="det")': HetXLClassifier(head="det", random_state=0),
        "HetXLClassifier()": model,
    }
    table = Table(title=f"Digits, {wrong.mean():.0%} of the training labels wrong", title_justify="left")
    table.add_column("classifier", no_wrap=True)
    table.add_column("accuracy", justify="right")
    table.add_column("log loss", justify="right")
    for name, classifier in classifiers.items():
        classifier.fit(X, labels)
        accuracy = classifier.score(X_test, NAMES[digits_test])
        loss = log_loss(NAMES[digits_test], classifier.predict_proba(X_test))
        table.add_row(name, f"{accuracy:.1%}", f"{loss:.3f}")
    console.print(table)

    probs = model.predict_proba(X_test)
    uncertainty = model.predict_uncertainty(X_test)
    console.print("\nThe most and the least certain test images, by their true names:")
    for row in (uncertainty.entropy.argmin(), uncertainty.entropy.argmax()):
        best = probs[row].argsort()[::-1][:3]
        shown = ", ".join(f"{model.classes_[k]} {probs[row, k]:.0%}" for k in best)
        entropy, within = uncertainty.entropy[row], uncertainty.expected_entropy[row]
        console.print(
            f"  {NAMES[digits_test[row]]}: {shown}; entropy {entropy:.2f} nats, {entropy - within:.2f} from noise"
        )

    label_probs = model.predict_proba(X)[np.arange(len(X)), np.searchsorted(model.classes_, labels)]
    wrong_share = wrong[label_probs.argsort()[:SUSPECTS]].mean()
    console.print(f"\nOf the {SUSPECTS} training labels that it believes least, {wrong_share:.0%} are wrong.")


if __name__ == "__main__":
    main()
