"""For tests and drills: a gate that is slow, failing, or silent, as asked; a speculator that knows what will be said;
and forward passes that raise on one rank.
"""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="gate_drill",
    version="0.1.0",
    summary="a gate that is slow, fails, or never answers, for tests and drills",
    requires=("kv_handoff",),
    providers=(
        Provider(
            contract="admission_gate",
            name="drill",
            factory="pegboard_drills.gate:DrillGate",
            config="pegboard_drills.options:DrillGateOptions",
            provides=frozenset({"holds", "brings_kv"}),
            summary="delays, fails, holds, forgets requests or brings their KV, by options and by what they ask for",
        ),
    ),
)

speculation = Plugin(
    name="spec_drill",
    version="0.1.0",
    summary="drafts of recorded outputs, with a given rate of hits and with faults, for tests and drills",
    requires=("speculation",),
    providers=(
        Provider(
            contract="speculator",
            name="drill",
            factory="pegboard_drills.drafts:DrillSpeculator",
            config="pegboard_drills.options:DrillSpeculatorOptions",
            provides=frozenset({"branches"}),
            summary="drafts recorded outputs as chains or trees, right or wrong, late, ill-formed or not at all",
            rank=-1,
        ),
    ),
)

ranks = Plugin(
    name="rank_drill",
    version="0.1.0",
    summary="forward passes that raise, or end their process, on a rank that a test names",
    hooks=("pegboard_drills.ranks:RankDrillHooks",),
    config="pegboard_drills.options:RankDrillOptions",
)
