"""Bad files are the request's own fault, whatever is wrong with them, and take little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.plugins.mm_qwen_vl.bad_files import write_corpus

ROOT = Path(__file__).parents[3]
ADDRESSES = 2**30
"""Bytes of address space that the process may take."""
RESIDENT = 200 * 1024
"""Kilobytes of memory that it takes at most. 70,000 are Python, numpy, Pillow and PyAV; 100 megapixels are 400,000."""


def test_every_bad_file_is_refused(tmp_path: Path) -> None:
    count = write_corpus(tmp_path)
    assert count >= 60
    command = [sys.executable, "-m", "tests.plugins.mm_qwen_vl.bad_files", str(tmp_path), str(ADDRESSES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == count
    for one in found:
        assert (one["error"], one["status"]) == ("InvalidRequest", 400), one
        assert len(one["message"]) > 20, one
        for private in ("secret", "/", "Error", "av.", "PIL", "0x"):
            assert private not in one["message"], one
    assert max(one["kilobytes"] for one in found) < RESIDENT, max(found, key=lambda one: one["kilobytes"])
