import pytest

from pegboard.conformance.kv_transfer import KVTransferContract


@pytest.mark.transfer_packages
class TestNixl(KVTransferContract):
    provider = "nixl"
