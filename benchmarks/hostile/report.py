"""The table of a run, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.hostile.attacks import ATTACKS

Record = dict[str, Any]


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{1000 * value:,.0f}"


def _health(one: Record) -> str:
    attacked = one["attacked"]
    text = " / ".join(_ms(attacked["health_s"].get(name)) for name in ("p50", "p99", "max"))
    said = [f"{attacked[f'health_{what}']} {what}" for what in ("failed", "open") if attacked[f"health_{what}"]]
    return f"{text} ({', '.join(said)})" if said else text


def _answers(one: Record) -> str:
    attack = one["attack"]
    return f"{attack['sent'] - attack['unanswered']} of {attack['sent']}"


def _stop(one: Record) -> str:
    stop = one["stop"]
    said = f"{stop['seconds']:.1f}" if stop["code"] is not None else f"over {stop['seconds']:.0f}"
    return said if stop["in_time"] else f"{said} (late)"


def _lost(one: Record) -> str:
    attacked = one["attacked"]
    bad = sum(count for outcome, count in attacked["streams"].items() if outcome != "200")
    tokens = f"{attacked['lost_tokens']} tokens"
    return f"{tokens}, {bad} of {sum(attacked['streams'].values())} streams" if bad else tokens


def _beside(one: Record) -> str:
    """Return what the client beside had to wait: in the quiet, and during the attack."""
    if "beside" not in one:
        return ""
    waits = (_waits(one["beside"][part]) for part in ("quiet", "attacked"))
    return f"{ATTACKS[one['attack_name']].beside}: {' to '.join(waits)}"


def _waits(beside: Record) -> str:
    seconds = beside["seconds"]
    bad = sum(count for outcome, count in beside["outcomes"].items() if outcome != "200")
    said = f"{_ms(seconds.get('p50'))} / {_ms(seconds.get('max'))}"
    return f"{said} ({bad} failed)" if bad else said


COLUMNS: dict[str, Callable[[Record], str]] = {
    "health p50 / p99 / max, ms": _health,
    "gap p99, ms": lambda one: _ms(one["attacked"]["gap_s"].get("p99")),
    "longest silence, ms": lambda one: _ms(one["attacked"]["silence_s"]),
    "longest wait for a first token, ms": lambda one: _ms(one["attacked"]["first_s"].get("max")),
    "client beside, p50 / max, ms": _beside,
    "API, MB": lambda one: f"{one['memory']['peak']['api'] / 2**20:,.0f}",
    "scheduler, MB": lambda one: f"{one['memory']['peak']['scheduler'] / 2**20:,.0f}",
    "answered": _answers,
    "lost": _lost,
    "SIGTERM, s": _stop,
}


def table(records: Sequence[Record]) -> str:
    """Return one row per attack; where several subjects were measured, their figures with arrows in between."""
    names = list(dict.fromkeys(one["attack_name"] for one in records))
    subjects = list(dict.fromkeys(one["subject"] for one in records))
    lines = []
    if len(subjects) > 1:
        lines += [f"Each cell: {' → '.join(subjects)}.", ""]
    lines += ["| attack | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in names:
        rows = {one["subject"]: one for one in records if one["attack_name"] == name}
        cells = []
        for show in COLUMNS.values():
            said = ["failed" if "error" in rows[s] else show(rows[s]) for s in subjects if s in rows]
            cells.append(" → ".join(said))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "What the attacks are:", ""]
    lines += [f"- {name} (item {ATTACKS[name].item}): {ATTACKS[name].what}" for name in names]
    return "\n".join(lines) + "\n"


def details(one: Record) -> list[str]:
    """Return what else was seen, a few lines."""
    if "error" in one:
        return [one["error"]]
    quiet, attacked, attack = one["quiet"], one["attacked"], one["attack"]
    memory = ", ".join(f"{name} {size / 2**20:,.0f} MB" for name, size in one["memory"]["peak"].items())
    outcomes = ", ".join(f"{outcome}: {count}" for outcome, count in attack["outcomes"].items())

    def beside(what: str, part: str, which: str) -> str:
        return f"{what} {_ms(attacked[part].get(which))} ms (quiet: {_ms(quiet[part].get(which))})"

    lines = [
        f"{beside('health p99', 'health_s', 'p99')}; all {_health(one)}; asker late by {_ms(one['lag_s'])} ms",
        f"{beside('gap p99', 'gap_s', 'p99')}; {beside('longest wait for a first token', 'first_s', 'max')}",
        f"longest silence {_ms(attacked['silence_s'])} ms (quiet: {_ms(quiet['silence_s'])})",
        f"events per second: {attacked['events_per_s']} (quiet: {quiet['events_per_s']})",
        f"memory: {memory}; restarts of the scheduler: {one['restarts']}",
        f"attack: {attack['sent']} sent, {attack['unanswered']} not answered, slowest {attack['slowest_s']:.1f} s",
        f"answers: {outcomes or 'none'}",
        f"honest streams: {dict(attacked['streams'])}; lost {_lost(one)}, of {attacked['counted_tokens']} tokens",
        f"scheduler: {one['scheduler']}",
        f"SIGTERM: {_stop(one)} s, exit code {one['stop']['code']}",
    ]
    if "beside" in one:
        for part, found in one["beside"].items():
            lines.append(f"client beside, {part}: {dict(found['outcomes'])}, seconds: {found['seconds']}")
    return lines
