from pegboard.conformance.kv_transfer import KVTransferContract


class TestTcp(KVTransferContract):
    provider = "tcp"
