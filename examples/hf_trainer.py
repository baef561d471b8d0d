"""Fine-tune a transformers model with LoRA and a HET-XL head under Trainer, then use it in a pipeline.

A small BERT from a configuration learns which of twelve topics a synthetic sentence is about; a fifth of the labels are
those of the next topic. With a published model, use `AutoModelForSequenceClassification.from_pretrained`."""

import random
import tempfile
import warnings
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, Trainer, TrainingArguments

import hetxl
from hetxl.integrations.transformers import pipeline

warnings.filterwarnings("ignore", category=FutureWarning)  # between PEFT and transformers
TOPICS, WORDS = 12, [f"w{number}" for number in range(120)]  # a topic has ten words of its own


def sentences(count: int, wrong: float) -> list[tuple[str, int]]:
    """Return sentences of twelve words, half of them the topic's own, and their topics, a share of them wrong."""
    topics = random.choices(range(TOPICS), k=count)
    texts = [" ".join(random.choices(WORDS, k=6) + random.choices(WORDS[10 * t :][:10], k=6)) for t in topics]
    return [(text, (topic + (random.random() < wrong)) % TOPICS) for text, topic in zip(texts, topics, strict=True)]


def build_model() -> Any:
    """Return a converted model with the same initial weights each time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": TOPICS}
    config = BertConfig(vocab_size=121, hidden_size=64, intermediate_size=128, **sizes)
    return hetxl.convert(BertForSequenceClassification(config))


def main() -> None:
    """Train, save and load the adapters with the head, and predict with a pipeline."""
    random.seed(0)
    plain: Any = Tokenizer(models.WordLevel({word: row for row, word in enumerate(["[PAD]", *WORDS])}, "[PAD]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]")
    data: Any = [{**tokenizer(text), "labels": label} for text, label in sentences(4000, 0.2)]
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 6e-3}
        settings = TrainingArguments(folder, max_steps=300, per_device_train_batch_size=64, **options)
        model = get_peft_model(build_model(), LoraConfig("SEQ_CLS", r=16, target_modules="all-linear"))
        Trainer(model, settings, train_dataset=data, processing_class=tokenizer).train()  # the head's fused loss
        model.save_pretrained(folder)
        model = PeftModel.from_pretrained(build_model(), folder).merge_and_unload().eval()
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, return_uncertainty=True)
    checked = sentences(500, wrong=0.0)
    right = sum(classify(text)[0]["label"] == f"LABEL_{topic}" for text, topic in checked)
    print(f"{right / 500:.1%} right after loading; one text: {classify(checked[0][0])}")


if __name__ == "__main__":
    main()
