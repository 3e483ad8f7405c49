import torch

from pegboard.plugins.kv_tiers.suite.host_pool import HostPoolContract
from pegboard.plugins.memory_host.copies import Copies, QueuedCopies
from pegboard.plugins.memory_host.pool import LayerFirst, PageFirst


class TestLayerFirst(HostPoolContract):
    provider = "layer_first"


class TestPageFirst(HostPoolContract):
    provider = "page_first"


class QueuedLayerFirst(LayerFirst):
    """Copies run by run, as for a GPU, which needs none to be right."""

    def make_copies(self, device: torch.device) -> Copies:
        return QueuedCopies(pinned=False, direct=1)


class QueuedPageFirst(PageFirst):
    def make_copies(self, device: torch.device) -> Copies:
        return QueuedCopies(pinned=False, direct=1)


class StagedPageFirst(PageFirst):
    def make_copies(self, device: torch.device) -> Copies:
        return QueuedCopies(pinned=False, direct=2**40)


class TestQueuedLayerFirst(HostPoolContract):
    factory = QueuedLayerFirst


class TestQueuedPageFirst(HostPoolContract):
    factory = QueuedPageFirst


class TestStagedPageFirst(HostPoolContract):
    factory = StagedPageFirst
