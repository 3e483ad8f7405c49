"""Schedule policies that ask the prefix cache how much of each waiting prompt it holds."""

from pegboard.core.interfaces.plugin import Plugin, Provider, Requirement

_MODULE = "pegboard.plugins.policy_cache_aware.policies"
_REUSE = Requirement("prefix_cache", "reuse", "it orders the queue by cached prefixes")

plugin = Plugin(
    name="policy_cache_aware",
    version="0.1.0",
    summary="lpm and dfs-weight",
    providers=(
        Provider(
            contract="schedule_policy",
            name="lpm",
            factory=f"{_MODULE}:LpmPolicy",
            summary="longest cached prefix first",
            config="pegboard.plugins.policy_cache_aware.options:LpmOptions",
            provides=frozenset({"cache_aware"}),
            requires=(_REUSE,),
        ),
        Provider(
            contract="schedule_policy",
            name="dfs-weight",
            factory=f"{_MODULE}:DfsWeightPolicy",
            summary="depth first through the tree of shared prefixes, heaviest branch first",
            config="pegboard.plugins.policy_cache_aware.options:DfsWeightOptions",
            provides=frozenset({"cache_aware"}),
            requires=(_REUSE,),
        ),
    ),
)
