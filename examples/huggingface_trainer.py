"""Train BERT with the ED penalty in the Hugging Face Trainer."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ed
from ed.integrations.transformers import EDTrainer, TrackED, field_of


class MyTrainer(EDTrainer, Trainer):
    ed_weight = 1.0


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Draws random tokens, labelled 1 if the first token is above 49 and 0 otherwise."""
    rows = torch.randint(100, (count, 12))
    return [{"input_ids": row, "labels": (row[0] > 49).long()} for row in rows]


if __name__ == "__main__":
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **size))
    batch = torch.utils.data.default_collate(sentences(64))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=2, dataloader_drop_last=True, report_to="none", use_cpu=True
        )
        trainer = MyTrainer(model, arguments, train_dataset=sentences(160))
        trainer.add_callback(TrackED(trainer, lambda model: field_of(model, batch)))
        trainer.train()
    print("by epoch:", [row["ed"] for row in trainer.state.log_history if "ed" in row])
    print(ed.estimate(field_of(model, batch), pairs=50, resolution=50, degree=20))
