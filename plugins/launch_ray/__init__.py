"""Ranks on the machines of a Ray cluster."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="launch_ray",
    version="0.1.0",
    summary="ranks on the machines of a Ray cluster",
    requires=("parallel",),
    providers=(
        Provider(
            contract="rank_launcher",
            name="ray",
            factory="pegboard.plugins.launch_ray.launcher:Ray",
            config="pegboard.plugins.launch_ray.options:RayOptions",
            summary="Ray: an actor for each rank, in a placement group, on one machine or on several",
            provides=frozenset({"machines"}),
            rank=-1,
        ),
    ),
    extras={"ray": "pip install 'pegboard[ray]'"},
)
