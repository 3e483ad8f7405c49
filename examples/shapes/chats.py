"""Conversations about pictures of shapes: questions in many wordings, and the answers that the model learns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from examples.shapes.pictures import COLOURS, NUMBERS, SHAPES, Scene, plural

QUESTIONS = {
    "colour": (
        "What colour is it?",
        "What color is it?",
        "What colour are the shapes?",
        "What color are they?",
        "Which colour do you see?",
        "Which color is this?",
        "Name the colour.",
        "What is the colour of the shapes?",
        "What colour is in the picture?",
        "Tell me the color.",
    ),
    "count": (
        "How many shapes are there?",
        "How many are there?",
        "How many shapes do you see?",
        "How many do you see?",
        "Count the shapes.",
        "What is the number of shapes?",
        "How many things are in the picture?",
        "How many objects does the image show?",
        "Tell me the number of shapes.",
        "How many?",
    ),
    "shape": (
        "Which shape is it?",
        "What shape is it?",
        "What shape do you see?",
        "Which shape is in the picture?",
        "What kind of shape is this?",
        "Name the shape.",
        "What shape are they?",
        "What shape does the image show?",
        "Tell me the shape.",
        "Which shape is this?",
    ),
    "all": (
        "What do you see?",
        "What is this?",
        "Describe the picture.",
        "Describe the image.",
        "What is in the picture?",
        "What is in this image?",
        "What does the picture show?",
        "Tell me what you see.",
    ),
}
"""By what they ask for. The answers: "red", "three", "star", "three red stars"."""

OF_TWO = {
    "colour": ("What colour is the {} picture?", "Which color do you see in the {} picture?"),
    "count": ("How many shapes are in the {} picture?", "Count the shapes in the {} image."),
    "shape": ("Which shape is in the {} picture?", "What shape does the {} image show?"),
    "all": ("Describe the {} picture.", "What is in the {} image?", "What do you see in the {} picture?"),
}
IS_IT = ("Is it {}?", "Are they {}?", "Is the colour {}?", "Do you see {}?", "Is there any {}?")
GREETINGS = ("Hello", "Hello!", "Hi", "Who are you?", "What can you do?")
NO_PICTURE = "I see no picture."
SYSTEM = ("You are a helpful assistant.", "Answer in short.", "You answer questions about pictures.")

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages in the way of chat templates, their last one an answer, and the scenes that their pictures show."""

    messages: list[Message]
    scenes: tuple[Scene, ...]


def answer(kind: str, scene: Scene) -> str:
    """Return what the model should say."""
    words = {"colour": scene.colour, "count": NUMBERS[scene.count - 1], "shape": scene.shape, "all": scene.words}
    return words[kind]


def question(text: str, pictures: int, text_first: bool = False) -> Message:
    """Return a user's message with so many pictures before or after its text."""
    if not pictures:
        return {"role": "user", "content": text}
    parts: list[dict[str, str]] = [{"type": "image"} for _ in range(pictures)]
    parts.insert(0 if text_first else pictures, {"type": "text", "text": text})
    return {"role": "user", "content": parts}


def random_chat(rng: random.Random, scenes: Sequence[Scene], turns: int) -> Chat:
    """Return so many questions and answers about one scene, or two scenes, or, with none, about what is not there."""
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    # Of two pictures, both come with the first question, or the second one comes with a later question. Questions that
    # say nothing else are about the last picture so far.
    start = rng.randrange(1, turns) if len(scenes) == 2 and turns > 1 and rng.random() < 0.5 else 0
    shown = 0
    for turn in range(turns):
        new = len(scenes[shown:]) if turn == start else int(turn == 0)
        shown += new
        last_only = start > 0 and rng.random() < (0.7 if shown == 2 else 1.0)
        text, reply = _exchange(rng, scenes[shown - 1 : shown] if last_only else scenes[:shown])
        messages.append(question(_spelled(rng, text), new, rng.random() < 0.25))
        messages.append({"role": "assistant", "content": reply})
    return Chat(messages, tuple(scenes))


def _exchange(rng: random.Random, scenes: Sequence[Scene]) -> tuple[str, str]:
    kind = rng.choices(("colour", "count", "shape", "all"), (2, 4, 4, 4))[0]
    if not scenes:
        return rng.choice(GREETINGS if rng.random() < 0.2 else QUESTIONS[kind]), NO_PICTURE
    if len(scenes) == 2:
        which = rng.randrange(2)
        return rng.choice(OF_TWO[kind]).format(("first", "second")[which]), answer(kind, scenes[which])
    if rng.random() < 0.08:
        return _is_it(rng, scenes[0])
    return rng.choice(QUESTIONS[kind]), answer(kind, scenes[0])


def _is_it(rng: random.Random, scene: Scene) -> tuple[str, str]:
    """Return a question for yes or no; both are as likely."""
    true = rng.random() < 0.5
    if rng.random() < 0.5:
        word = scene.colour if true else rng.choice([one for one in COLOURS if one != scene.colour])
        return rng.choice(IS_IT).format(word), "yes" if true else "no"
    word = scene.shape if true else rng.choice([one for one in SHAPES if one != scene.shape])
    text = rng.choice((f"Are these {plural(word)}?", f"Do you see {plural(word)}?", f"Is there a {word}?"))
    return text, "yes" if true else "no"


def _spelled(rng: random.Random, text: str) -> str:
    """Return the question as people type it: sometimes in small letters, sometimes without the mark at its end."""
    if rng.random() < 0.15:
        text = text.lower()
    return text.rstrip("?.!") if rng.random() < 0.1 else text


def all_texts() -> list[str]:
    """Return every text that chats are made of, for the tokenizer."""
    questions = [text for texts in QUESTIONS.values() for text in texts]
    questions += [text.format(word) for texts in OF_TWO.values() for text in texts for word in ("first", "second")]
    questions += [text.format(word) for text in IS_IT for word in (*COLOURS, *SHAPES)]
    kinds = [*SHAPES, *map(plural, SHAPES)]
    names = [f"{number} {colour} {kind}" for number in NUMBERS for colour in COLOURS for kind in kinds]
    words = [word for words in (COLOURS, SHAPES, NUMBERS, ("yes", "no", NO_PICTURE)) for word in words]
    roles = [f"{role}\n" for role in ("user", "assistant", "system")]
    return [*questions, *map(str.lower, questions), *names, *words * 20, *GREETINGS, *SYSTEM, *roles * 50]
