"""Body of the profiler's route."""

from __future__ import annotations

from typing import Any

from pegboard.plugins.api_native.bodies import refuse_unsupported
from pegboard.toolkit.http.bodies import RequestModel


class ProfileBody(RequestModel):
    """Body of `/start_profile`; there need not be one."""

    output_dir: str | None = None
    """Directory below the server's `server.profile_dir`; that itself by default."""
    num_steps: int | None = None
    """Steps after which the trace ends by itself."""
    activities: list[str] | None = None
    """`CPU`, `GPU`; both by default, as far as they are there."""
    with_stack: bool | None = None
    """Whether to record the Python stack of every operation; true by default."""
    record_shapes: bool | None = None
    """Whether to record the shapes of operations' inputs."""
    start_step: int | None = None
    profile_by_stage: bool = False
    profile_stages: list[str] | None = None
    merge_profiles: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return arguments of the control action. Raises InvalidRequest for what the profiler does not do."""
        refuse_unsupported(self, ("start_step", "profile_by_stage", "profile_stages", "merge_profiles"))
        fields = ("output_dir", "num_steps", "activities", "with_stack", "record_shapes")
        return {name: value for name in fields if (value := getattr(self, name)) is not None}
