"""The plugin's record. It is read whenever plugins are listed, so it imports nothing heavy."""

from pegboard.core.interfaces import Plugin, Provider

plugin = Plugin(
    name="example",
    version="1.0.0",
    summary="shortest prompt first, and a prefix cache that is one dictionary",
    providers=(
        Provider(
            contract="schedule_policy",
            name="shortest_prompt",
            factory="pegboard_example_plugin.policy:ShortestPromptPolicy",
            config="pegboard_example_plugin.options:ShortestPromptOptions",
            summary="shortest prompt first, then by arrival",
        ),
        Provider(
            contract="prefix_cache",
            name="whole_prompt",
            factory="pegboard_example_plugin.cache:WholePromptCache",
            summary="a dictionary from everything said so far to the page that ends there",
            provides=frozenset({"reuse"}),
            rank=-1,
        ),
    ),
)
