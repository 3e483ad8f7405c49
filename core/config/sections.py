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
    """Type of weights and KV; `auto` takes the checkpoint's own on a GPU, and on a CPU bfloat16 for 16-bit checkpoints
    where the CPU computes with it (AMX, AVX-512 bf16), else float32."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Where it runs: `cpu`, `cuda`, `cuda:N`, or `auto`: the first GPU where there is one."""
    context_length: PositiveInt | None = None
    """Most tokens of prompt and output together; unset: what the model was made for."""
    cache_dir: str | None = None
    """Where converted models are kept; unset: `pegboard` in the user's cache directory."""
    chat_template: str | None = None
    """File with a chat template (Jinja) to use in place of the model's own."""
    hidden_states: bool = False
    """Let requests ask for hidden states: they are large, and say much about a model."""
    served_name: NameList = ()
    """Name under which APIs offer the model, or several: answers have the first, requests may use any. Unset: the last
    part of `path`."""


class CorsSection(Section):
    """Web pages of other origins that may use the server."""

    allow_origins: tuple[Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+)$")], ...] = ()
    """Origins whose pages may call, such as `https://chat.example.com`; `*` is all. Empty: browsers keep pages of other
    origins from it. Cookies are never asked for: pages send a key as everybody does."""
    max_age: Annotated[int, Field(ge=0)] = 600
    """Seconds for which a browser may remember that it was allowed."""


class TlsSection(Section):
    """HTTPS instead of HTTP."""

    cert_file: str | None = None
    """The certificate, with the chain after it, in PEM format; set, the server speaks HTTPS only."""
    key_file: str | None = None
    """Its private key, in PEM format; unset: it lies in `cert_file` as well."""
    key_password_file: str | None = None
    """File with the password of the private key, where that is encrypted."""
    client_ca_file: str | None = None
    """Certificates, in PEM format, one of which must have signed a client's own: others are not let in."""


class BudgetSection(Section):
    """What requests may cost beyond what is ordinary. It is computed from what they ask for, before any of it is built;
    unset lengths of answers with log-probabilities or hidden states are cut to what is left."""

    request_bytes: PositiveInt = 64 * 1024 * 1024
    """Most memory that one HTTP request may take in the API process, for log-probabilities (320 bytes each), vectors,
    prompts and answers; one that asks for more is answered with 400."""
    total_bytes: PositiveInt = 192 * 1024 * 1024
    """The same of all requests in progress; one more costly request is answered with 503."""
    request_steps: PositiveInt = 4096
    """Most steps per character of output that the stop strings (1 each) and stop expressions (1 per state, and 1 per 16
    characters once) of one HTTP request may take, all its answers together; 16 per answer are free. More is answered
    with 400."""
    total_steps: PositiveInt = 8192
    """The same of all requests in progress; one more costly request is answered with 503."""


class ServerSection(Section):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 30000
    """Port to listen on; 0 picks a free one."""
    api_key: Annotated[KeyList, Field(repr=False)] = ()
    """One key or several, one of which requests must bring as `Authorization: Bearer KEY` or `x-api-key: KEY`. Options
    of the command line are public on a machine: prefer `api_key_file`, or `PEGBOARD__SERVER__API_KEY`."""
    api_key_file: str | None = None
    """File with further API keys, one per line; with a name in front (`NAME: KEY`), which gates and logs may tell, or
    else a key is called by its number."""
    admin_key: Annotated[KeyList, Field(repr=False)] = ()
    """One key or several for the routes of admins, and for all others. Without one, but with an API key, no client may
    use the routes of admins."""
    admin_key_file: str | None = None
    """File with further admin keys, one per line, with or without a name."""
    cache_salt_by_key: bool = False
    """Let requests share cached prefixes only with those that bring the same key: no client can find out what others
    have asked. Their own `cache_salt` separates further."""
    cors: CorsSection = CorsSection()
    """Web pages of other origins that may use the server."""
    tls: TlsSection = TlsSection()
    """HTTPS instead of HTTP."""
    access_log: bool = False
    """Log a line per HTTP request: its method, path, status and time, never its query, headers or body."""
    shutdown_timeout: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that running requests get to finish when the server is asked to stop."""
    max_body_bytes: PositiveInt = 16 * 1024 * 1024
    """Largest request body that is read, in bytes; a larger one is answered with 413. Routes that take no prompts read
    1 MiB at most."""
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
    """Tokens that the KV pool holds; unset: what fits into the memory that the weights leave free."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory, of what the weights leave free, that the KV pool takes; unset: all that the largest
    steps do not need, which are run at the start to find that out."""
    prepare_seconds: Annotated[float, Field(ge=0)] = 3.0
    """How long a server's start may take to get the memory of KV, on the device and on the host, from the system, where
    that is given only when it is written to, as on a CPU; 0 leaves all of it to the first requests, which are slower
    then."""
    kv_dtype: Literal["auto", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """The type in which keys and values are kept. Those of 8 bits take half the memory of bfloat16. One that is not the
    model's needs an attention backend with the capability `kv_fp8`. `auto`: the model's, or on a GPU `fp8_e4m3` for a
    checkpoint whose config says that it was made for that."""
    pool: UseSection = UseSection()
    """The buffers in which keys and values live."""
    allocator: UseSection = UseSection()
    """Allocator of the pool's free pages."""


class SchedulerSection(SchedulerSettings, Section):
    """What runs when."""

    policy: UseSection = UseSection()
    """Order of the waiting queue, and which requests are retracted first."""
    chunked_prefill_size: Annotated[int, Field(ge=0)] | None = None
    """Most prompt tokens per step: longer prompts run in chunks. Unset: 2048 on a GPU, with `mixed_chunk: false` by its
    memory, and 512 on a CPU; 0: no chunks."""
    watchdog_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that one step may take before the scheduler counts as hung; it is restarted then. One that is stopped, or
    hangs elsewhere, is noticed after a quarter more and two seconds."""
    decode_log_interval: Annotated[int, Field(ge=0)] = 40
    """Decode steps per log line about them; 0: none. Prefills get a line each."""


class PluginsSection(Section):
    """Installed plugins. `NAME: true` switches on the hooks of one, or a section with their options does; `NAME: false`
    leaves it out.
    """

    disable: tuple[str, ...] = ()
    """Plugins that are not even imported, by name."""


class EngineConfig(Section):
    """One engine's whole configuration."""

    preset: str | None = None
    """A named set of defaults that files, environment and options override."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""
    log_format: Literal["text", "json"] = "text"
    """`json`: one object per line, with the figures of a line as fields of their own."""
    model: ModelSection
    """The model, and the family of networks that runs it."""
    runner: UseSection = UseSection()
    """What executes a batch: logits, processors, sampling."""
    attention: UseSection = UseSection()
    """The attention backend."""
    memory: MemorySection = MemorySection()
    """KV memory."""
    prefix_cache: UseSection = UseSection()
    """What is remembered of finished requests' prompts and outputs."""
    scheduler: SchedulerSection = SchedulerSection()
    """What runs when."""
    gates: tuple[UseSection, ...] = ()
    """What a request passes before it may wait for its turn, in this order: names, or `{use: name, option: value}`."""
    logits_processors: tuple[UseSection, ...] = ()
    """What changes logits before sampling, in this order: names, or `{use: name, option: value}`."""
    sampler: UseSection = UseSection()
    """What turns logits into tokens."""
    sampling_defaults: SamplingDefaults = "model"
    """What holds for sampling parameters that a request leaves open. `model`: what the model's generation_config.json
    says; `none`: the defaults of the APIs; or values such as `{temperature: 0.6, top_k: 20}`, laid over the model's."""
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
