"""KV through NIXL."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="transfer_nixl",
    version="0.1.0",
    summary="KV of other servers through NVIDIA's NIXL",
    requires=("kv_handoff",),
    providers=(
        Provider(
            contract="kv_transfer",
            name="nixl",
            factory="pegboard.plugins.transfer_nixl.transfer:NixlTransfer",
            config="pegboard.plugins.transfer_nixl.options:NixlOptions",
            summary="NIXL over UCX: RDMA, shared memory or TCP, whatever both ends have; the network must be trusted",
            rank=-1,
        ),
    ),
    extras={"nixl": "pip install 'pegboard[nixl]', or beside a torch for CPUs: pip install --no-deps nixl nixl-cu12"},
)
