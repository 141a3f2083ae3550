"""The README's Python snippets run, in their order, in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_snippets_of_the_readme(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(snippets) >= 5
    script = tmp_path / "readme.py"
    script.write_text("\n".join(snippets))
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    assert "3B0" not in ran.stdout and "8B0" in ran.stdout
    assert (tmp_path / "step.json").stat().st_size > 1000


def test_every_file_that_the_documents_link_to_is_there() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
