"""The gate's options, and what it says at the start."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from pegboard.core.interfaces.errors import ConfigError, Temporary
from pegboard.plugins.disagg.gate import DisaggGate, listen
from pegboard.plugins.disagg.options import DisaggOptions
from tests.plugins.disagg.world import World


@pytest.mark.parametrize(
    "options",
    [
        {"role": "prefill", "listen": "0.0.0.0:8998"},
        {"role": "decode", "peers": ("10.0.0.1",)},
        {"role": "decode", "listen": "127.0.0.1:8998"},
        {"role": "decode", "peers": ("localhost", "prefill-1:8998")},
        {"listen": "8998"},
        {"listen": "host:port"},
        {"listen": "host:99999"},
        {"peers": ("host:99999",)},
        {"role": "both"},
        {"max_held_share": 0.0},
        {"hold": 0.0},
    ],
)
def test_options_that_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DisaggOptions.model_validate(options)


def test_off_loopback_with_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for options in ({"listen": "0.0.0.0:8998"}, {"role": "decode", "peers": ("10.0.0.1:8998",)}):
        made = DisaggOptions.model_validate({**options, "secret_file": file})
        file.write_text("sixteen bytes ok\n")
        file.chmod(0o600)
        assert made.secret() == b"sixteen bytes ok"
        file.write_text("short")
        with pytest.raises(ValueError, match="at least 16"):
            made.secret()
        file.chmod(0o640)
        with pytest.raises(ValueError, match="chmod 600"):
            made.secret()


def test_a_port_that_is_taken() -> None:
    with listen("127.0.0.1:0") as taken:
        ctx = World().prefill.made.ctx
        options = DisaggOptions(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(Temporary) as caught:
            DisaggGate(options, ctx)
    text = f"`listen`: cannot listen at {options.listen}: Address already in use; stop what uses the port, or choose"
    assert text in str(caught.value)
    assert "attempting" not in str(caught.value)


def test_a_secret_that_cannot_be_read(tmp_path: Path) -> None:
    """The error names the option; where the file is missing, also the commands that make it, which are right."""
    file = tmp_path / "secret"
    options = DisaggOptions(listen="127.0.0.1:0", secret_file=file)
    ctx = World().prefill.made.ctx
    with pytest.raises(ConfigError, match=r"gate `disagg`: secret_file .* does not exist") as caught:
        DisaggGate(options, ctx)
    subprocess.run(["sh", "-c", str(caught.value).partition("servers: ")[2]], check=True)
    assert len(options.secret()) >= 32
    directory = tmp_path / "closed"
    directory.mkdir(0o700)
    with pytest.raises(ConfigError, match=r"secret_file .* cannot be read: Is a directory"):
        DisaggGate(DisaggOptions(secret_file=directory), ctx)


@pytest.mark.parametrize(
    ("role", "secret", "told"),
    [
        (
            "prefill",
            True,
            r"has the role prefill, and listens at 127\.0\.0\.1, port [1-9]\d*; .* signed with .*/secret",
        ),
        ("prefill", False, r"has the role prefill, and listens at 127\.0\.0\.1, port [1-9]\d*; no secret is used"),
        ("decode", False, r"has the role decode, and does not listen; no secret is used"),
    ],
)
def test_the_start_is_logged(
    role: str, secret: bool, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "secret"
    file.write_text("not in any log, ever")
    file.chmod(0o600)
    said = {"role": role} | ({"listen": "127.0.0.1:0"} if role == "prefill" else {})
    options = DisaggOptions.model_validate(said | ({"secret_file": file} if secret else {}))
    with caplog.at_level("INFO", "pegboard.plugins.disagg.gate"):
        gate = DisaggGate(options, World().server(role).made.ctx)
    if role == "prefill":
        assert httpx.get(f"http://127.0.0.1:{gate.port}/health").status_code == 200
    gate.close()
    lines = [one.getMessage() for one in caplog.records if one.name == "pegboard.plugins.disagg.gate"]
    assert [bool(re.search(told, line)) for line in lines] == [True]
    assert "not in any log" not in caplog.text
