"""Media for tests and drills: a processor of files that misbehave, and a route for them."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="media_drill",
    version="0.1.0",
    summary="a processor of toy media that crash, hang or take long, and /media, which takes them",
    providers=(
        Provider(
            contract="media_processor",
            name="media_drill",
            factory="pegboard_media_drills.processor:DrillProcessor",
            summary="pictures in PPM, and files that say how preparing them goes wrong",
            rank=-1,
        ),
        Provider(
            contract="api",
            name="media_drill",
            factory="pegboard_media_drills.router:MediaRouter",
            summary="/media",
        ),
    ),
)
