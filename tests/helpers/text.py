"""Tiny language models with random weights, and tasks with made-up sentences."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ed.models.text import TextClassifier
from ed.tasks.glue import Glue

transformers = pytest.importorskip("transformers")

WORDS = ["the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "mat", "tree"]
WORDS += [".", "not", "quickly", "it", "was", "seen", "by"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 40}
ARCHITECTURES = {
    "bert": (transformers.BertConfig, transformers.BertForSequenceClassification, SMALL),
    "roberta": (transformers.RobertaConfig, transformers.RobertaForSequenceClassification, SMALL),
    "mpnet": (transformers.MPNetConfig, transformers.MPNetForSequenceClassification, SMALL),
    "electra": (
        transformers.ElectraConfig,
        transformers.ElectraForSequenceClassification,
        SMALL | {"embedding_size": 16},
    ),
    "distilbert": (
        transformers.DistilBertConfig,
        transformers.DistilBertForSequenceClassification,
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 40},
    ),
}


def write_checkpoint(folder, architecture="bert", **changes):
    """Saves a tiny random model and a tokenizer for WORDS in transformers format."""
    vocabulary = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    config_class, model_class, sizes = ARCHITECTURES[architecture]
    config = config_class(vocab_size=len(vocabulary), pad_token_id=1, **sizes | changes)
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
    vocabulary_file = folder / "vocab.txt"
    vocabulary_file.write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(vocab=str(vocabulary_file)).save_pretrained(folder)
    return str(folder)


def write_sentences(root):
    """Writes CoLA-like and RTE-like sentences in the hub's file layout."""
    rng = np.random.default_rng(0)

    def sentence():
        return " ".join(rng.choice(WORDS, size=rng.integers(2, 9)))

    for name in ("cola", "rte"):
        (root / name).mkdir()
        for split, count in (("train", 40), ("validation", 30)):
            columns = {"sentence1": [sentence() for _ in range(count)]}
            columns["sentence2"] = [sentence() for _ in range(count)]
            if name == "cola":
                columns = {"sentence": columns["sentence1"]}
            columns["label"] = rng.integers(0, 2, size=count)
            for part, rows in enumerate((slice(10), slice(10, None))):
                table = pa.table({key: values[rows] for key, values in columns.items()})
                pq.write_table(table, root / name / f"{split}-0000{part}-of-00002.parquet")
    return str(root)


def make_task(data, checkpoint, name="cola", **changes):
    settings = {"tokenizer": checkpoint, "epochs": 1, "warmup_epochs": 0, "batch_size": 8}
    settings |= {"max_length": 24, "padding": "fixed", "eval_every": 1}
    task = Glue(data, name, classes=2, **settings | changes)
    task.prepare(torch.device("cpu"), seed=0)
    return task


def make_model(checkpoint):
    torch.manual_seed(1)
    return TextClassifier(checkpoint, classes=2).double().eval()
