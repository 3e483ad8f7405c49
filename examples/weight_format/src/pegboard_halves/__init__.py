"""The plugin's record, which is read whenever plugins are listed: all else stands in strings."""

from pegboard.core.interfaces import Plugin, Provider

plugin = Plugin(
    name="halves",
    version="1.0.0",
    summary="checkpoints whose bytes have a column of each half of a matrix",
    requires=("quantization",),
    providers=(
        Provider(
            contract="weight_format",
            name="halves",
            factory="pegboard_halves.format:Halves",
            summary="4 bits in groups, two halves of a matrix side by side",
            conformance=("pegboard_halves.testing:TestHalves",),
        ),
    ),
)
