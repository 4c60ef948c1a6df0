"""What asks the hub: at once an error where nobody answers, and nothing changed where one does."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub import constants, hf_hub_download

from ed.datasets.images import load_table
from ed.models.text import TextClassifier
from ed.runtime import hub
from ed.tasks.glue import load_split
from ed.tasks.text_task import load_tokenizer
from tests.scripts.test_measure import QUICK, measure

NOBODY = r"http://127\.0\.0\.1:\d+ does not answer \(.+\), and its cache does not have it"


@pytest.fixture
def unreachable(monkeypatch, tmp_path) -> Iterator[str]:
    """A hub at a port where nobody listens, and empty caches."""
    taken = socket.socket()  # bound, so that nobody else gets the port, but not listening
    taken.bind(("127.0.0.1", 0))
    endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(hub, "PAUSE", 0)
    for asked in (hub.unanswered, hub._tell):  # ports come again
        asked.cache_clear()
    yield endpoint
    taken.close()


@pytest.fixture
def answering(unreachable, monkeypatch):
    """A hub that answers, if only that it has nothing."""

    class Nothing(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Nothing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "model",
    [["--timm", "test_vit"], ["--timm", "hf-hub:a/b"], ["--transformers", "a/b"],
     ["--transformers", "a/b", "--random-weights"]],
    ids=" ".join,
)  # fmt: skip
def test_a_model_out_of_reach_is_said_at_once(unreachable, model, tmp_path, monkeypatch):
    remedy = "--random-weights to measure" if model[0] == "--timm" else "a folder with config.json"
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(ValueError, match=rf"{' '.join(model[:2])}: .*{NOBODY}.*{remedy}"):
        measure.main([*model, "--data", "embedded", *QUICK, "--out", str(tmp_path / "a.png")])
    assert sum(waits) == 0  # the libraries wait 23 s between their repetitions of one request


@pytest.mark.parametrize(
    ("key", "load"),
    [
        ("model.checkpoint=a/b", lambda: TextClassifier("a/b", classes=2)),
        ("task.tokenizer=a/b", lambda: load_tokenizer("a/b")),
        ("task.data=a/b", lambda: load_split("a/b", "rte", "train")),
        ("task.data=a/b", lambda: load_table("a/b", "train", "task.data")),
    ],
    ids=["weights", "tokenizer", "sentences", "pictures"],
)
def test_a_run_out_of_reach_names_its_key(unreachable, key, load):
    with pytest.raises(ValueError, match=rf"{key}: .*{NOBODY}"):
        load()
    assert not constants.HF_HUB_OFFLINE  # whoever imports ed keeps the hub they had
    assert not datasets.config.HF_HUB_OFFLINE


def test_what_the_cache_has_is_used(unreachable, tmp_path, capsys):
    version = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    version.mkdir(parents=True)
    (version / "config.json").write_text("{}")
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text(version.name)
    for _ in range(2):
        with hub.hub_or_cache("a/b"):
            assert hf_hub_download("a/b", "config.json") == str(version / "config.json")
            assert datasets.config.HF_HUB_OFFLINE
    assert capsys.readouterr().err.count(f"{unreachable} does not answer") == 1


def test_a_hub_that_is_not_found_at_first_is_asked_again(unreachable, monkeypatch):
    answers = iter((OSError("no such name"), None))

    def head(*_, **__):
        if error := next(answers):
            raise error

    session = SimpleNamespace(head=head)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: session)
    assert hub.unanswered(unreachable) is None


def test_a_hub_that_answers_is_left_alone(answering):
    with hub.hub_or_cache("a/b"):
        assert not constants.HF_HUB_OFFLINE
    with pytest.raises(OSError, match="as it was"), hub.hub_or_cache("a/b"):
        raise OSError("as it was")


def test_nobody_is_asked_for_a_folder_or_offline(monkeypatch, tmp_path):
    def asked(_):
        raise AssertionError

    monkeypatch.setattr(hub, "unanswered", asked)
    with hub.hub_or_cache(str(tmp_path)):
        pass
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub.hub_or_cache("a/b"):
        pass
