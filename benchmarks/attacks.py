"""What one client may cost the others: see benchmarks/hostile, which this runs.

python benchmarks/attacks.py --help
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

if __name__ == "__main__":
    # By its path, Python looks for modules beside this file, and for `benchmarks` nowhere.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.hostile.__main__ import main

    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
