"""The self-check of both tiers' books."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.plugins.cache_hiradix.entry import Node
    from pegboard.plugins.cache_hiradix.tree import TierTree


def check_tree(tree: TierTree) -> None:
    """Verify the tree and everything that is counted of it; raises AssertionError."""
    tree.tokens.check()
    tree.host.check()
    tree.victims.check()
    tree.host_victims.check()
    tree.uncopied.check()
    if tree.protected is not None:
        tree.protected.check()
    device = locked = clean = 0
    for node in tree.tokens.nodes():
        _check_pages(tree, node)
        _check_holds(tree, node)
        entry = node.data
        device += entry.device.size
        locked += entry.device.size if entry.locks else 0
        clean += 0 if entry.locks else entry.copied
    counted = (tree.device_pages, tree.locked_pages, tree.clean_pages)
    assert counted == (device, locked, clean), f"{counted} pages counted, not {(device, locked, clean)}"
    assert len(tree.entries) == tree.tokens.num_nodes, "an entry that is not in the tree is kept"


def _check_pages(tree: TierTree, node: Node) -> None:
    entry, host, pages = node.data, tree.host, len(node) // tree.page_size
    assert entry.node is node, f"{node!r} is not the node of its entry"
    assert tree.entries.get(entry.ident) is entry, f"the entry of {node!r} is not found by its ident"
    assert max(entry.device.size, entry.host.size) == pages, f"{node!r} has pages of no tier"
    children = [child.data for child in node.children.values()]
    assert entry.device_below == sum(child.device.size > 0 for child in children), f"{node!r}: device_below"
    assert entry.host_below == sum(child.host.size > 0 for child in children), f"{node!r}: host_below"
    assert entry.device.size == pages or not entry.device_below, f"below {node!r} the device goes on after a gap"
    assert entry.host.size == pages or not entry.host_below, f"below {node!r} the host goes on after a gap"
    assert (host.owner[entry.host] == entry.ident).all(), f"{node!r}: its host pages have another owner"


def _check_holds(tree: TierTree, node: Node) -> None:
    entry, pages = node.data, len(node) // tree.page_size
    locks_below = sum(child.data.locks for child in node.children.values())
    assert entry.locks >= locks_below, f"{node!r} has fewer locks than its children"
    assert not entry.locks or entry.device.size == pages, f"{node!r} is locked, but not whole on the device"
    assert not entry.tails or entry.host.size == pages, f"the tail {node!r} is locked, but not whole on the host"
    assert entry.pins == tree.host.pins[entry.host].sum(), f"{node!r} counts {entry.pins} pins"
    assert entry.place >= 0 or not entry.leaves_device, f"{node!r} could leave the device, but is not a candidate"
    assert entry.on_host.place >= 0 or not entry.leaves_host, f"{node!r} could leave the host, but is not a candidate"
    assert entry.uncopied.place >= 0 or not entry.would_be_lost, f"{node!r} would be lost, but is not a candidate"
