"""If the hub is unreachable, loading uses the cache or fails immediately."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub import constants, hf_hub_download, utils

from ed.datasets.images import load_table
from ed.models.text import TextClassifier
from ed.runtime import hub
from ed.tasks.glue import load_split
from ed.tasks.text_task import load_tokenizer
from scripts import measure
from tests.helpers.measuring import QUICK

ENDPOINT = r"http://127\.0\.0\.1:\d+"


@pytest.fixture
def unreachable(monkeypatch, tmp_path) -> Iterator[str]:
    """Points the libraries at an unreachable hub and empty caches."""
    taken = socket.socket()  # bound but not listening; keeps the port reserved
    taken.bind(("127.0.0.1", 0))
    endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(hub, "PAUSE", 0)
    for name in ("no_proxy", "NO_PROXY"):  # a proxy would answer for the hub
        monkeypatch.setenv(name, "127.0.0.1")
    getattr(utils, "close_session", lambda: None)()  # a new session reads these variables
    for cached in (hub.unanswered, hub._print_once):  # another test may have used the same port
        cached.cache_clear()
    yield endpoint
    taken.close()


@pytest.fixture
def answering(unreachable, monkeypatch):
    """Starts a hub that answers every request with 404."""

    class NotFound(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), NotFound)
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
def test_unreachable_model_fails_immediately(unreachable, model, tmp_path, monkeypatch):
    remedy = "--random-weights" if model[0] == "--timm" else "config.json"
    waits = []
    main = threading.get_ident()  # threads of other libraries may sleep meanwhile
    sleep = time.sleep
    monkeypatch.setattr(
        time, "sleep", lambda s: waits.append(s) if threading.get_ident() == main else sleep(s)
    )
    with pytest.raises(ValueError, match=rf"{' '.join(model[:2])}: .*{ENDPOINT}.*{remedy}"):
        measure.main([*model, "--data", "embedded", *QUICK, "--out", str(tmp_path / "a.png")])
    assert sum(waits) == 0  # retries would take 23 s


@pytest.mark.parametrize(
    ("key", "load"),
    [
        ("model.checkpoint=a/b", lambda: TextClassifier("a/b", classes=2)),
        ("task.tokenizer=a/b", lambda: load_tokenizer("a/b")),
        ("task.data=a/b", lambda: load_split("a/b", "rte", "train")),
        ("task.data=a/b", lambda: load_table("a/b", "train", "task.data")),
    ],
    ids=["weights", "tokenizer", "sentences", "images"],
)
def test_unreachable_source_error_names_its_key(unreachable, key, load):
    with pytest.raises(ValueError, match=rf"{key}: .*{ENDPOINT}"):
        load()
    assert not constants.HF_HUB_OFFLINE  # the original mode is restored
    assert not datasets.config.HF_HUB_OFFLINE


def test_cached_files_are_used(unreachable, tmp_path, capsys):
    version = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    version.mkdir(parents=True)
    (version / "config.json").write_text("{}")
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text(version.name)
    for _ in range(2):
        with hub.hub_or_cache("a/b"):
            assert hf_hub_download("a/b", "config.json") == str(version / "config.json")
            assert datasets.config.HF_HUB_OFFLINE
    assert capsys.readouterr().err.count(unreachable) == 1


def test_hub_is_tried_a_second_time(unreachable, monkeypatch):
    answers = iter((OSError("no such name"), None))

    def head(*_, **__):
        if error := next(answers):
            raise error

    session = SimpleNamespace(head=head)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: session)
    assert hub.unanswered(unreachable) is None


def test_reachable_hub_is_used_normally(answering):
    with hub.hub_or_cache("a/b"):
        assert not constants.HF_HUB_OFFLINE
    with pytest.raises(OSError, match="unchanged"), hub.hub_or_cache("a/b"):
        raise OSError("unchanged")


def test_hub_is_not_contacted_for_local_folders_or_offline(monkeypatch, tmp_path):
    def contacted(_):
        raise AssertionError

    monkeypatch.setattr(hub, "unanswered", contacted)
    with hub.hub_or_cache(str(tmp_path)):
        pass
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub.hub_or_cache("a/b"):
        pass
