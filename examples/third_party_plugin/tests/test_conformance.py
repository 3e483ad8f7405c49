"""Everything that Pegboard demands of the seven: the classes that the record names."""

from pegboard_example_plugin.testing import (  # noqa: F401 - pytest collects them here
    TestBracketed,
    TestCompletionLines,
    TestNoRepeat,
    TestOtherMarkers,
    TestRateLimit,
    TestShortestPrompt,
    TestShortestPromptInSteps,
    TestTopNSigma,
    TestWholePrompt,
    TestWholePromptOldestFirst,
)
