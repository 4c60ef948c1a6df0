"""Damaged run folders and invalid table files do not spoil a table."""

import pytest

from ed.analysis.collect import collect_run
from ed.analysis.render import to_markdown
from ed.analysis.spec import SpecError, expand, parse_value
from ed.analysis.store import to_csv
from ed.analysis.tables import load_table
from ed.engine.compose import compose_config
from ed.runtime.files import csv_text, from_csv_text
from scripts import launch, table
from tests.helpers.hostile import WRONG
from tests.helpers.tables import fabricate, write_table


@pytest.mark.parametrize(
    "name", ["config.yaml", "DONE", "meta.json", "metrics.jsonl", "slurm.json"]
)
@pytest.mark.parametrize("content", WRONG)
def test_damaged_run_does_not_affect_other_runs(name, content, tmp_path, capsys):
    own = write_table(tmp_path)
    runs = expand(own, root=tmp_path / "runs")
    for number, each in enumerate(runs):
        fabricate(each, 80.0 + number)
    damaged = runs[0].folder / name
    if name == "slurm.json":
        (damaged.with_name("DONE")).unlink()
    damaged.write_bytes(WRONG[content])
    assert launch.main([str(own.path), "--runs", str(tmp_path / "runs"), "--status"]) in (0, 1)
    printed, error = capsys.readouterr()
    assert not error
    harmless = {"meta.json": "empty", "metrics.jsonl": "deep"}
    if harmless.get(name) != content:  # harmless damage keeps the status
        assert f"{len(runs)} runs: 1 damaged, {len(runs) - 1} done" in printed
        assert str(damaged) in printed
    assert table.main([str(own.path), "--runs", str(tmp_path / "runs")]) == 0
    if name != "slurm.json":
        assert (str(damaged) in capsys.readouterr().err) == (harmless.get(name) != content)


@pytest.mark.parametrize("content", [*WRONG.values(), b"[1, 2]"])
def test_table_is_written_despite_damaged_deviations(content, tmp_path, capsys):
    own = write_table(tmp_path)
    for each in expand(own, root=tmp_path / "runs"):
        fabricate(each, 80.0)
    reduced = tmp_path / "runs" / f"{own.name}@x"
    reduced.mkdir()
    (reduced / "deviations.json").write_bytes(content)
    assert table.main([str(own.path), "--runs", str(tmp_path / "runs")]) == 0
    assert str(reduced / "deviations.json") in capsys.readouterr().err


def test_tables_contain_no_tags_links_or_formulas(tmp_path):
    own = write_table(tmp_path)
    (first, *_) = expand(own, root=tmp_path)
    fabricate(first, done=False)
    error = "=HYPERLINK(1) <script>alert(1)</script> [a](http://b)\n\n# heading"
    (first.folder / "FAILED").write_text(error)
    rows = [collect_run(first, own)]
    text = to_markdown(own, rows)
    assert "<script" not in text
    assert "](" not in text
    assert "\n# heading" not in text
    stored = to_csv(own, rows)
    assert "'=HYPERLINK" in stored
    assert "<script" not in stored


@pytest.mark.parametrize("value", ["nan", "-inf", "${seed}"])
def test_non_finite_and_interpolated_table_settings_are_rejected(value, tmp_path):
    own = write_table(tmp_path)
    with pytest.raises(SpecError, match=r"--set optimizer\.lr="):
        expand(own, sets=[f"optimizer.lr={value}"])


def test_yaml_bomb_is_rejected(tmp_path):
    (tmp_path / "bomb.yaml").write_text("a: " + "[" * 5000 + "]" * 5000)
    with pytest.raises(SpecError, match=r"bomb\.yaml"):
        load_table(str(tmp_path / "bomb.yaml"))


@pytest.mark.parametrize(
    "text", ["=1+1", "+a", "-a", "@x", "-1", "1e-5", "", "'=1", "a=b", "'", "<b>&lt;"]
)
def test_csv_text_round_trips(text):
    assert from_csv_text(csv_text(text)) == text


@pytest.mark.parametrize(
    "text", ["010", "0x10", "on", "no", "1e-5", "null", "[1,2]", "a b", "true"]
)
def test_overrides_are_parsed_like_hydra_overrides(text):
    assert parse_value(text) == compose_config([f"+own={text}"]).own
