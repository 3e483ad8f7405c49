from pegboard.conformance.prefix_cache import PrefixCacheContract


class TestHiRadixCache(PrefixCacheContract):
    provider = "hiradix"


class TestHiRadixCacheSelective(PrefixCacheContract):
    provider = "hiradix"
    options = {"write_policy": "write_through_selective", "eviction": "slru", "protected_share": 0.2}


class TestHiRadixCacheWriteBack(PrefixCacheContract):
    provider = "hiradix"
    options = {"write_policy": "write_back", "eviction": "priority"}
