"""The benchmark as a user starts it, in its smallest form."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_runs_and_times_every_method(tmp_path):
    out = tmp_path / "benchmark.md"
    command = [sys.executable, "scripts/benchmark.py", "--quick", "--cases", "vit_tiny"]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split("|") for line in out.read_text().splitlines() if line.startswith("| ")]
    spent = {
        cells[1].split(",")[0].strip(): cells[2] for cells in rows[1:] if "---" not in cells[1]
    }
    assert set(spent) == {
        "ordinary eager loop", "plain", "ED", "ED with PCA 3", "mixup", "sam", "asam", "jacobian"
    }  # fmt: skip
    assert all(float(milliseconds) > 0 for milliseconds in spent.values())
