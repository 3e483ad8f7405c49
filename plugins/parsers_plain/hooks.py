"""The hook of output parsers: those that the config names, for the APIs of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.parsers_plain import REASONING_PARSER, TOOL_PARSER
from pegboard.toolkit.parsing.output_parser import OutputParserContext

if TYPE_CHECKING:
    from pegboard.core.interfaces.choosing import Chooser
    from pegboard.core.interfaces.client import EngineClient


class ParserHooks:
    """Builds the server's parsers, which `auto` chooses by the model's chat template. APIs find them with
    `tool_parser_of` and `reasoning_parser_of`.
    """

    @hookimpl
    def api_services(self, chooser: Chooser, client: EngineClient) -> Mapping[str, object]:
        templates = "\n".join(client.tokenizer.chat_templates.values())
        about = OutputParserContext(templates, client.info.architecture, client.info.path)
        return {contract.name: chooser.choose(contract, about) for contract in (TOOL_PARSER, REASONING_PARSER)}
