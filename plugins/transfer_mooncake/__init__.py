"""KV through Mooncake's transfer engine."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="transfer_mooncake",
    version="0.1.0",
    summary="KV of other servers through Mooncake's transfer engine",
    requires=("kv_handoff",),
    providers=(
        Provider(
            contract="kv_transfer",
            name="mooncake",
            factory="pegboard.plugins.transfer_mooncake.transfer:MooncakeTransfer",
            config="pegboard.plugins.transfer_mooncake.options:MooncakeTransferOptions",
            summary="Mooncake over TCP or RDMA, for KV in the host's memory; the network must be trusted",
            rank=-1,
        ),
    ),
    extras={"mooncake": "pip install 'pegboard[mooncake]'"},
)
