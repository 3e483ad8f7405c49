from pegboard.plugins.kv_tiers.suite.tiered_cache import TieredCacheContract


class TestHiRadixCache(TieredCacheContract):
    provider = "hiradix"


class TestHiRadixCacheSelective(TieredCacheContract):
    provider = "hiradix"
    options = {"write_policy": "write_through_selective", "eviction": "slru", "protected_share": 0.2}


class TestHiRadixCacheWriteBack(TieredCacheContract):
    provider = "hiradix"
    options = {"write_policy": "write_back", "eviction": "priority"}
