"""The core's own config: every section and key that is there whatever plugins are installed.

A section with a `use` chooses a provider and takes that provider's options beside its own keys;
`pegboard.core.config.compose` builds those wider models. What is set here is only the shape: names of plugins stand in
the presets, which are data.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from pegboard.core.config.section import AUTO, Section, UseSection
from pegboard.core.interfaces.options import Key, NameList, PositiveInt
from pegboard.core.pipeline.settings import SchedulerSettings
from pegboard.toolkit.sampling.default_values import SamplingDefaults

ONE_OR_SEVERAL = BeforeValidator(lambda value: [value] if isinstance(value, str | int | float) else value)
KeyList = Annotated[tuple[Key, ...], ONE_OR_SEVERAL]


class ModelSection(UseSection):
    """The model, and the family of networks that runs it."""

    use: str = AUTO
    """The model family that builds and loads the network, or `auto`: the first that supports the architecture."""
    path: str
    """What to serve: a directory, a hub id, a GGUF file, or another reference that a model source understands."""
    source: UseSection = UseSection()
    """Where the model comes from; `auto` asks every model source whether it understands `path`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV. `auto`: on a GPU the checkpoint's type; on a CPU bfloat16 for 16-bit checkpoints if the
    CPU computes with it (AMX, AVX-512 bf16), else float32."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Where the model runs: `cpu`, `cuda`, `cuda:N`, or `auto`: the first GPU if there is one, else the CPU."""
    context_length: PositiveInt | None = None
    """Maximum number of tokens of prompt and output together. Unset: the model's own."""
    cache_dir: str | None = None
    """Directory for converted models. Unset: `pegboard` in the user's cache directory."""
    chat_template: str | None = None
    """File with a chat template (Jinja) that replaces the model's own."""
    hidden_states: bool = False
    """Let requests ask for hidden states. They are large, and reveal much about a model."""
    served_name: NameList = ()
    """One or several names of the model: answers have the first, requests may use any. Unset: the last part of
    `path`."""


class CorsSection(Section):
    """Web pages of other origins that may use the server."""

    allow_origins: tuple[Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+)$")], ...] = ()
    """Origins whose pages may call the server, such as `https://chat.example.com`; `*`: all. Empty: browsers refuse
    pages of other origins. Cookies are never used: pages send a key as other clients do."""
    max_age: Annotated[int, Field(ge=0)] = 600
    """Seconds for which a browser may cache the permission."""


class TlsSection(Section):
    """HTTPS instead of HTTP."""

    cert_file: str | None = None
    """The certificate, followed by its chain, in PEM format. If set, the server speaks only HTTPS."""
    key_file: str | None = None
    """The certificate's private key, in PEM format. Unset: it is in `cert_file`."""
    key_password_file: str | None = None
    """File with the password of an encrypted private key."""
    client_ca_file: str | None = None
    """Certificates in PEM format. Only clients with a certificate signed by one of them may connect."""


class BudgetSection(Section):
    """What requests may cost beyond what is ordinary. It is computed from what they ask for, before any of it is built;
    unset lengths of answers with log-probabilities or hidden states are cut to what is left."""

    request_bytes: PositiveInt = 64 * 1024 * 1024
    """Maximum memory of one HTTP request in the API process, for log-probabilities (320 bytes each), vectors, prompts
    and answers. A request for more gets 400."""
    total_bytes: PositiveInt = 192 * 1024 * 1024
    """The same for all requests in progress together. A further costly request gets 503."""
    request_steps: PositiveInt = 4096
    """Maximum steps per character of output for stop strings (1 each) and stop expressions (1 per state, and once 1 per
    16 characters) of one HTTP request, for all of its answers together; 16 per answer are free. A request for more gets
    400."""
    total_steps: PositiveInt = 8192
    """The same for all requests in progress together. A further costly request gets 503."""


class ServerSection(Section):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 30000
    """Port to listen on; 0 picks a free one."""
    api_key: Annotated[KeyList, Field(repr=False)] = ()
    """API keys. Requests must have one of them, as `Authorization: Bearer KEY` or `x-api-key: KEY`. Other users of the
    machine can read command lines, so prefer `api_key_file` or `PEGBOARD__SERVER__API_KEY`."""
    api_key_file: str | None = None
    """File with further API keys, one per line. `NAME: KEY` gives a key a name, which gates and logs use; otherwise it
    has a number."""
    admin_key: Annotated[KeyList, Field(repr=False)] = ()
    """Admin keys, which open all routes. If there are API keys but no admin key, no client may use admin routes."""
    admin_key_file: str | None = None
    """File with further admin keys, one per line, with or without names."""
    cache_salt_by_key: bool = False
    """Let requests share cached prefixes only with requests of the same key, so that clients cannot find out what
    others have sent. `cache_salt` in a request separates further."""
    cors: CorsSection = CorsSection()
    """Web pages of other origins that may use the server."""
    tls: TlsSection = TlsSection()
    """HTTPS instead of HTTP."""
    access_log: bool = False
    """Log a line per HTTP request: its method, path, status and time, never its query, headers or body."""
    shutdown_timeout: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that running requests have to finish when the server is told to stop."""
    max_body_bytes: PositiveInt = 16 * 1024 * 1024
    """Largest request body in bytes; a larger body gets 413. On routes without prompts the limit is 1 MiB."""
    budget: BudgetSection = BudgetSection()
    """What requests may cost beyond what is ordinary."""

    @model_validator(mode="after")
    def _tls_needs_a_certificate(self) -> ServerSection:
        tls = self.tls
        named = [name for name in ("key_file", "key_password_file", "client_ca_file") if getattr(tls, name) is not None]
        if named and tls.cert_file is None:
            raise ValueError(f"server.tls.{named[0]} is set, but server.tls.cert_file is not")
        return self


class MemorySection(Section):
    """KV memory."""

    page_size: PositiveInt = 1
    """Tokens per page: the unit in which KV memory is allocated, shared and evicted."""
    max_total_tokens: PositiveInt | None = None
    """Size of the KV pool in tokens. Unset: what fits into the memory that the weights leave free."""
    typical_length: PositiveInt | None = None
    """Tokens of a typical request, prompt and output together. Layers that keep a window of the newest tokens share
    memory with those that keep all of them so that such requests use all of it. Unset: 4096, or the context if that is
    shorter."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Size of the KV pool as a share of the GPU memory that the weights leave free. Unset: all that the largest steps
    do not need; the start runs these steps to find out."""
    prepare_seconds: Annotated[float, Field(ge=0)] = 3.0
    """Seconds in which a server's start may allocate KV memory on the host, which the system only provides when it is
    written to. The rest is allocated by the first requests, which are then slower. 0: all of it."""
    kv_dtype: Literal["auto", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of stored keys and values. 8-bit types take half the memory of bfloat16. Any type but the model's needs an
    attention backend with the capability `kv_fp8`. `auto`: the model's type, or on a GPU `fp8_e4m3` if the checkpoint's
    config asks for it."""
    pool: UseSection = UseSection()
    """The buffers in which keys and values live."""
    allocator: UseSection = UseSection()
    """Allocator of the pool's free pages."""


class SchedulerSection(SchedulerSettings, Section):
    """What runs when."""

    policy: UseSection = UseSection()
    """Order of the waiting queue, and which requests are retracted first."""
    chunked_prefill_size: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of prompt tokens per step; longer prompts run in chunks. 0: no chunks. Unset: 512 on a CPU, 2048
    on a GPU (with `mixed_chunk: false` it depends on its memory)."""
    watchdog_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds after which a step counts as hung, and the scheduler is restarted. If it is stopped, or hangs elsewhere,
    this is noticed after a quarter more and two seconds."""
    decode_log_interval: Annotated[int, Field(ge=0)] = 40
    """Number of decode steps per log line; 0: no lines. Each prefill gets a line."""


class PluginsSection(Section):
    """Installed plugins. `NAME: true` switches on the hooks of one, or a section with their options does; `NAME: false`
    leaves it out.
    """

    disable: tuple[str, ...] = ()
    """Names of plugins that are not imported."""


class EngineConfig(Section):
    """One engine's whole configuration."""

    preset: str | None = None
    """A named set of defaults that files, environment and options override."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """`json`: one object per line, with the line's figures as fields."""
    model: ModelSection
    """The model, and the family of networks that runs it."""
    runner: UseSection = UseSection()
    """What executes a batch: logits, processors, sampling."""
    attention: UseSection = UseSection()
    """The attention backend."""
    memory: MemorySection = MemorySection()
    """KV memory."""
    prefix_cache: UseSection = UseSection()
    """The KV that is kept of prompts and outputs."""
    scheduler: SchedulerSection = SchedulerSection()
    """What runs when."""
    gates: tuple[UseSection, ...] = ()
    """Admission gates that a request passes before it enters the queue, in this order: names, or `{use: name, option:
    value}`."""
    logits_processors: tuple[UseSection, ...] = ()
    """Logits processors, in the order in which they run: names, or `{use: name, option: value}`."""
    sampler: UseSection = UseSection()
    """The sampler: logits to tokens."""
    sampling_defaults: SamplingDefaults = "model"
    """Defaults of sampling parameters that a request leaves out. `model`: those of the model's generation_config.json;
    `none`: those of the APIs; or values such as `{temperature: 0.6, top_k: 20}`, which override the model's."""
    apis: tuple[UseSection, ...] = ()
    """HTTP APIs to offer: names, or `{use: name, option: value}`."""
    server: ServerSection = ServerSection()
    """The HTTP server."""
    plugins: PluginsSection = PluginsSection()
    """Installed plugins. `plugins.NAME: true` switches on the hooks of one that is not built in, as a section with
    their options does; `plugins.NAME: false` leaves a plugin out."""

    @model_validator(mode="after")
    def _chunk_holds_a_page(self) -> EngineConfig:
        chunk = self.scheduler.chunked_prefill_size
        if chunk and chunk < self.memory.page_size:
            raise ValueError(
                f"scheduler.chunked_prefill_size {chunk} is less than memory.page_size {self.memory.page_size}: "
                "a chunk must hold at least one page"
            )
        return self
