"""A parquet file of embeddings with wrong labels: find them with cleanlab, and give prediction sets with MAPIE.

The embeddings are those of scikit-learn's digits, a quarter of them labelled as the next digit; 300 checked rows
calibrate the sets. Needs scikit-learn, pandas, pyarrow, cleanlab and mapie.
"""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from cleanlab.classification import CleanLearning
from mapie.classification import SplitConformalClassifier
from sklearn.datasets import load_digits

from hetxl.integrations.sklearn import HetXLClassifier


def write_table(path: Path) -> None:
    """Write columns embedding, category and split, and whether the category is wrong."""
    generator = np.random.default_rng(0)
    images, digits = load_digits(return_X_y=True)
    split = generator.choice(["train", "checked", "test"], len(digits), p=[0.66, 0.17, 0.17])
    wrong = (split == "train") & (generator.random(len(digits)) < 0.25)
    category = np.char.add("digit ", ((digits + wrong) % 10).astype(str))
    embedding = list(images.astype("float32"))
    pd.DataFrame({"embedding": embedding, "category": category, "split": split, "wrong": wrong}).to_parquet(path)


def main() -> None:
    """Read the table, look for wrong labels, train on the others, and calibrate."""
    torch.set_num_threads(1)  # more threads do not help on a problem this small
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder) / "digits.parquet")
        table = pd.read_parquet(Path(folder) / "digits.parquet")
    features = np.stack(list(table["embedding"]))
    _, labels = np.unique(table["category"], return_inverse=True)  # cleanlab and MAPIE need class ids
    train, checked, test = (np.flatnonzero(table["split"] == name) for name in ("train", "checked", "test"))
    wrong = table["wrong"].to_numpy()[train]

    cleaner = CleanLearning(HetXLClassifier(max_iter=40, random_state=0), cv_n_folds=3, seed=0)
    issues = cleaner.find_label_issues(features[train], labels[train])["is_label_issue"].to_numpy()
    print(f"cleanlab suspects {issues.sum()} labels; {wrong[issues].mean():.0%} of them are wrong")
    print(f"and {issues[wrong].mean():.0%} of the wrong labels are among them")

    cleaner.fit(features[train], labels[train], label_issues=cleaner.get_label_issues())  # without the suspects
    model = cleaner.clf
    print(f"test accuracy {model.score(features[test], labels[test]):.1%}")
    sets = SplitConformalClassifier(model, confidence_level=0.9, prefit=True)
    sets.conformalize(features[checked], labels[checked])
    inside = sets.predict_set(features[test])[1][:, :, 0]  # [n, K]
    coverage = inside[np.arange(len(test)), labels[test]].mean()
    print(f"90% sets cover {coverage:.0%} of the test labels with {inside.sum(1).mean():.2f} classes on average")


if __name__ == "__main__":
    main()
