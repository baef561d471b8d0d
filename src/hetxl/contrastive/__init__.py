"""Contrastive learning of pairs, with HET-XL noise on the embeddings (Section "Contrastive learning").

A batch of pairs is a classification problem: the class of an image is its text among the batch's texts, and vice versa.
The embeddings of the other tower are the classifier, so the fused engine of the heads computes the loss.
"""

from hetxl.contrastive.embedding import NoisyEmbedding
from hetxl.contrastive.loss import ContrastiveLoss, LogitScale, PairLoss
from hetxl.contrastive.retrieval import (
    auroc,
    class_retrieval,
    pair_distance,
    pair_noise,
    retrieval_recall,
    zero_shot_log_probs,
    zero_shot_weights,
)

__all__ = [
    "ContrastiveLoss",
    "LogitScale",
    "NoisyEmbedding",
    "PairLoss",
    "auroc",
    "class_retrieval",
    "pair_distance",
    "pair_noise",
    "retrieval_recall",
    "zero_shot_log_probs",
    "zero_shot_weights",
]
