"""The base of every conformance suite.

A suite is a subclass that sets `contract` and holds tests. An author's class names the provider, and nothing else::

    class TestMyCache(PrefixCacheContract):
        provider = "my_cache"

A suite's tests stand: a subclass may add tests, fixtures and helpers, but one that overrides or deletes a test of a
suite is a collection error. What a provider may leave out is a capability, read from its record.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import pytest

from pegboard.conformance.subject import Subject, SuiteError, find_subject
from pegboard.core.interfaces.errors import PegboardError

if TYPE_CHECKING:
    from pegboard.core.interfaces.options import Options
    from pegboard.core.registry.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])

CAPABILITY_MARK = "pegboard_capability"
LACKS_MARK = "pegboard_lacks"

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ConformanceWarning(UserWarning):
    """What a suite tells an author that is allowed and hardly meant."""


def capability(name: str) -> Callable[[F], F]:
    """Mark a test of a capability: skipped, with the reason, where the provider does not declare it."""
    mark = getattr(pytest.mark, CAPABILITY_MARK)(name)
    return lambda test: mark(test)


def lacks(name: str) -> Callable[[F], F]:
    """Mark the paired test, which runs only where the provider does not declare it: using it raises Unsupported."""
    mark = getattr(pytest.mark, LACKS_MARK)(name)
    return lambda test: mark(test)


class ContractSuite:
    """Base of the suites. Class attributes are what an author sets; methods are what a suite's tests use."""

    contract: ClassVar[str] = ""
    """The contract that is tested. A class that sets it is a suite; only a suite does."""

    provider: ClassVar[str] = ""
    """The name of the provider to test, as the config would say it."""

    options: ClassVar[Mapping[str, Any]] = _NOTHING
    """Options to build it with, checked by its options model."""

    factory: ClassVar[type[Any] | None] = None
    """A class to test instead of a registered one. Its capabilities and options model are those of `provider`, or else
    of the registered class that it derives from, or else what `provides` and `options_model` say."""

    provides: ClassVar[frozenset[str] | None] = None
    """The capabilities of `factory`. A registered provider's are read from its record and never declared here."""

    options_model: ClassVar[type[Options] | None] = None
    """The options model of `factory`."""

    expected_failures: ClassVar[Mapping[str, str]] = _NOTHING
    """Tests that are known to fail, with the reason: ``{"test_name": "why"}``. One that passes after all fails."""

    registry: ClassVar[Registry | None] = None
    """Where `provider` is looked up: by default among all that is installed."""

    _suite_tests: ClassVar[Mapping[str, object]] = _NOTHING
    _subject: ClassVar[Subject | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "contract" in vars(cls):
            names = [name for name in dir(cls) if name.startswith("test")]
            own = {name: inspect.getattr_static(cls, name) for name in names}
            cls._suite_tests = MappingProxyType({**own, **cls._suite_tests})

    @property
    def subject(self) -> Subject:
        """What is being tested: the provider's record, class, options model and capabilities."""
        return subject_of(type(self))

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities that the provider has with the author's options."""
        return capabilities_of(type(self))

    def provider_class(self) -> type[Any]:
        """Return the class under test, for its class methods. Raises PluginError where it cannot be imported."""
        return self.subject.load()

    def build(self, ctx: Any, **overrides: Any) -> Any:
        """Return a new instance of the provider, from the author's options and `overrides` on top.

        Skips the test, with the provider's own reason, where its `supports` objects. Raises ConfigError for
        options that its model refuses.
        """
        self.skip_if_it_objects(ctx, **overrides)
        return self.provider_class()(self.make_options(**overrides), ctx)

    def skip_if_it_objects(self, ctx: Any, **overrides: Any) -> None:
        """Skip the test, with the provider's own reason, where its `supports` objects. Fail where it gives none."""
        reason: object = _asked(self.provider_class(), self.make_options(**overrides), ctx)
        if reason is None:
            return
        said = isinstance(reason, str) and reason.strip()
        assert said, f"supports() answers {reason!r}: None says that it works here, and a text says why it does not"
        pytest.skip(f"{self.subject.name} objects to this: {reason}")

    def make_options(self, **overrides: Any) -> Options:
        """Return the author's options with `overrides` on top. Raises ConfigError for options that its model
        refuses.
        """
        return self.subject.make_options({**type(self).options, **overrides})

    def objection(self, ctx: Any) -> str | None:
        """Return what the provider, with the author's options, has against a context."""
        return _asked(self.provider_class(), self.make_options(), ctx)


def _asked(cls: type[Any], options: Options, ctx: object) -> str | None:
    """Return what a class has against a context; a library that is not installed is an objection, too."""
    try:
        return cast("str | None", cls.supports(options, ctx))
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"


def subject_of(cls: type[ContractSuite]) -> Subject:
    """Return the provider that a class tests. Raises SuiteError, with what to do about it, where there is none."""
    subject = vars(cls).get("_subject")
    if not isinstance(subject, Subject):
        subject = cls._subject = find_subject(
            cls.contract,
            cls.provider,
            factory=cls.factory,
            provides=cls.provides,
            options_model=cls.options_model,
            registry=cls.registry,
        )
    return subject


def capabilities_of(cls: type[ContractSuite]) -> frozenset[str]:
    """Return the capabilities that a class's provider has with its options; those declared, where the options are no
    good.
    """
    subject = subject_of(cls)
    try:
        options = subject.make_options(cls.options)
    except PegboardError:  # the tests say so, each by itself
        return subject.capabilities
    return subject.capabilities & options.provides(subject.capabilities)


def check_suite(cls: type[ContractSuite]) -> None:
    """Raise SuiteError where a class changes what its suite demands, or cannot say what it tests."""
    problems = []
    for name, test in cls._suite_tests.items():
        found = inspect.getattr_static(cls, name, None)
        if found is not test:
            problems.append(f"{name} is {'deleted' if found is None else 'overridden'}")
    if problems:
        raise SuiteError(
            f"the suite must stand as it is, but {', '.join(problems)}. Give your own test "
            f"another name; a test that is known to fail goes into expected_failures with a reason"
        )
    subject_of(cls)


def is_suite_class(obj: object) -> bool:
    """Return whether an object is a class to collect: it derives from a suite and is none itself."""
    return isinstance(obj, type) and issubclass(obj, ContractSuite) and "contract" not in vars(obj)
