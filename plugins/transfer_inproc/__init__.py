"""KV of another engine in the same process."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="transfer_inproc",
    version="0.1.0",
    summary="copies of KV between engines of one process, with faults on demand",
    requires=("kv_handoff",),
    providers=(
        Provider(
            contract="kv_transfer",
            name="inproc",
            factory="pegboard.plugins.transfer_inproc.transfer:InprocTransfer",
            config="pegboard.plugins.transfer_inproc.options:InprocOptions",
            summary="copies between the pools of one process, slowly or wrongly where a test wants that",
            provides=frozenset({"fenced"}),
            rank=-1,
        ),
    ),
)
