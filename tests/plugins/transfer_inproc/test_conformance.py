from pegboard.conformance.kv_transfer import KVTransferContract


class TestInproc(KVTransferContract):
    provider = "inproc"
