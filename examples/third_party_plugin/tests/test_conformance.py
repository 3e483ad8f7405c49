"""Everything that Pegboard demands of the eight: the classes that the record names."""

from pegboard_example_plugin.testing import (  # noqa: F401 - pytest collects them here
    TestBigrams,
    TestBracketed,
    TestCompletionLines,
    TestLongBigrams,
    TestNoRepeat,
    TestOtherMarkers,
    TestRateLimit,
    TestShortestPrompt,
    TestShortestPromptInSteps,
    TestTopNSigma,
    TestWholePrompt,
    TestWholePromptOldestFirst,
)
