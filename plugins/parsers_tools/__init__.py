"""Tool calls as the usual families of models write them."""

from pegboard.core.interfaces.plugin import Plugin, Provider

_JSON = "pegboard.plugins.parsers_tools.json_formats"
_ALL = frozenset({"forces", "opens", "streams_arguments"})

plugin = Plugin(
    name="parsers_tools",
    version="0.1.0",
    summary="tool calls as Qwen, Hermes, Llama, Mistral, DeepSeek and others write them",
    providers=(
        Provider(
            contract="tool_parser",
            name="harmony",
            factory="pegboard.plugins.parsers_tools.harmony:HarmonyParser",
            summary="messages to=functions.f, as gpt-oss writes",
            provides=_ALL,
            rank=140,
        ),
        Provider(
            contract="tool_parser",
            name="qwen3_coder",
            factory="pegboard.plugins.parsers_tools.xml_format:XmlParser",
            summary="<function=f><parameter=a>1</parameter></function>, as Qwen3-Coder writes",
            provides=_ALL,
            rank=60,
        ),
        Provider(
            contract="tool_parser",
            name="deepseek_v3",
            factory=f"{_JSON}:DeepSeekParser",
            summary="names and JSON between DeepSeek's own tokens",
            provides=_ALL,
            rank=50,
        ),
        Provider(
            contract="tool_parser",
            name="mistral",
            factory=f"{_JSON}:MistralParser",
            summary="[TOOL_CALLS] and a JSON list of calls, or [TOOL_CALLS]f{...}",
            provides=_ALL,
            rank=40,
        ),
        Provider(
            contract="tool_parser",
            name="pythonic",
            factory="pegboard.plugins.parsers_tools.pythonic:PythonicParser",
            summary="[f(a=1), g()], as Llama 4 and some others write",
            provides=_ALL,
            rank=30,
        ),
        Provider(
            contract="tool_parser",
            name="llama3_json",
            factory=f"{_JSON}:LlamaParser",
            summary='an answer that is {"name": ..., "parameters": ...}, or follows <|python_tag|>',
            provides=_ALL,
            rank=20,
        ),
        Provider(
            contract="tool_parser",
            name="hermes",
            factory=f"{_JSON}:HermesParser",
            summary='<tool_call>{"name": ..., "arguments": ...}</tool_call>, as Hermes and Qwen write; is explained '
            "to models that know of no tools",
            provides=_ALL,
            rank=10,
        ),
    ),
)
