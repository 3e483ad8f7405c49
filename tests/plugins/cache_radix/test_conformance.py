"""The suite on a radix cache that leaves to its contract what the contract has a default for."""

from pegboard.conformance.prefix_cache import PrefixCacheContract
from pegboard.core.interfaces.prefix_cache import PrefixCache
from pegboard.plugins.cache_radix.cache import RadixCache


class Plain(RadixCache):
    extend = PrefixCache.extend


class TestContractsDefaults(PrefixCacheContract):
    factory = Plain
