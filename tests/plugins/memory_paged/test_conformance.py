from pegboard.conformance.kv_pool import KVPoolContract
from pegboard.conformance.token_allocator import TokenAllocatorContract


class TestStackAllocator(TokenAllocatorContract):
    provider = "stack"


class TestFifoAllocator(TokenAllocatorContract):
    provider = "fifo"


class TestMHAPool(KVPoolContract):
    provider = "mha"
