"""What brings the halves. Each hook imports its own, so that the API process does not load torch."""

from pegboard.core.interfaces import hookimpl


class ExampleHooks:
    def __init__(self, options):
        self.options = options

    @hookimpl
    def frontend_stages(self):
        from pegboard_example_plugin.stages.entropy import EntropyFrontend
        from pegboard_example_plugin.stages.seconds import SecondsFrontend

        return [EntropyFrontend(), SecondsFrontend()]

    @hookimpl
    def pipeline_stages(self, ctx):
        from pegboard_example_plugin.stages.checksums import Checksums
        from pegboard_example_plugin.stages.entropy import Entropy
        from pegboard_example_plugin.stages.phrases import PhraseBook
        from pegboard_example_plugin.stages.seconds import Seconds

        return [Checksums(self.options.every), Entropy(), PhraseBook(self.options.phrases), Seconds()]

    @hookimpl
    def device_parts(self, ctx):
        from pegboard_example_plugin.stages.checksums import ChecksumPart
        from pegboard_example_plugin.stages.entropy import EntropyPart

        return [ChecksumPart(), EntropyPart()]
