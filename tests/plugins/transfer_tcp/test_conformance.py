from pegboard.plugins.kv_handoff.suite import KVTransferContract


class TestTcp(KVTransferContract):
    provider = "tcp"
