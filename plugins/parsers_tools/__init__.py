"""Tool calls as the usual families of models write them."""

from pegboard.core.interfaces.plugin import Plugin, Provider

_JSON = "pegboard.plugins.parsers_tools.json_formats"
_TAGGED = "pegboard.plugins.parsers_tools.tagged"
_SECTIONS = "pegboard.plugins.parsers_tools.json_sections"
_ALL = frozenset({"forces", "opens", "streams_arguments"})

plugin = Plugin(
    name="parsers_tools",
    version="0.1.0",
    summary="tool calls as Qwen, Hermes, Llama, Mistral, DeepSeek and others write them",
    providers=(
        Provider(
            contract="tool_parser",
            name="gemma4",
            factory="pegboard.plugins.parsers_tools.gemma:GemmaParser",
            summary="call:f{a:1} between Gemma 4's tokens",
            provides=_ALL,
            rank=150,
        ),
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
            name="glm",
            factory=f"{_TAGGED}:GlmParser",
            summary="<arg_key>a</arg_key><arg_value>1</arg_value> in a call's tag, as GLM-4.5 to 4.7 write",
            provides=_ALL,
            rank=130,
        ),
        Provider(
            contract="tool_parser",
            name="minimax_m2",
            factory=f"{_TAGGED}:MiniMaxParser",
            summary='<invoke name="f"><parameter name="a">1</parameter></invoke>, as MiniMax-M2 writes',
            provides=_ALL,
            rank=120,
        ),
        Provider(
            contract="tool_parser",
            name="deepseek_v32",
            factory=f"{_TAGGED}:DsmlParser",
            summary="invoke and parameter tags marked DSML, as DeepSeek-V3.2 writes",
            provides=_ALL,
            rank=110,
        ),
        Provider(
            contract="tool_parser",
            name="kimi_k2",
            factory=f"{_SECTIONS}:KimiParser",
            summary="functions.f:0 and JSON between Kimi K2's own tokens",
            provides=_ALL,
            rank=100,
        ),
        Provider(
            contract="tool_parser",
            name="hunyuan",
            factory=f"{_SECTIONS}:HunyuanParser",
            summary="a JSON list of calls in <tool_calls>, as Hunyuan writes",
            provides=_ALL,
            rank=90,
        ),
        Provider(
            contract="tool_parser",
            name="granite",
            factory=f"{_SECTIONS}:GraniteParser",
            summary="<|tool_call|> and a JSON list of calls, as Granite 3 and Phi-4-mini write",
            provides=_ALL,
            rank=80,
        ),
        Provider(
            contract="tool_parser",
            name="olmo3",
            factory="pegboard.plugins.parsers_tools.pythonic:OlmoParser",
            summary="f(a=1) on a line in <function_calls>, as Olmo 3 writes",
            provides=_ALL,
            rank=70,
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
