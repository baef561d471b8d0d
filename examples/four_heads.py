"""The four heads side by side on a small random problem.

A head takes the place of the last nn.Linear of a classifier: features [B, D] in, K classes out.
"""

import torch
from rich.console import Console
from rich.table import Table

import hetxl
from hetxl.profiling import count_parameters

B, D, K = 32, 64, 1000

HEADS = {
    "DET": (hetxl.DetHead, "softmax of W φ, what most classifiers end with"),
    "HET": (hetxl.HetHead, "noise on the K logits"),
    "HET-H": (hetxl.HetHashHead, "noise in buckets that classes share"),
    "HET-XL": (hetxl.HetXLHead, "noise on the D features"),
}


def main() -> None:
    """Create each head, compute a loss and its gradients, and predict one example."""
    console = Console()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(B, D, generator=generator)
    labels = torch.randint(K, (B,), generator=generator)

    table = Table(title=f"Four heads, {D} features, {K:,} classes", title_justify="left")
    table.add_column("head")
    table.add_column("what it is")
    table.add_column("parameters", justify="right")
    table.add_column("loss", justify="right")
    predictions = {}
    for name, (head_class, what) in HEADS.items():
        torch.manual_seed(0)  # the same initial classifier for each
        head = head_class(in_features=D, num_classes=K)

        loss = head(features, labels, generator=generator)  # was: cross_entropy(linear(features), labels)
        loss.backward()

        predictions[name] = head.predict(features[:1], top_k=3, generator=generator)
        table.add_row(name, what, f"{count_parameters(head):,}", f"{loss.item():.3f}")
    console.print(table)

    console.print("What each untrained head says of the first example: top classes, uncertainty")
    for name, prediction in predictions.items():
        console.print(f"  {name:<7} {prediction.describe()}", highlight=False, soft_wrap=True)

    console.print("\nNext: `hetxl params --features 2048 --classes 21843` counts the heads at scale;")
    console.print("      docs/ tells how to choose a head and train with it.")


if __name__ == "__main__":
    main()
