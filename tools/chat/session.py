"""The conversation of ``pegboard chat``: its history, its settings, and the commands that work on them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.errors import InvalidRequest, PegboardError
from pegboard.toolkit.text.near_names import did_you_mean
from pegboard.tools.chat.attachments import OF_A_FILE, addresses, attachment, shown, with_attached
from pegboard.tools.chat.backends import Figures, sampling_params

if TYPE_CHECKING:
    from pegboard.toolkit.media.inputs import MediaKind
    from pegboard.tools.chat.attachments import Content, Part
    from pegboard.tools.chat.backends import Message, Speaker
    from pegboard.tools.chat.terminal import Terminal

EFFORTS = ("none", "low", "medium", "high")

CONTEXT_FULL = (
    "the conversation no longer fits into the model's context: /drop forgets its older half, /reset all of it; "
    "/retry then sends the message again"
)


def _number(text: str) -> float:
    return float(text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _texts(text: str) -> list[str]:
    value = json.loads(text) if text[:1] in ('"', "[") else text
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(text)
    return value


def _effort(text: str) -> str:
    if text not in EFFORTS:
        raise ValueError(text)
    return text


SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (_number, "a number, 0 is greedy"),
    "top_p": (_number, "a number up to 1"),
    "top_k": (int, "a whole number, -1 is off"),
    "min_p": (_number, "a number from 0 to 1"),
    "frequency_penalty": (_number, "a number from -2 to 2"),
    "presence_penalty": (_number, "a number from -2 to 2"),
    "repetition_penalty": (_number, "a number up to 2"),
    "max_tokens": (_positive, "a whole number from 1"),
    "seed": (int, "a whole number"),
    "stop": (_texts, "a text, or a JSON list of texts"),
    "reasoning_effort": (_effort, " or ".join(EFFORTS)),
}
"""What /set takes: how each is read, and what it must look like."""


def parse_setting(name: str, text: str) -> Any:
    """Return the value of a setting. Raises PegboardError for an unknown name, and for what cannot be."""
    if name not in SETTINGS:
        hint = did_you_mean(name, list(SETTINGS)) or f"there are: {', '.join(SETTINGS)}"
        raise PegboardError(f"there is no setting {name!r}; {hint}")
    read, form = SETTINGS[name]
    try:
        value = read(text.strip())
    except ValueError:
        raise PegboardError(f"{name} must be {form}, not {text.strip()!r}") from None
    sampling_params({name: value})
    return value


class Session:
    """One conversation with one speaker. `failed` counts messages that got no answer."""

    def __init__(
        self, speaker: Speaker, terminal: Terminal, *, system: str = "", settings: Mapping[str, Any] | None = None
    ) -> None:
        self.speaker = speaker
        self.system = system
        self.settings = dict(settings or {})
        self.messages: list[Message] = []
        self.failed = 0
        self._terminal = terminal
        self._unanswered: Content | None = None
        """The last message, where it got no answer; it is not in `messages`."""
        self._attached: list[Part] = []
        """What goes with the next message."""
        self._file_names: dict[str, str] = {}
        """What the files were called that were attached, by the addresses that they have in messages."""
        self._last: Figures | None = None
        self._all: list[Figures] = []
        self._own_files: set[Path] = set()
        """Files that may be overwritten without asking: this chat has written or read them."""

    def handle(self, text: str) -> bool:
        """Handle a message, or a command. False where it is the command to end."""
        if not text.strip():
            return True
        if not text.startswith("/") or text.startswith("//"):
            attached, self._attached = self._attached, []
            self.ask(with_attached(text.removeprefix("/") if text.startswith("//") else text, attached))
            return True
        name, _, rest = text[1:].partition(" ")
        name, lines, more = name.partition("\n")
        if name in ("quit", "exit", "bye"):
            return False
        command = COMMANDS.get(name)
        if command is None:
            hint = did_you_mean(name, list(COMMANDS)) or "/help lists them"
            self._note(f"there is no command /{name[:64]}; {hint} (// begins a message with a slash)")
            return True
        try:
            command(self, f"{lines}{more} {rest}".strip())
        except PegboardError as error:
            self._note(f"error: {error}")
        return True

    # ---- messages -------------------------------------------------------------------------------------------------

    def ask(self, question: Content) -> None:
        """Send a message and show the answer as it comes. Where it is stopped, what was said stays; where it fails
        before anything was said, nothing does, and /retry sends the message again.
        """
        self._unanswered = question
        said: list[str] = []
        figures = self._last = Figures()
        system = [{"role": "system", "content": self.system}] if self.system else []
        conversation = [*system, *self.messages, {"role": "user", "content": question}]
        interrupted = False
        problem = ""
        try:
            with contextlib.closing(self.speaker.answer(conversation, self.settings, figures)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    if piece.reasoning:
                        self._terminal.think(piece.text)
                    else:
                        said.append(piece.text)
                        self._terminal.say(piece.text)
        except KeyboardInterrupt:
            interrupted = True
        except PegboardError as error:
            full = isinstance(error, InvalidRequest) and error.code == "context_length_exceeded"
            problem = CONTEXT_FULL if full else f"error: {error}{self._which(error, question)}"
        self._terminal.end_answer()
        self._all.append(figures)
        answered = bool(said) or not (problem or interrupted)
        if answered:
            self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "".join(said)}]
            self._unanswered = None
        if problem:
            self.failed += 1
            self._note(problem)
        elif interrupted:
            self._note("(stopped)" if answered else "(stopped; /retry asks again)")
            if not self._terminal.interactive:
                raise KeyboardInterrupt
        elif figures.finish_reason == "length":
            self._note(self._why_short(figures))

    def _which(self, error: PegboardError, question: Content) -> str:
        """Return which files a message came with, where one of them cannot be read."""
        if not isinstance(error, InvalidRequest) or error.code not in OF_A_FILE:
            return ""
        names = [self._file_names[one] for one in addresses(question) if one in self._file_names]
        return f" (attached: {', '.join(names)})" if names else ""

    def _why_short(self, figures: Figures) -> str:
        most = self.settings.get("max_tokens")
        if most is not None and figures.completion_tokens >= most:
            return f"(cut off after {most} tokens; /set max_tokens changes that)"
        return "(the context is full; /drop forgets the older half of the conversation, /reset all of it)"

    def _note(self, text: str) -> None:
        self._terminal.note(text)

    def _say_length(self, what: str) -> None:
        count = sum(one["role"] == "user" for one in self.messages)
        self._note(f"{what}; {count} message{'' if count == 1 else 's'} of yours in the conversation")

    # ---- commands -------------------------------------------------------------------------------------------------

    def help(self, rest: str) -> None:
        """list the commands"""
        width = max(len(f"{name} {ARGUMENTS.get(name, '')}") for name in COMMANDS) + 3
        for name, command in COMMANDS.items():
            shown = f"/{name} {ARGUMENTS.get(name, '')}"
            self._note(f"{shown:{width}}{command.__doc__}")
        self._note(f"{'/quit':{width}}end the chat (or Ctrl-D)")
        self._note('A \\ at the end of a line continues it; ``` or """ alone on a line begins and ends several lines.')
        self._note("Ctrl-C stops an answer, and what was said stays in the conversation.")

    def reset(self, rest: str) -> None:
        """forget the conversation; the system message and the settings stay"""
        self.messages.clear()
        self._attached.clear()
        self._file_names.clear()
        self._unanswered = None
        self._note("the conversation begins anew")

    def set_system(self, rest: str) -> None:
        """set the system message, for the whole conversation; - removes it, nothing shows it"""
        if rest:
            self.system = "" if rest == "-" else rest
        self._note(f"system: {self.system}" if self.system else "there is no system message")

    def undo(self, rest: str) -> None:
        """forget the last message and its answer"""
        if self._unanswered is None and not self.messages:
            raise PegboardError("there is nothing to forget")
        self._take_last()
        self._say_length("forgotten")

    def retry(self, rest: str) -> None:
        """answer the last message again"""
        if self._unanswered is None and not self.messages:
            raise PegboardError("nothing was asked yet")
        before = list(self.messages)
        self.ask(self._take_last())
        if self._unanswered is not None and self.messages != before:
            # An answer is better than none.
            self.messages, self._unanswered = before, None

    def drop(self, rest: str) -> None:
        """forget the N oldest messages and their answers, or the older half"""
        starts = [place for place, one in enumerate(self.messages) if one["role"] == "user"]
        try:
            count = int(rest) if rest else (len(starts) + 1) // 2
        except ValueError:
            raise PegboardError(f"/drop takes a number of messages, not {rest!r}") from None
        if not starts or count < 1:
            raise PegboardError("there is nothing to forget")
        self.messages = self.messages[starts[count] :] if count < len(starts) else []
        self._say_length("forgotten")

    def show(self, rest: str) -> None:
        """show the conversation"""
        system = [{"role": "system", "content": self.system}] if self.system else []
        for one in [*system, *self.messages]:
            self._note(f"{one['role']}:")
            self._terminal.say(shown(one["content"]))
            self._terminal.end_answer()
        if not self.messages and not system:
            self._note("nothing was said yet")

    def stats(self, rest: str) -> None:
        """say what the last answer took, and all of them"""
        if self._last is None:
            raise PegboardError("nothing was answered yet")
        self._note(f"model: {self.speaker.name}")
        self._note(f"last answer: {_described(self._last)}")
        about = "" if all(one.exact for one in self._all) else "about "
        prompt, cached = sum(one.prompt_tokens for one in self._all), sum(one.cached_tokens for one in self._all)
        share = f" ({cached / prompt:.0%} cached)" if prompt else ""
        completion = sum(one.completion_tokens for one in self._all)
        seconds = sum(one.seconds for one in self._all)
        answers = f"{len(self._all)} answer{'' if len(self._all) == 1 else 's'}"
        self._note(f"{answers}: {about}{prompt} tokens in{share}, {completion} out, {seconds:.1f} s in all")

    def set(self, rest: str) -> None:
        """set temperature, top_p, max_tokens, ...; - is the default, nothing shows all"""
        name, _, text = rest.replace("=", " ", 1).partition(" ")
        if name and text.strip():
            if text.strip() == "-" and name in SETTINGS:
                self.settings.pop(name, None)
            else:
                self.settings[name] = parse_setting(name, text)
        elif name:
            parse_setting(name, text) if name not in SETTINGS else None
        for one in [name] if name else SETTINGS:
            shown = json.dumps(self.settings[one], ensure_ascii=False) if one in self.settings else "the default"
            self._note(f"{one}: {shown}")

    def save(self, rest: str) -> None:
        """write the conversation to a JSON file (-f FILE overwrites one)"""
        force = rest.startswith("-f ")
        path = _path(rest.removeprefix("-f "), "/save")
        if path.exists() and not force and path not in self._own_files:
            raise PegboardError(f"{path} is there already; /save -f {path} overwrites it")
        data = {
            "model": self.speaker.name,
            "system": self.system,
            "settings": self.settings,
            "messages": self.messages,
        }
        try:
            path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8", errors="backslashreplace")
        except OSError as error:
            raise PegboardError(f"{path} cannot be written: {error.strerror}") from None
        self._own_files.add(path)
        self._note(f"saved to {path}")

    def load(self, rest: str) -> None:
        """go on with a saved conversation, or with a JSON list of messages"""
        from pegboard.tools.chat.conversation import check_messages

        path = _path(rest, "/load")
        try:
            data = json.loads(path.read_text("utf-8"))
            data = {"messages": data} if isinstance(data, list) else data
            messages = check_messages(data["messages"], media=True) if data["messages"] else []
        except OSError as error:
            raise PegboardError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise PegboardError(f"{path} holds no conversation: {error}") from None
        system = str(data.get("system") or "")
        while messages and messages[0]["role"] in ("system", "developer"):
            system = "\n\n".join(filter(None, [system, shown(messages.pop(0)["content"])]))
        settings = data.get("settings")
        known = {
            name: parse_setting(name, value if isinstance(value, str) else json.dumps(value))
            for name, value in (settings.items() if isinstance(settings, dict) else ())
            if name in SETTINGS
        }
        self.messages, self.system, self.settings, self._unanswered = messages, system, {**self.settings, **known}, None
        self._own_files.add(path)
        self._say_length(f"loaded {path}")

    def image(self, rest: str) -> None:
        """attach a picture to the next message; - forgets what is attached"""
        self._attach(rest, "image")

    def video(self, rest: str) -> None:
        """attach a video to the next message"""
        self._attach(rest, "video")

    def _attach(self, rest: str, kind: MediaKind) -> None:
        if rest == "-":
            self._attached.clear()
            self._note("nothing is attached")
            return
        path = _path(rest, f"/{kind}")
        self._attached.append(attachment(path, kind, f"/{kind}"))
        self._file_names |= dict.fromkeys(addresses(self._attached[-1:]), path.name)
        self._note(f"{path.name} goes with your next message")

    def _take_last(self) -> Content:
        """Return the last message of the user, out of the history together with all that came after it."""
        if self._unanswered is not None:
            question, self._unanswered = self._unanswered, None
            return question
        while self.messages:
            last = self.messages.pop()
            if last["role"] == "user":
                content: Content = last["content"]
                return content
        raise PegboardError("there is no message of yours in the conversation")


def _path(text: str, command: str) -> Path:
    if not text.strip():
        raise PegboardError(f"{command} needs the name of a file")
    return Path(text.strip()).expanduser()


def _described(figures: Figures) -> str:
    about = "" if figures.exact else "about "
    parts = []
    if figures.prompt_tokens:
        parts.append(f"{figures.prompt_tokens} tokens in ({figures.cached_tokens} cached)")
    parts.append(f"{about}{figures.completion_tokens} out")
    if figures.first is not None:
        parts.append(f"the first after {figures.first:.2f} s")
    if figures.rate is not None:
        parts.append(f"{figures.rate:.1f} tok/s")
    return ", ".join(parts)


COMMANDS: dict[str, Callable[[Session, str], None]] = {
    "help": Session.help,
    "reset": Session.reset,
    "system": Session.set_system,
    "retry": Session.retry,
    "undo": Session.undo,
    "drop": Session.drop,
    "show": Session.show,
    "stats": Session.stats,
    "set": Session.set,
    "save": Session.save,
    "load": Session.load,
    "image": Session.image,
    "video": Session.video,
}
_OF_FILES = dict.fromkeys(("save", "load", "image", "video"), "FILE")
ARGUMENTS = {"system": "[TEXT]", "drop": "[N]", "set": "[NAME VALUE]", **_OF_FILES}
