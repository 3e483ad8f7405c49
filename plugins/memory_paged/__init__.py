"""Paged memory: the multi-head KV pool and the allocators of its pages."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="memory_paged",
    version="0.1.0",
    summary="the multi-head KV pool and two page allocators",
    providers=(
        Provider(
            contract="kv_pool",
            name="mha",
            factory="pegboard.plugins.memory_paged.pool:MHAPool",
            summary="one K and one V buffer per layer, [slots, kv_heads, head_dim]",
            provides=frozenset({"release"}),
            rank=10,
        ),
        Provider(
            contract="token_allocator",
            name="stack",
            factory="pegboard.plugins.memory_paged.allocators:StackAllocator",
            summary="last freed, first handed out: recently used pages stay warm",
            rank=10,
        ),
        Provider(
            contract="token_allocator",
            name="fifo",
            factory="pegboard.plugins.memory_paged.allocators:FifoAllocator",
            summary="first freed, first handed out: a page rests as long as possible",
            rank=5,
        ),
    ),
)
