"""Pictures and video for Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="mm_qwen_vl",
    version="0.1.0",
    summary="pictures and video for the Qwen-VL families",
    requires=("media",),
    providers=(
        Provider(
            contract="media_processor",
            name="qwen_vl",
            factory="pegboard.plugins.mm_qwen_vl.processor:QwenVLProcessor",
            config="pegboard.plugins.mm_qwen_vl.options:QwenVLProcessorOptions",
            provides=frozenset({"encoded"}),
            summary="Qwen2-VL, 2.5-VL, 3-VL and 3-VL-MoE: Pillow for pictures, PyAV for video, three-axis positions",
        ),
        Provider(
            contract="media_encoder",
            name="qwen_vl",
            factory="pegboard.plugins.mm_qwen_vl.encoder:QwenVLEncoder",
            summary="the vision towers of Qwen2-VL, 2.5-VL, 3-VL and 3-VL-MoE in torch",
        ),
    ),
    extras={"PIL": "pip install 'pegboard[images]'", "av": "pip install 'pegboard[video]'"},
)
