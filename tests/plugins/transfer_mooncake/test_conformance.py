import pytest

from pegboard.conformance.kv_transfer import KVTransferContract


@pytest.mark.transfer_packages
class TestMooncake(KVTransferContract):
    provider = "mooncake"
