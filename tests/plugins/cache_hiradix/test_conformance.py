from pegboard.plugins.kv_tiers.suite.tiered_cache import TieredPrefixCacheContract


class TestHiRadixCache(TieredPrefixCacheContract):
    provider = "hiradix"


class TestHiRadixCacheSelective(TieredPrefixCacheContract):
    provider = "hiradix"
    options = {"write_policy": "write_through_selective", "eviction": "slru", "protected_share": 0.2}


class TestHiRadixCacheWriteBack(TieredPrefixCacheContract):
    provider = "hiradix"
    options = {"write_policy": "write_back", "eviction": "priority"}
