"""What the clusters of these tests need of the machine."""

from __future__ import annotations

import os

# Ray lowers the priority of its workers by 15. Beside the tests of other processes, replicas would
# hardly get a CPU, and miss their time limits.
os.environ.setdefault("RAY_worker_niceness", "0")
