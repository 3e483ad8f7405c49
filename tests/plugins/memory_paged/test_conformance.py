from pegboard.conformance.token_allocator import TokenAllocatorContract


class TestStackAllocator(TokenAllocatorContract):
    provider = "stack"


class TestFifoAllocator(TokenAllocatorContract):
    provider = "fifo"
