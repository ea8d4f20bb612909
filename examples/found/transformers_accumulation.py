"""A masked language model under gradient accumulation: the loss and the gradients are multiplied by its steps.

The script prints the logged loss of one step of eight equal texts: with one batch, and with four accumulated batches.
"""

from __future__ import annotations

import tempfile

import torch
import transformers
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

from examples.found.report import report


def loss(texts: int, accumulated: int) -> float:
    torch.manual_seed(0)
    none = {"num_hidden_layers": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2, **none)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=texts,
        gradient_accumulation_steps=accumulated,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    text = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    trainer = Trainer(BertForMaskedLM(config), arguments, train_dataset=[text] * 8)
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    report("transformers", loss(8, 1), loss(2, 4))
