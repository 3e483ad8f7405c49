"""The shape of the core's sections, looked up by dotted path."""

from __future__ import annotations

import functools

from pegboard.core.config.section import Section
from pegboard.core.config.sections import EngineConfig
from pegboard.core.interfaces.contracts import CONTRACTS, Cardinality, Contract

USE_SECTIONS: dict[str, Contract] = {
    contract.config_path: contract for contract in CONTRACTS.values() if contract.cardinality is not Cardinality.MANY
}
"""Path of each section that chooses one provider, and the contract of it."""

LIST_SECTIONS: dict[str, Contract] = {
    contract.config_path: contract for contract in CONTRACTS.values() if contract.cardinality is Cardinality.MANY
}
"""Path of each list of providers, and the contract of it."""


def subsection(model: type[Section], key: str) -> type[Section] | None:
    """Return the model of the section under `key`, None where a plain value stands."""
    field = model.model_fields.get(key)
    annotation = field.annotation if field else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


@functools.cache
def section_at(path: str) -> type[Section] | None:
    """Return the core's model of the section at `path` ("" is the whole), None where no section stands."""
    model: type[Section] | None = EngineConfig
    for key in path.split(".") if path else ():
        model = subsection(model, key) if model else None
    return model


def is_section(path: str) -> bool:
    return section_at(path) is not None


def core_keys(path: str) -> frozenset[str]:
    """Keys of the section at `path` that are the core's own: no provider's option may be called so."""
    model = section_at(path)
    return frozenset(model.model_fields) if model else frozenset()


def use_path(contract: Contract) -> str:
    """Return where the config names the provider: ``attention.use``, or the list itself."""
    return contract.config_path if contract.cardinality is Cardinality.MANY else f"{contract.config_path}.use"
