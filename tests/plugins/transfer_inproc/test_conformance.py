from pegboard.plugins.kv_handoff.suite import KVTransferContract


class TestInproc(KVTransferContract):
    provider = "inproc"
