"""Many requests to the web application; its memory must stay flat.

``python tests/fuzz/serving.py --rounds 2000``
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.driver import options
from web_server import soak, tiny

MOST = 40_000  # kB; the answers to 2,000 requests would be more


def main() -> int:
    given = options(__doc__, 2000)
    grown = soak(tiny(), given.rounds)
    sys.stdout.write(f"{given.rounds} requests, grown by {grown} kB (limit {MOST})\n")
    return int(grown > MOST)


if __name__ == "__main__":
    sys.exit(main())
