"""Settings and text files for tests of training on your own data."""

import csv

import numpy as np

from tests.helpers.text import WORDS

REGULARIZERS = ("none", "mixup", "sam", "asam", "jacobian", "ed")
CPU = ["system.device=cpu", "system.log_every=1", "task.epochs=1", "task.warmup_epochs=0"]
CPU += ["task.batch_size=8"]
TEXTS = {"epochs": 1, "warmup_epochs": 0, "batch_size": 8, "max_length": 16, "padding": "fixed"}
TEXTS |= {"eval_every": 1}


def write_texts(path, count=24, labels=("bad", "good")):
    rng = np.random.default_rng(0)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["review", "verdict"])
        for index in range(count):
            writer.writerow([" ".join(rng.choice(WORDS, 5)), labels[index % len(labels)]])
    return path


def write_labels(folder, labels, encoding="utf-8"):
    path = folder / "texts.csv"
    lines = "\n".join(f"caf\xe9 {index},{label}" for index, label in enumerate(labels))
    path.write_text(f"text,label\n{lines}", encoding=encoding)
    return str(path)
