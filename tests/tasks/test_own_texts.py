"""Training text encoders on your own texts."""

import json

import numpy as np
import pytest
from hydra.errors import InstantiationException

import ed
from ed.engine.compose import compose_config
from ed.engine.main import run
from ed.tasks.text_classification import TextClassification
from tests.helpers.own_data import CPU, REGULARIZERS, TEXTS, write_labels, write_texts
from tests.helpers.text import WORDS

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_names_of_text_labels_are_recorded(tmp_path):
    """They are numbered in alphabetical order, so renaming them could relabel the classes."""
    path = write_texts(tmp_path / "reviews.csv")
    how = {"text": "review", "label": "verdict"} | TEXTS
    assert TextClassification(str(path), **how).provenance() == {"class_names": "bad, good"}
    write_texts(path, labels=(0, 1))
    assert TextClassification(str(path), **how).provenance() == {}


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_a_transformers_model_trains_on_a_file_of_texts(checkpoint, tmp_path, regularizer):
    path = write_texts(tmp_path / "reviews.csv")
    settings = ["task=text_classification", f"task.data={path}", "task.text=review", *CPU]
    settings += ["task.label=verdict", "task.max_length=16", "model=transformers"]
    settings += [f"model.name={checkpoint}", f"regularizer={regularizer}"]
    summary = run(compose_config([*settings, f"system.run_dir={tmp_path / 'run'}"]), ["own"])
    assert summary["steps"] == 2  # 19 of the 24 texts are used for training
    assert np.isfinite(summary["last"]["eval/loss"])
    assert ed.load_run(tmp_path / "run", "cpu").config.model.classes == 2


@pytest.mark.parametrize("name", ["texts.csv", "texts.jsonl", "texts.parquet"])
def test_all_text_formats_are_read(checkpoint, tmp_path, name):
    rows = [{"text": f"{WORDS[i % 3]} {i}", "label": i % 3} for i in range(20)]
    path = tmp_path / name
    if name.endswith("csv"):
        lines = [f"{row['text']},{row['label']}" for row in rows]
        path.write_text("\n".join(["text,label", *lines]))
    elif name.endswith("jsonl"):
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    task = TextClassification(str(path), tokenizer=checkpoint, holdout=0.5, **TEXTS)
    (texts,), labels = task.load("train")
    (others,), _ = task.load("validation")
    assert task.classes == 3
    assert sorted(texts + others) == sorted(row["text"] for row in rows)
    assert labels == [row["label"] for row in rows if row["text"] in texts]


def test_a_folder_of_texts_has_its_own_splits(checkpoint, tmp_path):
    folder = tmp_path / "texts"  # without the cache, whose folders would be taken for splits
    folder.mkdir()
    write_texts(folder / "train.csv", 20)
    write_texts(folder / "test.csv", 6)
    columns = {"text": "review", "label": "verdict"}
    task = TextClassification(str(folder), tokenizer=checkpoint, **columns, **TEXTS)
    assert [len(task.load(split)[1]) for split in ("train", "validation")] == [20, 6]
    assert task.load("validation")[1] == [0, 1] * 3  # 0 is bad, 1 is good


def test_texts_in_another_encoding_are_reported(tmp_path):
    path = write_labels(tmp_path, [0, 1], encoding="latin-1")
    with pytest.raises(ValueError, match=r"^task\.data=.*UnicodeDecodeError"):
        TextClassification(path, **TEXTS)


def test_an_empty_file_is_reported(tmp_path):
    """datasets raises an error without a message."""
    path = tmp_path / "texts.json"
    path.touch()
    with pytest.raises(ValueError, match=r"^task\.data=.*texts\.json: split 'train' "):
        TextClassification(str(path), **TEXTS)


def test_a_missing_file_is_not_looked_up_on_the_hub(monkeypatch):
    monkeypatch.setattr("ed.datasets.images.hub_or_cache", None)  # fails if used
    with pytest.raises(FileNotFoundError, match=r"^task\.data=nowhere\.csv: "):
        TextClassification("nowhere.csv", **TEXTS)


@pytest.mark.parametrize("model", [[], ["model=transformers"]], ids=["images", "no name"])
def test_texts_without_a_text_model_are_reported(tmp_path, model):
    path = tmp_path / "texts.csv"
    path.write_text("text,label\nfine,0\nbad,1\n")
    cfg = compose_config(["task=text_classification", f"task.data={path}", *model, *CPU])
    with pytest.raises(InstantiationException, match=r"task\.tokenizer=null.*model\.name"):
        run(cfg, ["texts"])


def test_a_missing_column_is_reported(checkpoint, tmp_path):
    path = write_texts(tmp_path / "reviews.csv")
    with pytest.raises(ValueError, match=r"^task\.text=text: .*review"):
        TextClassification(str(path), tokenizer=checkpoint, **TEXTS)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("labels", [0.0, 1.7]),
        ("labels", [0, None]),
        ("labels", ["a", None]),
        ("labels", [[0], [1]]),
        ("texts", ["a", None]),
        ("texts", [["a"], ["b"]]),
        ("texts", [1, 2]),
    ],
)
def test_labels_and_texts_of_other_types_are_rejected(column, values, tmp_path):
    columns = {"texts": ["a", "b"], "labels": [0, 1]} | {column: values}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = TextClassification(str(path), text="texts", label="labels", classes=2)
    with pytest.raises(ValueError, match=rf"^task\.data=.*split 'train'.*{column}"):
        task.load("train")


@pytest.mark.parametrize(
    ("rows", "column"), [(["a,0", "b,1", "c,"], "label"), (["a,0", "b,1", ",1"], "text")]
)
def test_an_empty_cell_is_reported(tmp_path, rows, column):
    """With an empty cell, all numbers of the column become floats."""
    path = tmp_path / "texts.csv"
    path.write_text("\n".join(["text,label", *rows]))
    with pytest.raises(ValueError, match=rf"^task\.data=.*column '{column}'.*row 2 "):
        TextClassification(str(path), classes=2).load("train")
