"""Contrastive learning of pairs, with HET-XL noise on the embeddings (Section "Contrastive learning").

A batch of pairs is a classification problem: each image's class is its text among the batch's texts, and each text's is
its image. The other tower's embeddings are the classifier, so the fused engine serves here as in a head.
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
