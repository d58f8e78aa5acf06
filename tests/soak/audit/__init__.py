"""What was promised, held against what the ledgers and the logs say.  Nothing here talks to a broker."""

from tests.soak.audit.evidence import Evidence, SetClock, Stored, read_grants, read_removals, read_stored
from tests.soak.audit.judge import judge
from tests.soak.audit.verdict import Finding, Verdict

__all__ = [
    "Evidence",
    "Finding",
    "SetClock",
    "Stored",
    "Verdict",
    "judge",
    "read_grants",
    "read_removals",
    "read_stored",
]
