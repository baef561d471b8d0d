"""Train a transformers model with a HET-XL head under Trainer, save it, and load it again.

    python examples/hf_trainer.py [--steps 100]

A small BERT from a configuration learns which of twelve topics a made-up sentence is about; a fifth of the labels are
those of another topic.
"""

import argparse
import tempfile

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

import hetxl
from hetxl.integrations.transformers import from_pretrained

TOPICS, WORDS, LENGTH = 12, 120, 12


class Sentences(torch.utils.data.Dataset):
    """Sentences of random words, half of them from the ten of their topic."""

    def __init__(self, count: int, wrong: float, seed: int):
        generator = torch.Generator().manual_seed(seed)
        topics = torch.randint(TOPICS, (count,), generator=generator)
        own = topics[:, None] * 10 + torch.randint(10, (count, LENGTH), generator=generator)
        anywhere = torch.randint(WORDS, (count, LENGTH), generator=generator)
        self.tokens = 1 + torch.where(torch.rand(count, LENGTH, generator=generator) < 0.5, own, anywhere)
        flipped = torch.rand(count, generator=generator) < wrong
        self.labels = torch.where(flipped, (topics + 1) % TOPICS, topics)

    def __len__(self) -> int:
        """How many."""
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """One sentence and its label."""
        return {"input_ids": self.tokens[row], "labels": self.labels[row]}


def main() -> None:
    """Train, evaluate, save, load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    disable_progress_bar()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS + 1, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        hidden_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = TOPICS
    model = hetxl.convert(BertForSequenceClassification(config), train_samples=4, eval_samples=64)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory, max_steps=steps, per_device_train_batch_size=64, per_device_eval_batch_size=100,
            learning_rate=6e-3, logging_steps=20, seed=0, report_to=[], disable_tqdm=True, save_strategy="no",
            dataloader_pin_memory=False,
        )  # fmt: skip
        training, clean = Sentences(4000, 0.2, seed=1), Sentences(500, 0.0, seed=2)
        trainer = Trainer(model=model, args=arguments, train_dataset=training, eval_dataset=clean)
        trainer.train()  # labels go to the head's fused loss
        print(trainer.evaluate())
        output = trainer.predict(clean)
        print(f"{(np.argmax(output.predictions, -1) == output.label_ids).mean():.1%} right")  # log-probabilities

        model.save_pretrained(directory)
        again = from_pretrained(directory)
    prediction = hetxl.predict(again.eval(), {"input_ids": Sentences(3, 0.0, seed=3).tokens}, top_k=3)
    print(prediction)


if __name__ == "__main__":
    main()
