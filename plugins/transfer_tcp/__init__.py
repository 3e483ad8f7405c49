"""KV over TCP."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="transfer_tcp",
    version="0.1.0",
    summary="KV of other servers over TCP",
    requires=("kv_handoff",),
    providers=(
        Provider(
            contract="kv_transfer",
            name="tcp",
            factory="pegboard.plugins.transfer_tcp.transfer:TcpTransfer",
            config="pegboard.plugins.transfer_tcp.options:TcpOptions",
            summary="plain TCP beside the servers' own port, for KV in the host's memory; the network must be trusted",
            provides=frozenset({"fenced"}),
            rank=10,
        ),
    ),
)
