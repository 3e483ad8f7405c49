"""A prefix cache in one dictionary, right in itself, for mutants to get one thing wrong."""

from __future__ import annotations

import numpy as np

from pegboard.core.interfaces.prefix_cache import InsertResult, PrefixCache, PrefixMatch
from pegboard.toolkit.cache.pages import pages_of, slots_of


class Page:
    def __init__(self, name, page, parent):
        self.name, self.page, self.parent = name, page, parent
        self.depth = parent.depth + 1 if parent else 0
        self.locks = self.used = 0
        self.gone = False


class Handle:
    def __init__(self, path):
        self.path, self.locks = path, 0


class TextbookCache(PrefixCache):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.table, self.owned, self.clock = {}, set(), 0

    def name(self, key, end, parent):
        """What a page is found by."""
        return key.namespace, key.tokens[:end].tobytes()

    def find(self, key):
        path = []  # type: ignore[var-annotated]
        for end in range(self.page_size, len(key) + 1, self.page_size):
            page = self.table.get(self.name(key, end, path[-1] if path else None))
            if page is None:
                break
            path.append(page)
        return path

    def touch(self, path):
        self.clock += 1
        for page in path:
            page.used = self.clock

    def slots(self, path):
        return slots_of(np.array([page.page for page in path], dtype=np.int64), self.page_size)

    def match(self, key):
        path = self.find(key)
        self.touch(path)
        return PrefixMatch(self.slots(path), Handle(path))

    def lock(self, handle):
        if any(page.gone for page in handle.path):
            raise ValueError("evicted since")
        for page in handle.path:
            page.locks += 1
        handle.locks += 1

    def unlock(self, handle):
        if not handle.locks:
            raise ValueError("not locked")
        handle.locks -= 1
        for page in handle.path:
            page.locks -= 1

    def refuse(self, path, pages):
        own = {have.page for have, page in zip(path, pages, strict=False) if have.page == page}
        if any(page in self.owned and page not in own for page in pages):
            raise ValueError("a page is cached for other tokens")

    def refuse_outside(self, pages):
        if any(not 0 < page <= self.allocator.num_pages for page in pages):
            raise ValueError("no such page")

    def insert(self, key, slots, *, priority=0):
        if slots.shape != (len(key),):
            raise ValueError("lengths differ")
        taken = len(key) // self.page_size * self.page_size
        pages = pages_of(slots[:taken], self.page_size).tolist()
        self.refuse_outside(pages)
        path = self.find(key)
        self.refuse(path, pages)
        free = [page for have, page in zip(path, pages, strict=False) if have.page != page]
        if free:
            self.allocator.free(np.array(free, dtype=np.int64))
        for page in pages[len(path) :]:
            parent = path[-1] if path else None
            path.append(Page(self.name(key, (len(path) + 1) * self.page_size, parent), page, parent))
            self.table[path[-1].name] = path[-1]
            self.owned.add(page)
            self.version += 1
        self.touch(path)
        return InsertResult(np.concatenate((self.slots(path), slots[taken:])), taken, Handle(path))

    def victims(self):
        """Ends first: a page is used whenever what follows it is."""
        unlocked = [page for page in self.table.values() if not page.locks]
        return sorted(unlocked, key=lambda page: (page.used, -page.depth))

    def evict(self, num_tokens):
        victims = self.victims()[: -(-num_tokens // self.page_size)]
        return self.give_back([self.drop(page) for page in victims])

    def drop(self, page):
        page.gone = True
        del self.table[page.name]
        return page.page

    def give_back(self, freed):
        if freed:
            self.owned.difference_update(freed)
            self.allocator.free(np.array(freed, dtype=np.int64))
            self.version += 1
        return len(freed) * self.page_size

    @property
    def locked_tokens(self):
        return sum(page.locks > 0 for page in self.table.values()) * self.page_size

    @property
    def evictable_tokens(self):
        return len(self.table) * self.page_size - self.locked_tokens

    def reset(self):
        if self.locked_tokens:
            raise RuntimeError("something is locked")
        self.give_back([self.drop(page) for page in list(self.table.values())])
