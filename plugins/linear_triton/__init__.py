"""Products with quantised weights in Triton."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="linear_triton",
    version="0.1.0",
    summary="products with quantised weights, which stay codes until they are multiplied",
    requires=("quantization",),
    providers=(
        Provider(
            "linear",
            "triton",
            "pegboard.plugins.linear_triton.products:TritonProducts",
            "multiplies by the codes in Triton; on a CPU only under Triton's interpreter",
            config="pegboard.plugins.linear_triton.options:TritonProductsOptions",
            rank=15,
        ),
    ),
    extras={"triton": "pip install 'pegboard[triton]'"},
)
